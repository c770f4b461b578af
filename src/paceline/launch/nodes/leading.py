"""The other machines of a run, as the launcher that leads them sees them: takes them in, and notices when one is gone."""

from __future__ import annotations

import os
import select
import selectors
import time
from typing import Protocol

from paceline.launch.base import LaunchPlan, Outcome
from paceline.launch.failures import WorkerFailure
from paceline.launch.nodes.admission import Admission, FollowingMachine, Verdict
from paceline.launch.nodes.hello import Hello, differences, spec_of
from paceline.launch.nodes.reachability import ReachablePort, Target, exchange_address
from paceline.launch.nodes.remote_worker_pool import RemoteWorkerPool
from paceline.launch.nodes.rendezvous import Machine
from paceline.launch.nodes.travel import MalformedError
from paceline.launch.workers.pool import Audience, Listener
from paceline.transport.control import CLOSED, ControlServer, Event, Gone, Message, Refused, Said
from paceline.transport.router import Peer
from paceline.world import env

GOODBYE_S = 2.0
"""How long the others may take to confirm that the run has ended."""
REFUSED_S = 60.0
"""How often the user hears of connections that were turned away."""
_ALL = ("0.0.0.0", "::")  # noqa: S104  (compared with, not bound)


class MachineObserver(Listener, Protocol):
    """Who is told about machines, and about their workers."""

    def arrived(self, machine: FollowingMachine, pool: RemoteWorkerPool) -> None:
        """A machine is there and takes orders."""

    def left(self, machine: FollowingMachine, fate: str) -> None:
        """A machine is gone, and with it all its workers."""

    def remark(self, text: str) -> None:
        """Something that the user should know."""

    def unmet(self, failure: WorkerFailure) -> None:
        """The first meeting came to nothing."""


