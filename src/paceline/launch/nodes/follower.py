"""The launcher of a machine that another one leads: starts workers when told, passes on what happens to them.

It decides nothing. When the leader is not heard any more, it ends its workers at once: whoever leads has given
them up by then, and the run goes on without them.
"""

from __future__ import annotations

import dataclasses
import json
import re
import selectors
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any

from paceline.errors import InputError, PacelineError
from paceline.launch.base import LaunchPlan, Outcome
from paceline.launch.console import Console
from paceline.launch.health.diagnosis import HangWatch, process_state
from paceline.launch.nodes import travel
from paceline.launch.nodes.hello import Hello, spec_of
from paceline.launch.nodes.leading import gone, unmet
from paceline.launch.nodes.reachability import ConnectionAttempts, ReachablePort, Target, exchange_address
from paceline.launch.nodes.rendezvous import Machine
from paceline.launch.shutdown import Shutdown
from paceline.launch.workers.pool import LocalWorkerPool
from paceline.observe.events import Note
from paceline.transport.control import STRANGER, ControlClient, Gone, Message, Said
from paceline.world import env, interfaces
from paceline.world.env import Identity

READINGS_S = 1.0
"""How often the leader hears what the workers are at."""
CALL_S = 3.0
"""How long one address of the leader is called before the next is."""
AGAIN_S = 0.5
REFUSALS = 3
_LOG = re.compile(r"rank-[0-9]{1,9}\.log")


@dataclass(frozen=True)
class _Relay:
    """Shows on the leader's console what a worker of rank 0 writes here."""

    send: Callable[[Message], None]

    def output(self, stream: str, chunk: bytes) -> None:
        self.send({"output": stream, "text": chunk.decode(errors="replace")})

    def events(self, chunk: bytes, source: int = 0) -> None:
        self.send({"events": chunk.decode(), "number": source})


