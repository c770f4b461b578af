"""The worker processes of another machine: passes orders on to the launcher there, and hears from it what happens."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from signal import Signals
from typing import Any

from paceline.errors import InputError
from paceline.launch.health.diagnosis import HangWatch
from paceline.launch.job import Job
from paceline.launch.nodes import travel
from paceline.launch.nodes.travel import MalformedError
from paceline.launch.workers.pool import Audience, Listener
from paceline.observe.events import from_json
from paceline.observe.verdict import WorkerEvidence
from paceline.transport.control import Message
from paceline.world.status_page import Reading

ANSWER_S = 3.0
"""How long another machine may take to show what its workers are at; then what is known must do."""


class RemoteWorkerPool:
    """What `LocalWorkerPool` is for this machine, for another one."""

    def __init__(self, send: Callable[[Message], None], audience: Audience, listener: Listener) -> None:
        self._send, self._audience, self._listener = send, audience, listener
        self._numbers: set[int] = set()
        """The workers that were asked for: the launcher there has a say about no others."""
        self._events: defaultdict[int, bytes] = defaultdict(bytes)
        """The beginning of an event whose end is yet to come, by worker."""
        self._pids: dict[int, int] = {}
        self._readings: dict[int, tuple[dict[str, Any], str]] = {}
        """The last reading of each worker, and the state of its process."""
        self._asked: float | None = None
        self._evidence: dict[int, WorkerEvidence] = {}

    # Orders.

    def start(self, number: int, job: Job, log_name: str) -> None:
        """Ask for one worker; what it is to do, the launcher there knows from its own command."""
        self._numbers.add(number)
        self._send(
            {
                "do": "start",
                "number": number,
                "identity": asdict(job.identity),
                "newcomer": job.newcomer,
                "starts": job.starts,
                "threads": job.threads,
                "shared": dict(job.shared),
                "log": log_name,
            }
        )

    def send(self, number: int, message: bytes) -> None:
        """Send a worker a message; one that is gone does not get it."""
        self._send({"do": "send", "number": number, "order": json.loads(message)})

    def signal(self, number: int, signal_number: Signals) -> None:
        """Send a worker a signal; one that has ended is left alone."""
        self._send({"do": "signal", "number": number, "signal": int(signal_number)})

    def show(self, number: int) -> None:
        """Show what this worker writes: it has rank 0."""
        self._send({"do": "show", "number": number})

    def write_log(self, number: int, text: str) -> None:
        """Add a line to a worker's log."""
        self._send({"do": "log", "number": number, "text": text})

    def restart(self) -> None:
        """End every worker, and be ready to start others; nobody is told."""
        self._send({"do": "restart"})
        self._numbers.clear()
        self._pids.clear()
        self._readings.clear()

    # What is known.

    def pid(self, number: int) -> int | None:
        """Return a worker's process id, once it is there."""
        return self._pids.get(number)

    def reading(self, number: int) -> Reading | None:
        """Return what a running worker is at; None for one of whom nothing was heard yet."""
        known = self._readings.get(number)
        return None if known is None else travel.unpack_reading(known[0], time.monotonic())

    def look(
        self, ranks: Mapping[int, int], host: str, watch: HangWatch
    ) -> tuple[WorkerEvidence, ...] | None:
        """Have workers, given with their ranks, show what they are at; None while they have yet to answer."""
        now = time.monotonic()
        if self._asked is None or now - self._asked > 2 * ANSWER_S:
            self._asked, self._evidence = now, {}
            self._send({"do": "look", "numbers": list(ranks)})
            return None
        if not ranks.keys() <= self._evidence.keys() and now - self._asked < ANSWER_S:
            return None
        self._asked = None
        found = []
        for number, rank in ranks.items():
            seen = self._evidence.get(number) or self._from_afar(number, now)
            if seen is not None:
                found.append(replace(seen, rank=rank, host=host, limit_s=watch.limit_s(seen.reading)))
        return tuple(found)

    def _from_afar(self, number: int, now: float) -> WorkerEvidence | None:
        if number not in self._readings:
            return None
        packed, state = self._readings[number]
        reading = travel.unpack_reading(packed, now)
        return WorkerEvidence(
            rank=-1, host="", reading=reading, silent_s=reading.silence_s(now), limit_s=0.0, state=state
        )

    # Hearing.

    def hear(self, message: Message) -> None:
        """Take what the launcher there says, of its own workers; MalformedError for what none would say."""
        match message:
            case {"started": int(number), "pid": int(pid)}:
                if number in self._numbers:
                    self._pids[number] = pid
                    self._listener.started(number, pid)
            case {"said": str(kind), "number": int(number), "value": value}:
                said = travel.unpack_said(kind, value)
                if number in self._numbers:
                    self._listener.said(number, kind, said)
            case {"ended": int(number), "status": int(status), "why": str(why)}:
                self._readings.pop(number, None)
                if number in self._numbers:
                    self._listener.ended(number, status, why)
            case {"readings": list(readings)}:
                self._readings = dict(_reading(one) for one in readings)
            case {"evidence": list(evidence)}:
                self._evidence = dict(_evidence(one) for one in evidence)
            case {"output": "out" | "err" as stream, "text": str(text)}:
                self._audience.output(stream, text.encode(errors="backslashreplace"))
            case {"events": str(text), "number": int(number)}:
                self._on_events(number, text.encode(errors="backslashreplace"))
            case _:
                raise MalformedError(
                    f"{', '.join(map(str, message))[:80]!r} is nothing that is said of workers"
                )

    def _on_events(self, number: int, chunk: bytes) -> None:
        *lines, rest = (self._events[number] + chunk).split(b"\n")
        try:
            for line in lines:
                from_json(line.decode())
        except (InputError, UnicodeDecodeError) as error:
            raise MalformedError(str(error)) from error
        self._events[number] = rest
        if lines and number in self._numbers:
            self._audience.events(b"\n".join([*lines, b""]), source=number)


def _reading(one: Any) -> tuple[int, tuple[dict[str, Any], str]]:
    match one:
        case [int(number), dict(packed), str(state)]:
            travel.unpack_reading(packed, 0.0)
            return number, (packed, state)
    raise MalformedError("a reading is none")


def _evidence(one: Any) -> tuple[int, WorkerEvidence]:
    match one:
        case [int(number), dict(packed)]:
            return number, travel.unpack_evidence(packed)
    raise MalformedError("what was seen of a worker is nothing that can be seen")