class Leading:
    """The rendezvous, and the machines that came to it."""

    def __init__(
        self,
        plan: LaunchPlan,
        selector: selectors.BaseSelector,
        observer: MachineObserver,
        audience: Audience,
    ) -> None:
        if plan.rendezvous is None or plan.secret is None:
            raise RuntimeError("whoever leads needs a rendezvous and a secret")
        self._plan, self._rendezvous, self._secret = plan, plan.rendezvous, plan.secret
        self._selector, self._observer, self._audience = selector, observer, audience
        self._local = Machine(host=env.host(), address=plan.address)
        self._spec = spec_of(plan.agreed, plan.rendezvous)
        self._followers: dict[Peer, FollowingMachine] = {}
        self._indices = 0
        self._refusals: list[str] = []
        """Why machines were sent away before the run began."""
        self._gathered = False
        self._enough_at: float | None = None
        """Since when there are enough machines to begin with."""
        self._deadline = self._refused_at = 0.0
        self._server: ControlServer | None = None

    def open(self) -> None:
        """Listen at the rendezvous for the launchers of other machines."""
        wanted = self._rendezvous
        self._deadline = time.monotonic() + wanted.join_s
        try:
            self._server = ControlServer(wanted.bound, wanted.port, self._secret, silence_s=wanted.silence_s)
        except OSError as error:
            words = os.strerror(error.errno) if error.errno else str(error)
            reason = f"this machine cannot hold the rendezvous at {wanted.endpoint}: {words}"
            self._observer.unmet(unmet(f"{reason}. Give --rendezvous a port that is free."))
            return
        self._selector.register(self._server, selectors.EVENT_READ, self._on_events)
        interface = self._plan.jobs[0].environment.get("GLOO_SOCKET_IFNAME")
        self._port = ReachablePort(exchange_address(self._plan.address, interface), self._selector)
        own = Target(str(self._local), self._port.address, self._port.port)
        self._admission = Admission(own, self._selector, self._send, patience_s=wanted.silence_s)
        self._observer.remark(
            f"listening on {wanted.bound}: machines that know the run's secret are let in, over encrypted connections. What "
            "workers exchange is not encrypted: use a network you trust."
        )
        if self._plan.invitation:
            # Not as a remark: it holds the secret, and remarks may be kept.
            self._audience.output("err", f"On the other machines: {self._plan.invitation}\n".encode())
        self._observer.remark(f"waiting at {wanted.endpoint} for {wanted.nodes} machines.")

    def gathered(self) -> bool:
        """Return whether all machines have come, or enough have and the others had their time; then each may come and go."""
        if not self._gathered:
            here, now = 1 + len(self.present()), time.monotonic()
            self._enough_at = (self._enough_at or now) if here >= self._rendezvous.min_nodes else None
            late = self._enough_at is not None and now >= self._enough_at + self._rendezvous.last_call_s
            self._gathered = late or here >= self._rendezvous.max_nodes
        return self._gathered

    def present(self) -> list[FollowingMachine]:
        """Return the machines that take orders."""
        return [one for one in self._followers.values() if one.pool is not None and not one.sent_away]

    def tick(self) -> float:
        """Go on with admissions; return the seconds until something is due again."""
        if self._server is None:
            return 1.0
        now, present = time.monotonic(), self.present()
        room = self._rendezvous.max_nodes - 1 - len(present)
        for verdict in self._admission.advance(now, present, room=room):
            self._act_on(verdict)
        if now >= self._deadline and not self.gathered() and self._enough_at is None:
            self._gathered = True
            self._observer.unmet(unmet(self._too_few()))
        return self._admission.due_s

    def expel(self, index: int, reason: str) -> None:
        """Send a machine away that was let in, and do without its workers."""
        for one in self.present():
            if one.index == index:
                self._send_away(one, {"do": "leave", "reason": reason})
                self._admission.drop(one)  # nobody waits for its answers, nor has to reach it
                self._observer.left(one, f"was sent away: {reason}")

    def dismiss(self, outcome: Outcome) -> None:
        """Notify all machines that the run has ended, and wait a moment for them to go."""
        server = self._server
        if server is None:
            return
        going = {one.peer for one in self._followers.values() if not one.sent_away}
        for peer in going:
            server.send(peer, {"do": "end", **_farewell(outcome)})
        deadline = time.monotonic() + GOODBYE_S
        heard = select.poll()
        heard.register(server, select.POLLIN)
        while going and (left := deadline - time.monotonic()) > 0:
            heard.poll(1000 * left)
            going -= {event.peer for event in server.events() if isinstance(event, Gone)}

    def close(self) -> None:
        """Let go of everything."""
        if self._server is not None:
            self._admission.close()
            self._port.close()
            self._selector.unregister(self._server)
            self._server.close()

    # What is heard.

    def _on_events(self) -> None:
        for event in self._server.events() if self._server is not None else ():
            self._on_event(event)

    def _on_event(self, event: Event) -> None:
        match event:
            case Said(peer, message):
                self._on_message(peer, message)
            case Gone(peer, reason) if peer in self._followers:
                one = self._followers.pop(peer)
                self._admission.drop(one)
                if one.pool is not None and not one.sent_away:
                    self._observer.left(one, f"is lost: {gone(reason, self._rendezvous.silence_s)}")
            case Refused(count) if time.monotonic() >= self._refused_at:
                self._refused_at = time.monotonic() + REFUSED_S
                self._observer.remark(
                    f"connections without this run's secret were turned away: {count} so far."
                )

    def _on_message(self, peer: Peer, message: Message) -> None:
        one = self._followers.get(peer)
        try:
            if one is None:
                self._greet(peer, Hello.read(message))
            elif one.sent_away:
                return
            elif "reached" in message:
                self._on_reached(one, message)
            elif one.pool is None:
                raise MalformedError("it speaks of workers before it was let in")
            else:
                one.pool.hear(message)
        except MalformedError as error:
            self._on_malformed(peer, one, str(error))

    def _greet(self, peer: Peer, hello: Hello) -> None:
        self._indices += 1
        # Where this machine listens on all its addresses, only the others know which one leads here.
        store = hello.dialed if self._rendezvous.bound in _ALL else self._plan.address
        one = FollowingMachine(
            self._indices,
            peer,
            name=str(hello.machine),
            host=hello.host,
            store_address=store,
            target=hello.target,
        )
        self._followers[peer] = one
        if hello.spec != self._spec:
            here, there = (differences(self._spec, hello.spec, where) for where in ("here", "there"))
            self._refuse(
                one,
                f"asked for another run and was sent away: {there}",
                f"this machine asks for another run than {self._local}, which leads: {here}. "
                "Give the same command on every machine.",
            )
            return
        if 1 + len(self.present()) >= self._rendezvous.max_nodes:
            self._send(one, {"full": self._rendezvous.max_nodes})
        self._admission.add(one)

    def _on_reached(self, one: FollowingMachine, message: Message) -> None:
        match message:
            case {"reached": int(number), "failed": dict(failed)} if all(
                isinstance(text, str) and text.isprintable() for pair in failed.items() for text in pair
            ):
                self._admission.answered(one, number, failed)
            case _:
                raise MalformedError("it does not say whom it reaches")

    def _on_malformed(self, peer: Peer, one: FollowingMachine | None, words: str) -> None:
        """Do without whoever sends what no launcher of this version sends."""
        if one is None:
            self._observer.remark(
                f"a machine that knows the secret, but not how to say hello, was turned away: {words}."
            )
            text = f"the machine that leads did not understand it ({words}). Use the same paceline on all."
            if self._server is not None:
                self._server.send(peer, {"refused": text})
        elif one.pool is not None:
            self.expel(one.index, f"it sent a message that makes no sense ({words})")
        else:
            self._admission.drop(one)
            self._refuse(one, f"sent a message that makes no sense and was sent away: {words}", words)

    # What follows from it.

    def _act_on(self, verdict: Verdict) -> None:
        one = verdict.machine
        if verdict.reason is not None:
            self._refuse(
                one,
                f"was not let in: {verdict.reason}",
                f"this machine was not let into the run that {self._local} leads: {verdict.reason}. "
                "Workers of all machines talk to each other: let the machines reach each other on all ports.",
            )
            return
        one.pool = RemoteWorkerPool(lambda message: self._send(one, message), self._audience, self._observer)
        leader = {"host": self._local.host, "address": self._local.address}
        self._send(one, {"welcome": leader})
        self._observer.arrived(one, one.pool)

    def _refuse(self, one: FollowingMachine, fate: str, sentence: str) -> None:
        """Send a machine away that was not let in; both sides are told why."""
        self._refusals.append(f"{one.name} {fate}")
        self._observer.remark(f"{one.name} {fate}.")
        self._send_away(one, {"refused": sentence})

    def _send_away(self, one: FollowingMachine, message: Message) -> None:
        self._send(one, message)
        one.sent_away = True

    def _send(self, one: FollowingMachine, message: Message) -> None:
        if self._server is not None and not one.sent_away:
            self._server.send(one.peer, message)

    def _too_few(self) -> str:
        wanted = self._rendezvous
        came = [str(self._local), *(one.name for one in self.present())]
        refusals = "".join(f" {sentence}." for sentence in self._refusals)
        return (
            f"{len(came)} of {wanted.min_nodes} machines came to {wanted.endpoint} within {wanted.join_s:g} s: "
            f"{', '.join(came)}.{refusals} Start the same command on the others, or let --nodes allow fewer."
        )


def gone(reason: str, silence_s: float) -> str:
    """Return why a connection is over, in words that are true of an end and of silence: nobody can tell the two apart."""
    if reason != CLOSED:
        return reason
    return f"it has ended, or nothing was heard of it for {silence_s:g} s"


def _farewell(outcome: Outcome) -> Message:
    failure = outcome.failure
    if outcome.interrupted is not None:
        return {"failure": "it was interrupted there", "input": False}
    if failure is None:
        return {"failure": None, "input": False}
    words = failure.message if failure.kind in ("input", "disk", "few", "hang") else ""
    words = words or f"rank {failure.rank} on {failure.host} {failure.cause()}"
    return {"failure": words, "input": failure.kind == "input"}


def unmet(reason: str) -> WorkerFailure:
    """Return the error that the machines did not come together: nothing has run, and the command line is to be corrected."""
    return WorkerFailure(rank=0, host=env.host(), kind="input", message=reason)