class Follower:
    """From the first call to the end of the run, or of the connection to its leader."""

    def __init__(self, plan: LaunchPlan, folder: Path, console: Console) -> None:
        if plan.rendezvous is None or plan.secret is None:
            raise RuntimeError("whoever follows needs a rendezvous and a secret")
        self._plan, self._rendezvous, self._secret = plan, plan.rendezvous, plan.secret
        self._console = console
        self._selector = selectors.DefaultSelector()
        self._shutdown = Shutdown()
        self._client: ControlClient | None = None
        self._addresses: deque[str] = deque()
        """Where the leader has yet to be tried, in this round."""
        self._leader: str | None = None
        """Its name, once it has let this machine in."""
        self._machine = Machine(host=env.host(), address=plan.address)
        self._deadline = time.monotonic() + plan.rendezvous.join_s
        self._call_at = 0.0
        self._refused = 0
        """How often in a row the leader did not know the secret."""
        self._told = ""
        self._attempts: dict[int, ConnectionAttempts] = {}
        """Attempts to reach other machines, by the number of the trial that they are for."""
        self._running: dict[int, int | None] = {}
        """The workers that run here, by number, with their process ids."""
        self._outcome: Outcome | None = None
        self._readings_at = time.monotonic()
        interface = plan.jobs[0].environment.get("GLOO_SOCKET_IFNAME")
        self._port = ReachablePort(exchange_address(plan.address, interface), self._selector)
        self._pool = LocalWorkerPool(folder, _Relay(self._send), self._selector, self)

    def run(self) -> Outcome:
        """Serve until the leader says that the run has ended."""
        with self._shutdown.on_signals(self._selector):
            while self._outcome is None:
                if self._shutdown.in_progress:
                    return Outcome(results=(), interrupted=self._shutdown.interrupted)
                self._turn()
        return self._outcome

    def close(self) -> None:
        """End what still runs here, and close every descriptor."""
        for attempt in self._attempts.values():
            attempt.close()
        self._port.close()
        self._pool.close()
        self._hang_up()
        self._selector.close()

    def _turn(self) -> None:
        now = time.monotonic()
        if self._client is None and now >= self._call_at:
            self._call()
        due = self._readings_at if self._leader is not None else now + 1.0
        wait = 0.1 if self._attempts else max(0.0, min(due, self._call_at or due) - now)
        for key, _ in self._selector.select(wait):
            if self._selector.get_map().get(key.fd) is key:
                key.data[0]() if isinstance(key.data, tuple) else key.data()
        now = time.monotonic()
        self._report_attempts(now)
        if self._outcome is None and self._leader is None and now >= self._deadline:
            self._end_unmet(
                f"no machine holds the rendezvous at {self._rendezvous.endpoint}: {self._told or 'nobody lets this one in'}, for "
                f"{self._rendezvous.join_s:g} s. Start the same command on {self._rendezvous.host}, or check the address and "
                "the firewall."
            )
        if self._leader is not None and now >= self._readings_at:
            self._readings_at = now + READINGS_S
            self._send_readings()

    def _send(self, message: Message) -> None:
        if self._client is not None:
            self._client.send(message)

    # Meeting.

    def _call(self) -> None:
        """Call the leader, at the next of its addresses."""
        if not self._addresses:
            self._addresses.extend(interfaces.resolve(self._rendezvous.host))
        if not self._addresses:
            self._wait_for_leader(f"{self._rendezvous.host} is no host that this machine knows")
            return
        address = self._addresses.popleft()
        try:
            local = interfaces.reaching(address).address
        except InputError:
            self._wait_for_leader(f"there is no route to {address}")
            return
        self._call_at = 0.0
        self._machine = Machine(host=env.host(), address=local)
        self._client = ControlClient(
            address,
            self._rendezvous.port,
            self._secret,
            silence_s=self._rendezvous.silence_s,
            join_s=max(0.1, min(CALL_S, self._deadline - time.monotonic())),
        )
        self._selector.register(self._client, selectors.EVENT_READ, self._on_events)
        hello = Hello(
            host=env.host(),
            address=local,
            dialed=address,
            workers_address=self._port.address,
            port=self._port.port,
            spec=spec_of(self._plan.agreed, self._rendezvous),
        )
        self._send(hello.pack())

    def _wait_for_leader(self, reason: str) -> None:
        if reason != self._told:
            self._told = reason
            self._note(f"nobody leads at {self._rendezvous.endpoint} yet: {reason}.")
        self._call_at = time.monotonic() + AGAIN_S

    def _hang_up(self) -> None:
        if self._client is not None:
            self._selector.unregister(self._client)
            self._client.close()
            self._client = None

    def _on_events(self) -> None:
        client = self._client
        for event in client.events() if client is not None else ():
            if self._client is not client or self._outcome is not None:
                return
            match event:
                case Said(_, message):
                    self._take(message)
                case Gone(_, reason):
                    self._on_gone(reason)

    def _on_gone(self, reason: str) -> None:
        if self._leader is not None:
            self._pool.kill()
            raise PacelineError(
                f"this machine is cut off from the run that {self._leader} leads: {gone(reason, self._rendezvous.silence_s)}. "
                "Its workers have been ended; start the same command again to rejoin."
            )
        self._hang_up()
        # More than once: a leader that is about to listen, or to end, closes connections too.
        self._refused = self._refused + 1 if reason == STRANGER else 0
        if self._refused >= REFUSALS:
            self._end_unmet(
                f"the machine that leads at {self._rendezvous.endpoint} has another secret than this one. Give both the same "
                f"{env.SECRET} or --secret-file."
            )
            return
        self._wait_for_leader(reason)

    def _end_unmet(self, reason: str) -> None:
        self._outcome = Outcome(results=(), failure=unmet(reason))

    def _note(self, text: str) -> None:
        self._console.event(Note(text=text))

    def _take(self, message: Message) -> None:
        """Take what the leader says: an answer to the hello, or an order."""
        match message:
            case {"welcome": {"host": str(host), "address": str(address)}} if self._leader is None:
                self._leader = str(Machine(host=host, address=address))
                self._note(f"{self._leader} leads; this machine is {self._machine}.")
            case {"refused": str(sentence)} if self._leader is None:
                self._end_unmet(sentence)
            case {"full": int(nodes)} if self._leader is None:
                self._told = f"the run there has its {nodes} machines"
                self._note(f"the run has its {nodes} machines; this one waits for one of them to leave.")
            case {"do": "reach", "trial": int(trial), "targets": list(targets)}:
                self._attempts[trial] = ConnectionAttempts([_target(one) for one in targets], self._selector)
            case {"do": "end", "failure": str() | None as failure, "input": bool(is_input)}:
                self._end(failure, is_input=is_input)
            case {"do": "leave", "reason": str(reason)}:
                self._pool.kill()
                raise PacelineError(f"{self._leader} has sent this machine away: {reason}.")
            case _ if self._leader is not None:
                self._follow(message)
            case _:
                raise _nonsense(self._rendezvous.endpoint, message)

    def _report_attempts(self, now: float) -> None:
        for trial, attempt in list(self._attempts.items()):
            failed = attempt.failed(now)
            if failed is not None:
                del self._attempts[trial]
                self._send({"reached": trial, "failed": dict(failed)})

    # Orders.

    def _follow(self, order: Message) -> None:
        match order:
            case {"do": "start"}:
                self._start(order)
            case {"do": "send", "number": int(number), "order": dict(passed)}:
                self._pool.send(number, json.dumps(passed).encode())
            case {"do": "signal", "number": int(number), "signal": int(value)} if value in set(Signals):
                self._pool.signal(number, Signals(value))
            case {"do": "show", "number": int(number)}:
                self._pool.show(number)
            case {"do": "log", "number": int(number), "text": str(text)}:
                self._pool.write_log(number, text)
            case {"do": "look", "numbers": list(numbers)}:
                self._look([one for one in numbers if isinstance(one, int)])
            case {"do": "restart"}:
                self._pool.restart()
                self._running.clear()
            case _:
                raise _nonsense(self._leader, order)

    def _start(self, order: Message) -> None:
        like = self._plan.jobs[0]
        match order:
            case {
                "number": int(number),
                "identity": dict(fields),
                "newcomer": bool(newcomer),
                "starts": int(starts),
                "threads": int(threads),
                "shared": dict(shared),
                # Both would reach further than the run: a path, or a variable that loads a library.
                "log": str(log),
            } if _LOG.fullmatch(log) and shared.keys() <= like.shared.keys():
                identity = travel.made(Identity, fields)
            case _:
                raise _nonsense(self._leader, order)
        self._running[number] = None
        # As many as at the leader, whatever this machine has: the bits of a sum depend on how many threads took it.
        environment = {**like.environment, **{name: str(value) for name, value in shared.items()}}
        if environment.get("OMP_NUM_THREADS") == str(like.threads):
            environment["OMP_NUM_THREADS"] = str(threads)
        job = dataclasses.replace(
            like,
            identity=identity,
            newcomer=newcomer,
            starts=starts,
            threads=threads,
            environment=environment,
        )
        self._pool.start(number, job, log)

    def _end(self, failure: str | None, *, is_input: bool) -> None:
        if failure is None:
            self._outcome = Outcome(results=(), led_by=self._leader)
        elif is_input:
            self._end_unmet(failure)
        else:
            raise PacelineError(f"the run that {self._leader} leads has ended: {failure}.")

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


def _target(one: Any) -> Target:
    match one:
        case [str(name), str(address), int(port)]:
            return Target(name, address, port)
    raise _nonsense("the leader", {"targets": one})


def _nonsense(leader: str | None, message: Message) -> PacelineError:
    what = ", ".join(f"{name}={value!r}" for name, value in message.items())[:200]
    return PacelineError(
        f"{leader} has sent an order that makes no sense here ({what}). Use the same paceline on all machines."
    )
