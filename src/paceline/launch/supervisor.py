"""Watches the workers of one launch: their output, their reports, their ends, and the user's Ctrl-C."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import selectors
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import PacelineError
from paceline.launch import failures
from paceline.launch.base import Outcome
from paceline.launch.console import Console
from paceline.launch.failures import Failure
from paceline.launch.forkserver import ForkServer
from paceline.launch.job import Job
from paceline.launch.store import ServeStore
from paceline.world import env

FIRST_CAUSE_WAIT_S = 0.3
"""How long others may still report after the first failure, so that the cause is found and not its echo."""
ECHO_WAIT_S = 2.0
"""The same while all that is known are lost peers: the one that began it may still be closing its files."""
TERMINATE_WAIT_S = 1.0
"""From SIGTERM to SIGKILL."""
_CHUNK = 1 << 16


@dataclass
class _Worker:
    rank: int
    ticket: int
    pid: int | None = None
    status: int | None = None
    result: Any = None
    reported: Failure | None = None
    control: Connection | None = field(default=None, repr=False)


class Supervisor:
    """Everything that happens between the start of the first worker and the end of the last."""

    def __init__(self, server: ForkServer, folder: Path, console: Console) -> None:
        self._server = server
        self._folder = folder
        self._console = console
        self._workers: dict[int, _Worker] = {}
        self._store: _Worker | None = None
        self._failures: list[Failure] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ, self._on_report)
        self._logs: list[BinaryIO] = []
        self._open_pipes = 0
        self._interrupted: int | None = None
        self._deadline: float | None = None
        self._next_signal = signal.SIGTERM
        self._host = env.host()

    def start_store(self, like: Job, listening: socket.socket) -> None:
        """Ask for the process that serves the store."""
        host, port = listening.getsockname()
        job = dataclasses.replace(like, call=ServeStore(host, port), threads=1)
        with (self._folder / "logs" / "store.log").open("ab") as log, open_pipe() as (_, write):
            ticket = self._server.request(job, [log.fileno(), log.fileno(), write, listening.fileno()])
        self._store = _Worker(rank=-1, ticket=ticket)

    def start(self, job: Job, port: int) -> None:
        """Ask for one worker and listen to it."""
        rank = job.identity.rank
        job = dataclasses.replace(job, identity=dataclasses.replace(job.identity, master_port=port))
        log = (self._folder / "logs" / f"rank-{rank}.log").open("ab", buffering=0)
        self._logs.append(log)
        control, control_write = os.pipe()
        descriptors = [log.fileno(), log.fileno(), control_write]
        close_after = [control_write]
        if rank == 0:
            out, err, events = (self._pipe(callback) for callback in self._first_rank_streams(log))
            descriptors = [out, err, control_write, events]
            close_after = descriptors
        worker = _Worker(rank=rank, ticket=self._server.request(job, descriptors))
        for descriptor in close_after:
            os.close(descriptor)
        worker.control = Connection(control, writable=False)
        self._selector.register(worker.control, selectors.EVENT_READ, lambda: self._on_control(worker))
        self._workers[rank] = worker

    def run(self) -> Outcome:
        """Serve until every worker has ended and every byte it wrote has been read."""
        with self._signals():
            while self._busy():
                self._turn()
        results = tuple(self._workers[rank].result for rank in sorted(self._workers))
        cause = failures.first_cause(self._failures) if self._failures else None
        return Outcome(results=results, failure=cause, interrupted=self._interrupted)

    def close(self) -> None:
        """End what still runs, and let go of every descriptor."""
        with contextlib.suppress(PacelineError):
            while self._server.alive() and (
                running := [one for one in self._everyone() if one.status is None]
            ):
                for worker in running:  # again each time: one that was asked for may only now be there
                    if worker.pid is not None:
                        self._server.signal(worker.pid, signal.SIGKILL)
                self._on_report()
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._server:
                _close(key.fileobj)
        self._selector.close()
        for log in self._logs:
            log.close()

    def _everyone(self) -> list[_Worker]:
        return [*self._workers.values(), *([self._store] if self._store else [])]

    def _busy(self) -> bool:
        if self._interrupted is not None and not self._server.alive():
            return False
        running = any(worker.status is None for worker in self._workers.values())
        return running or self._open_pipes > 0

    def _turn(self) -> None:
        wait = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        for key, _ in self._selector.select(wait):
            key.data()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            if self._interrupted is not None and any(one.pid is None for one in self._everyone()):
                self._server.kill()  # it still loads torch: waiting for that only to end its workers helps nobody
                return
            self._send_all(self._next_signal)
            self._next_signal = signal.SIGKILL
            self._deadline = time.monotonic() + TERMINATE_WAIT_S

    def _on_report(self) -> None:
        report = self._server.report()
        everyone = self._everyone()
        if "started" in report:
            worker = next(one for one in everyone if one.ticket == report["started"])
            worker.pid = report["pid"]
            self._write_roster()
            return
        worker = next(one for one in everyone if one.pid == report["ended"])
        worker.status = report["status"]
        if worker is self._store:
            return
        if worker.control is not None:
            self._on_control(worker)  # its last words may lie unread in the pipe
        if worker.status != 0 and worker.reported is None:
            self._fail(worker, failures.from_status(worker.status, worker.rank, self._host))

    def _on_control(self, worker: _Worker) -> None:
        if worker.control is None:
            return
        try:
            while worker.control.poll():
                kind, value = pickle.loads(worker.control.recv_bytes())  # noqa: S301  (from this run's own worker)
                if kind == "failure":
                    self._fail(worker, value)
                else:
                    worker.result = value
        except (EOFError, OSError):
            self._selector.unregister(worker.control)
            worker.control.close()
            worker.control = None

    def _fail(self, worker: _Worker, failure: Failure) -> None:
        worker.reported = failure
        self._logs[worker.rank].write((failure.trace or f"rank {failure.rank} {failure.message}\n").encode())
        if self._interrupted is None and self._next_signal == signal.SIGTERM:
            self._failures.append(failure)
            deadline = time.monotonic() + (ECHO_WAIT_S if failure.kind == "peer" else FIRST_CAUSE_WAIT_S)
            self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def _first_rank_streams(self, log: BinaryIO) -> Iterator[Any]:
        def forward(name: str) -> Any:
            def receive(chunk: bytes) -> None:
                log.write(chunk)
                self._console.output(name, chunk)

            return receive

        yield from (forward("out"), forward("err"), self._console.events)

    def _pipe(self, receive: Any) -> int:
        """Make a pipe whose bytes go to `receive`, and give its writing end."""
        read, write = os.pipe()

        def on_readable() -> None:
            chunk = os.read(read, _CHUNK)
            if chunk:
                receive(chunk)
            else:
                self._selector.unregister(read)
                os.close(read)
                self._open_pipes -= 1

        self._open_pipes += 1
        self._selector.register(read, selectors.EVENT_READ, on_readable)
        return write

    def _write_roster(self) -> None:
        """Rewrite workers.json: who runs where."""
        rows = [
            {"rank": worker.rank, "pid": worker.pid, "host": self._host, "generation": 0}
            for worker in sorted(self._workers.values(), key=lambda one: one.rank)
            if worker.pid is not None
        ]
        partial = self._folder / ".workers.json.partial"
        partial.write_text(json.dumps(rows, indent=1) + "\n")
        partial.replace(self._folder / "workers.json")

    def _send_all(self, number: signal.Signals) -> None:
        for worker in self._workers.values():
            if worker.pid is not None and worker.status is None:
                self._server.signal(worker.pid, number)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn SIGINT and SIGTERM into an orderly end of the workers, for as long as they run."""

        def interrupt(number: int, _: object) -> None:
            self._interrupted = self._interrupted or number
            self._deadline = time.monotonic()

        try:
            before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: whoever owns it decides
            yield
            return
        read, write = socket.socketpair()
        write.setblocking(False)
        old = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        self._selector.register(read, selectors.EVENT_READ, lambda: read.recv(64))
        try:
            yield
        finally:
            signal.set_wakeup_fd(old)
            self._selector.unregister(read)
            read.close()
            write.close()
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def open_pipe() -> Iterator[tuple[int, int]]:
    """Make a pipe and close both ends afterwards."""
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def _close(source: Any) -> None:
    if isinstance(source, int):
        os.close(source)
    else:
        source.close()
