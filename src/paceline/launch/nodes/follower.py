"""The launcher of a machine that another one leads: starts workers when told, passes on what happens to them.

It decides nothing. When the leader is not heard any more, it ends its workers at once: whoever leads has given
them up by then, and the run goes on without them.
"""

from __future__ import annotations

import dataclasses
import json
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any

from paceline.errors import PacelineError
from paceline.launch.base import LaunchPlan, Outcome
from paceline.launch.console import Console
from paceline.launch.health.diagnosis import HangWatch, process_state
from paceline.launch.nodes import travel
from paceline.launch.nodes.leading import unmet
from paceline.launch.nodes.link import Message, connect
from paceline.launch.nodes.rendezvous import Failed, Met, Report, Waiting
from paceline.launch.nodes.wire import Wire
from paceline.launch.shutdown import Shutdown
from paceline.launch.workers.pool import LocalWorkerPool
from paceline.observe.events import Note
from paceline.world import env
from paceline.world.env import Identity

READINGS_S = 1.0
"""How often the leader hears what the workers are at."""


@dataclass(frozen=True)
class _Relay:
    """Shows on the leader's console what a worker of rank 0 writes here."""

    send: Callable[[Message], None]

    def output(self, stream: str, chunk: bytes) -> None:
        self.send({"output": stream, "text": chunk.decode(errors="replace")})

    def events(self, chunk: bytes, source: int = 0) -> None:
        self.send({"events": chunk.decode(), "number": source})


class Follower:
    """From the meeting to the end of the run, or of the link to its leader."""

    def __init__(self, plan: LaunchPlan, folder: Path, console: Console) -> None:
        if plan.rendezvous is None:
            raise RuntimeError("whoever follows needs a rendezvous")
        self._plan, self._rendezvous, self._console = plan, plan.rendezvous, console
        self._selector = selectors.DefaultSelector()
        self._shutdown = Shutdown()
        self._wire: Wire | None = None
        self._leader = ""
        self._running: dict[int, int | None] = {}
        """The workers that run here, by number, with their process ids."""
        self._outcome: Outcome | None = None
        self._readings_at = time.monotonic()
        self._pool = LocalWorkerPool(folder, _Relay(self._send), self._selector, self)
        log = f"rendezvous-{env.host()}.log"
        self._keeper = self._pool.start_keeper(plan.jobs[0], plan.rendezvous, plan.agreed, None, log)
        self._selector.register(self._keeper, selectors.EVENT_READ, self._on_keeper)

    def run(self) -> Outcome:
        """Serve until the leader says that the run has ended."""
        with self._shutdown.on_signals(self._selector):
            while self._outcome is None:
                if self._shutdown.in_progress:
                    return Outcome(results=(), interrupted=self._shutdown.interrupted)
                self._turn()
        return self._outcome

    def close(self) -> None:
        """End what still runs here, and let go of every descriptor."""
        self._selector.unregister(self._keeper)
        self._keeper.close()
        self._pool.close()
        if self._wire is not None:
            self._wire.close()
        self._selector.close()

    def _turn(self) -> None:
        now = time.monotonic()
        wait = 1.0 if self._wire is None else min(self._wire.tick(now), max(0.0, self._readings_at - now))
        for key, _ in self._selector.select(wait):
            if key.fd in self._selector.get_map():
                key.data[0]() if isinstance(key.data, tuple) else key.data()
        now = time.monotonic()
        if self._wire is None or self._outcome is not None:
            return
        reason = self._wire.lost(now)
        if reason is not None:
            self._pool.kill()
            raise PacelineError(
                f"this machine is cut off from the run that {self._leader} leads: {reason}. Its workers have been ended; "
                "start the same command again to rejoin."
            )
        if now >= self._readings_at:
            self._readings_at = now + READINGS_S
            self._send_readings()

    def _send(self, message: Message) -> None:
        if self._wire is not None:
            self._wire.send(message)

    # Meeting.

    def _on_keeper(self) -> None:
        for report in self._keeper.on_readable():
            self._on_report(report)

    def _on_report(self, report: Report) -> None:
        match report:
            case Waiting():
                self._console.event(Note(text=f"{report.reason}."))
            case Met() if self._wire is None:
                self._join(report)
            case Failed() if self._wire is None:
                # The link alone tells whether a leader that was found is still there.
                self._outcome = Outcome(results=(), failure=unmet(report.reason))

    def _join(self, met: Met) -> None:
        self._leader = str(met.leader)
        secret = met.offer.secret.encode()
        link = connect(
            met.leader.address, met.offer.control_port, secret, timeout_s=self._rendezvous.silence_s
        )
        self._wire = Wire(link, self._selector, self._follow)
        self._wire.rename(self._leader)
        self._send(
            {
                "hello": {
                    "host": met.local.host,
                    "address": met.local.address,
                    "leader": met.leader.address,
                }
            }
        )
        self._console.event(Note(text=f"{self._leader} leads; this machine is {met.local}."))

    # Orders.

    def _follow(self, order: Message) -> None:
        number = order.get("number", -1)
        match order["do"]:
            case "start":
                self._start(order)
            case "send":
                self._pool.send(number, json.dumps(order["order"]).encode())
            case "signal":
                self._pool.signal(number, Signals(order["signal"]))
            case "show":
                self._pool.show(number)
            case "log":
                self._pool.write_log(number, order["text"])
            case "look":
                self._look(order["numbers"])
            case "restart":
                self._pool.restart()
                self._running.clear()
            case "end":
                self._end(order)

    def _start(self, order: Message) -> None:
        self._running[order["number"]] = None
        like = self._plan.jobs[0]
        # As many as at the leader, whatever this machine has: the bits of a sum depend on how many threads took it.
        environment = {**like.environment, **order["shared"]}
        if environment.get("OMP_NUM_THREADS") == str(like.threads):
            environment["OMP_NUM_THREADS"] = str(order["threads"])
        job = dataclasses.replace(
            like,
            identity=Identity(**order["identity"]),
            newcomer=order["newcomer"],
            starts=order["starts"],
            threads=order["threads"],
            environment=environment,
        )
        self._pool.start(order["number"], job, order["log"])

    def _end(self, order: Message) -> None:
        if order["failure"] is None:
            self._outcome = Outcome(results=(), led_by=self._leader)
        elif order["input"]:
            self._outcome = Outcome(results=(), failure=unmet(order["failure"]))
        else:
            raise PacelineError(f"the run that {self._leader} leads has ended: {order['failure']}.")

    # What the pool tells, and what can be seen of it.

    def started(self, number: int, pid: int) -> None:
        """Pass it on."""
        if number >= 0:
            self._running[number] = pid
            self._send({"started": number, "pid": pid})

    def said(self, number: int, kind: str, value: Any) -> None:
        """Pass it on."""
        self._send({"said": kind, "number": number, "value": travel.pack_said(kind, value)})

    def ended(self, number: int, status: int, why: str = "") -> None:
        """Pass it on."""
        if number >= 0:
            self._running.pop(number, None)
            self._send({"ended": number, "status": status, "why": why})

    def _send_readings(self) -> None:
        now = time.monotonic()
        readings = []
        for number, pid in self._running.items():
            reading = self._pool.reading(number)
            if reading is not None and pid is not None:
                readings.append([number, travel.pack_reading(reading, now), process_state(pid)])
        self._send({"readings": readings})

    def _look(self, numbers: list[int]) -> None:
        # Its own measure of what is too long does not matter: the leader applies its own.
        seen = self._pool.look({number: number for number in numbers}, env.host(), HangWatch())
        self._send({"evidence": [[one.rank, travel.pack_evidence(one)] for one in seen]})
