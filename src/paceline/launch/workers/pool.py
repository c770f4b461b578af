"""The worker processes of one machine: starts them, hears them, and knows how each ended."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import selectors
import signal
import socket
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import PacelineError
from paceline.launch.file_writer import FileWriter
from paceline.launch.health.diagnosis import HangWatch, LocalWorker, look, process_state
from paceline.launch.job import Job
from paceline.launch.worker_output import STREAMS, WorkerOutput
from paceline.launch.workers import fork_server as forkserver
from paceline.launch.workers.fork_server import ForkServer
from paceline.launch.workers.process import Process
from paceline.observe.verdict import WorkerEvidence
from paceline.world import stacks
from paceline.world.status_page import OperationKind, Phase, Reading, StatusPage, StatusPageReader

LEFT_BEHIND_S = 5.0
"""How long a process may take to end after SIGKILL: one that the kernel holds in a read or a write cannot, and is left behind."""


class Audience(Protocol):
    """Where the output and the events of the worker of rank 0 are shown."""

    def output(self, stream: str, chunk: bytes) -> None:
        """Show bytes that it wrote to its standard output ("out") or error ("err")."""

    def events(self, chunk: bytes, source: int = 0) -> None:
        """Take bytes of JSON lines, one event each; `source` tells apart who sends them."""


class Listener(Protocol):
    """Who is told what happens to the workers of a machine."""

    def started(self, number: int, pid: int) -> None:
        """A process is there."""

    def said(self, number: int, kind: str, value: Any) -> None:
        """A worker has sent a message."""

    def ended(self, number: int, status: int, why: str = "") -> None:
        """A process has ended, and all it said has been heard; `why` where more than the status is known."""


class LocalWorkerPool:
    """All processes that one launcher has started, and what connects it with them."""

    def __init__(
        self,
        folder: Path,
        audience: Audience,
        selector: selectors.BaseSelector,
        listener: Listener,
        output: WorkerOutput | None = None,
    ) -> None:
        """`output` says whose output is shown; without it it is that of the worker which `show` names."""
        self._output = output
        self._folder, self._audience = folder, audience
        self._selector, self._listener = selector, listener
        self._server: ForkServer = forkserver.shared()
        self._selector.register(self._server, selectors.EVENT_READ, self._on_report)
        self._hears = True
        """Whether the fork server is listened to: until it is seen to be gone."""
        self._processes: dict[int, Process] = {}
        self._shown = -1
        self._said_delayed = False
        self._failed_starts: list[tuple[Process, str]] = []
        """Workers that could not even be asked for, and why."""
        self.files = FileWriter()
        """Writes what the launcher writes into the run folder."""

    # Starting and ending.

    def start(self, number: int, job: Job, log_name: str) -> None:
        """Ask the fork server for one worker, and listen to the worker."""
        self._renew()
        try:
            self._start(number, job, log_name)
        except OSError as error:
            # Told from the loop, like any other end: whoever asks for a worker is in the middle of deciding.
            failed = self._processes[number] = Process(number, ticket=-1)
            self._failed_starts.append((failed, error.strerror or str(error)))
        self._watch_server()

    def _start(self, number: int, job: Job, log_name: str) -> None:
        local_rank = job.identity.local_rank
        process = Process(number, ticket=-1, log=self._folder / "logs" / log_name, local_rank=local_rank)
        self.files.append(self._folder / "logs" / log_name, b"")
        ours, theirs = socket.socketpair()
        opened: list[int] = []
        try:
            for receive in (
                lambda chunk: self._on_output(process, "out", chunk),
                lambda chunk: self._on_output(process, "err", chunk),
                lambda chunk: self._audience.events(chunk, source=number),
            ):
                opened.append(process.pipe(self._selector, receive))  # noqa: PERF401  (those made before one fails are closed)
            out, err, events = opened
            opened.append(page := StatusPage.create())
            process.stacks = stacks.create()
            process.status_page = StatusPageReader(page)
            process.ticket = self._server.request(
                job, [out, err, theirs.fileno(), events, page, process.stacks], job.modules
            )
        except OSError:
            process.release(self._selector)
            ours.close()
            raise
        finally:
            for descriptor in opened:
                os.close(descriptor)
            theirs.close()
        process.control = Connection(ours.detach())
        self._selector.register(process.control, selectors.EVENT_READ, lambda: self._on_control(process))
        self._processes[number] = process

    def send(self, number: int, message: bytes) -> None:
        """Send a worker a message; one that is gone does not get it."""
        process = self._processes.get(number)
        control = None if process is None else process.control
        if control is not None:
            with contextlib.suppress(OSError):
                control.send_bytes(message)

    def signal(self, number: int, signal_number: signal.Signals) -> None:
        """Send a worker a signal; one that has ended is left alone."""
        process = self._processes.get(number)
        if process is not None and process.pid is not None and process.status is None:
            self._server.signal(process.pid, signal_number)
            self._watch_server()

    def show(self, number: int) -> None:
        """Show what this worker writes: it has rank 0."""
        self._shown = number

    def pid(self, number: int) -> int | None:
        """Return a worker's process id, once it is there."""
        process = self._processes.get(number)
        return None if process is None else process.pid

    def reading(self, number: int) -> Reading | None:
        """Return what a running worker is at; None for one that is not there."""
        member = self._member(number, rank=-1, host="")
        if member is None:
            return None
        return dataclasses.replace(member.status_page.read(), stopped=process_state(member.pid) == "T")

    def last_step(self, number: int) -> int | None:
        """Return the step that a worker of this machine is or was in, also once it has ended; None outside, and in a regroup."""
        process = self._processes.get(number)
        if process is None or process.status_page is None:
            return None
        reading = process.status_page.read()
        inside = reading.phase in (Phase.DATA, Phase.COMPUTE, Phase.COMMUNICATION, Phase.COMPILE)
        return reading.step if reading.kind is OperationKind.STEP and inside else None

    def look(self, ranks: Mapping[int, int], host: str, watch: HangWatch) -> tuple[WorkerEvidence, ...]:
        """Return what workers, given with their ranks, are doing; takes a second at most."""
        members = [self._member(number, rank, host) for number, rank in ranks.items()]
        return look([one for one in members if one is not None], self._server.signal, watch)

    def _member(self, number: int, rank: int, host: str) -> LocalWorker | None:
        process = self._processes.get(number)
        if (
            process is None
            or process.pid is None
            or process.status is not None
            or process.status_page is None
        ):
            return None
        return LocalWorker(
            rank=rank, host=host, pid=process.pid, status_page=process.status_page, stacks=process.stacks
        )

    def write_log(self, number: int, text: str) -> None:
        """Add a line to a worker's log."""
        process = self._processes.get(number)
        log = None if process is None else process.log
        if log is not None:
            self.files.append(log, text.encode(errors="backslashreplace"))

    @property
    def unstarted(self) -> bool:
        """Whether a process was asked for and is not there yet."""
        return any(one.pid is None for one in self._processes.values())

    @property
    def unheard(self) -> bool:
        """Whether what the first worker wrote has not been read to its end."""
        first = self._processes.get(self._shown)
        return first is not None and first.open_pipes > 0

    def alive(self) -> bool:
        """Return whether the fork server is there."""
        return self._server.alive()

    def kill(self) -> None:
        """End every process, and wait until all have ended that can; nobody is told."""
        until = time.monotonic() + LEFT_BEHIND_S
        doomed = dict(self._processes)
        with contextlib.suppress(PacelineError):
            while (
                self._server.alive()
                and (running := [one for one in doomed.values() if one.status is None])
                and (left := until - time.monotonic()) > 0
            ):
                for process in running:  # again each time: one that was asked for may only now be there
                    if process.pid is not None:
                        self._server.signal(process.pid, signal.SIGKILL)
                report = self._server.await_report(left)
                if report is not None:
                    self._take(report)
        for process in doomed.values():
            process.status = process.status if process.status is not None else -int(signal.SIGKILL)
            process.release(self._selector)
            self._show_rest(process)
            del self._processes[process.number]

    def restart(self) -> None:
        """End every worker, and be ready to start others; nobody is told."""
        self.kill()

    def kill_server(self) -> None:
        """End the fork server itself, and with it all its workers."""
        self._server.kill()

    def close(self) -> None:
        """End what still runs, and close every descriptor."""
        self.kill()
        self._stop_hearing()
        self.files.close()
        self._say_complaint()

    def _renew(self) -> None:
        """Start a fork server again if the last one is gone, after reporting the workers that ended with it."""
        while self._hears and not self._server.alive():
            self._on_report()
        if not self._hears:
            self._server, self._hears = forkserver.shared(), True
            self._selector.register(self._server, selectors.EVENT_READ, self._on_report)

    def _stop_hearing(self) -> None:
        if self._hears:
            self._selector.unregister(self._server)
            self._hears = False

    def _watch_server(self) -> None:
        """Wait for the fork server to report, and to have room where something is yet to be sent to it."""
        if self._hears:
            more = self._server.backlog or self._failed_starts
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if more else 0)
            self._selector.modify(self._server, wanted, self._on_report)

    # Hearing.

    def _on_report(self) -> None:
        failed, self._failed_starts = self._failed_starts, []
        for unstarted, why in failed:
            # Else all have started over meanwhile.
            if self._processes.pop(unstarted.number, None) is unstarted:
                words = f"it could not be started ({why})"
                self._listener.ended(unstarted.number, -int(signal.SIGKILL), words)
        try:
            report = self._server.poll()
        except PacelineError as error:
            self._server_gone(str(error))
            return
        self._watch_server()
        process = None if report is None else self._take(report)
        if report is None or process is None:
            return
        if "delayed" in report:
            self._say_delayed(report["errno"])
        elif process.status is None:
            self._listener.started(process.number, process.pid or 0)
        else:
            self._on_control(process)  # its last words may lie unread
            why = f"it could not be started ({os.strerror(report['errno'])})" if "failed" in report else ""
            self._listener.ended(process.number, process.status, why)
            self._forget_ended()

    def _say_complaint(self) -> None:
        complaint = self.files.take_complaint()
        if complaint is not None:
            self._audience.output("err", f"note: {complaint}\n".encode())

    def _say_delayed(self, number: int) -> None:
        """Report once that a worker cannot be forked for the moment."""
        if not self._said_delayed:
            self._said_delayed = True
            words = f"a worker cannot be started ({os.strerror(number)}): this machine has no processes or memory to spare."
            self._audience.output("err", f"note: {words} It is tried again, and the others go on.\n".encode())

    def _forget_ended(self) -> None:
        """Close what belonged to workers that are gone: over the days of a run there may be hundreds."""
        for number, process in list(self._processes.items()):
            if process.status is not None and process.open_pipes == 0 and number != self._shown:
                process.release(self._selector)
                self._show_rest(process)
                del self._processes[number]

    def _take(self, report: dict[str, Any]) -> Process | None:
        """Note what the fork server reports; None where the process is of an earlier launch."""
        # Not those that have ended: another fork server counts its tickets anew, and a process id may come again.
        everyone = [one for one in self._processes.values() if one.status is None]
        if "ended" in report:
            process = next((one for one in everyone if one.pid == report["ended"]), None)
        else:
            ticket = next(report[kind] for kind in ("started", "delayed", "failed") if kind in report)
            process = next((one for one in everyone if one.ticket == ticket), None)
        if process is not None and "started" in report:
            process.pid = report["pid"]
        elif process is not None and "delayed" not in report:
            process.status = report.get("status", -int(signal.SIGKILL))
        return process

    def _server_gone(self, why: str) -> None:
        """The kernel has ended every worker with the fork server."""
        self._stop_hearing()
        gone = [one for one in self._processes.values() if one.status is None]
        for process in gone:  # all of them before anybody is told: what follows may start others
            process.status = -int(signal.SIGKILL)
        for process in sorted(gone, key=lambda one: (one.number < 0, one.number)):
            if self._processes.get(process.number) is process:  # else all have started over meanwhile
                self._on_control(process)
                self._listener.ended(process.number, -int(signal.SIGKILL), why)

    def _on_control(self, process: Process) -> None:
        try:
            while process.control is not None and process.control.poll():
                kind, value = pickle.loads(process.control.recv_bytes())  # noqa: S301  (this run's own worker)
                self._listener.said(process.number, kind, value)
        except (EOFError, OSError):
            if process.control is not None:
                self._selector.unregister(process.control)
                process.control.close()
                process.control = None

    def _on_output(self, process: Process, stream: str, chunk: bytes) -> None:
        if process.log is not None:
            self.files.append(process.log, chunk)
            self._say_complaint()
        if self._output is not None:
            chunk = self._output.shown(process.local_rank, stream, chunk)
        elif process.number != self._shown:
            return
        if chunk:
            self._audience.output(stream, chunk)

    def _show_rest(self, process: Process) -> None:
        """Show what a worker wrote last, where no line end follows."""
        if self._output is None:
            return
        for stream in STREAMS:
            if chunk := self._output.rest(process.local_rank, stream):
                self._audience.output(stream, chunk)
