"""The other machines of a run, as the launcher that leads them sees them: takes them in, and notices when one is gone."""

from __future__ import annotations

import selectors
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.launch.base import LaunchPlan, Outcome
from paceline.launch.failures import Failure
from paceline.launch.nodes.link import Listener, Message
from paceline.launch.nodes.remote_worker_pool import RemoteWorkerPool
from paceline.launch.nodes.rendezvous import Failed, Machine, Met, Offer, Refused, Report, Waiting
from paceline.launch.nodes.wire import Wire
from paceline.launch.workers.pool import Audience, LocalWorkerPool
from paceline.launch.workers.pool import Listener as CrewListener
from paceline.world import env

GOODBYE_S = 2.0
"""How long the others may take to confirm that the run has ended."""


class Observer(CrewListener, Protocol):
    """Who is told about machines, and about their workers."""

    def arrived(self, machine: Follower, pool: RemoteWorkerPool) -> None:
        """A machine is there and takes orders."""

    def left(self, machine: Follower, reason: str) -> None:
        """A machine is gone, and with it all its workers."""

    def remark(self, text: str) -> None:
        """Something that the user should know."""

    def unmet(self, failure: Failure) -> None:
        """The first meeting came to nothing."""


@dataclass
class Follower:
    """Another machine, from the moment its launcher connects."""

    index: int
    wire: Wire
    name: str = ""
    host: str = ""
    store_address: str = ""
    """Where its workers reach this machine."""
    pool: RemoteWorkerPool | None = field(default=None, repr=False)


class Leading:
    """The rendezvous, the links, and the machines at their other ends."""

    def __init__(
        self, plan: LaunchPlan, selector: selectors.BaseSelector, observer: Observer, audience: Audience
    ) -> None:
        if plan.rendezvous is None:
            raise RuntimeError("whoever leads needs a rendezvous")
        self._plan, self._rendezvous, self._selector = plan, plan.rendezvous, selector
        self._observer, self._audience = observer, audience
        self._followers: list[Follower] = []
        self._indices = 0
        self._met: Met | None = None
        self._gathered = False
        self._give_up_at = 0.0
        self._is_open = False

    def open(self, pool: LocalWorkerPool, store_port: int) -> None:
        """Hold the rendezvous, and listen for the launchers of other machines."""
        self._observer.remark(
            f"listening on {self._rendezvous.bound}: whoever can reach it can run code here. Use a network you trust."
        )
        address = self._rendezvous.bound
        secret = Offer(control_port=0, store_port=0).secret
        self._listener = Listener(address, secret.encode(), timeout_s=self._rendezvous.silence_s)
        self._selector.register(self._listener, selectors.EVENT_READ, self._on_connection)
        offer = Offer(control_port=self._listener.port, store_port=store_port, secret=secret)
        self._keeper = pool.start_keeper(
            self._plan.jobs[0], self._rendezvous, self._plan.agreed, offer, "rendezvous.log"
        )
        self._selector.register(self._keeper, selectors.EVENT_READ, self._on_keeper)
        self._is_open = True

    def gathered(self) -> bool:
        """Return whether all machines that met have come, or have had their time to; from then on each may come and go."""
        if self._met is not None and not self._gathered:
            here = 1 + len(self.present())
            late = time.monotonic() >= self._give_up_at
            self._gathered = here >= self._met.nodes or (late and here >= self._rendezvous.min_nodes)
        return self._gathered

    def present(self) -> list[Follower]:
        """Return the machines that take orders."""
        return [one for one in self._followers if one.pool is not None]

    def tick(self) -> float:
        """Keep the links alive and see which are over; give the seconds until something is due again."""
        now, due = time.monotonic(), [1.0]
        for one in list(self._followers):
            due.append(one.wire.tick(now))
            reason = one.wire.lost(now)
            if reason is None:
                continue
            self._followers.remove(one)
            if one.pool is not None:
                self._observer.left(one, reason)
            else:
                self._observer.remark(f"a connection was turned away: {reason}")
        if self._met is not None and not self.gathered() and now >= self._give_up_at:
            self._gathered = True
            self._observer.unmet(Failure(rank=0, host=env.host(), kind="few", message=self._unlinked()))
        return min(due)

    def dismiss(self, outcome: Outcome) -> None:
        """Notify all machines that the run has ended, and wait a moment for them to go."""
        going = list(self._followers)
        for one in going:
            one.wire.receive = lambda _: None
            one.wire.send({"do": "end", **_farewell(outcome)})
        deadline = time.monotonic() + GOODBYE_S
        while going and time.monotonic() < deadline:
            time.sleep(0.01)
            for one in going:
                one.wire.serve()
            going = [one for one in going if one.wire.lost(time.monotonic()) is None]

    def close(self) -> None:
        """Let go of everything."""
        for one in self._followers:
            one.wire.close()
        if self._is_open:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._stop_keeping()

    def _on_connection(self) -> None:
        link = self._listener.accept()
        if link is None:
            return
        self._indices += 1
        follower = Follower(self._indices, wire=Wire(link, self._selector, lambda _: None))
        follower.wire.receive = lambda message: self._on_message(follower, message)
        self._followers.append(follower)

    def _on_message(self, one: Follower, message: Message) -> None:
        if one.pool is not None:
            one.pool.hear(message)
            return
        hello: dict[str, Any] = message["hello"]
        machine = Machine(host=hello["host"], address=hello["address"])
        one.host, one.name, one.store_address = machine.host, str(machine), hello["leader"]
        one.wire.rename(one.name)
        one.pool = RemoteWorkerPool(one.wire.send, self._audience, self._observer)
        self._observer.arrived(one, one.pool)

    def _on_keeper(self) -> None:
        for report in self._keeper.on_readable():
            self._on_report(report)

    def _on_report(self, report: Report) -> None:
        match report:
            case Waiting():
                self._observer.remark(f"{report.reason}.")
            case Refused():
                self._observer.remark(f"{report.reason}.")
            case Met() if self._met is None:
                self._met = report
                self._give_up_at = time.monotonic() + self._rendezvous.silence_s
            case Failed() if self._met is None:
                self._observer.unmet(unmet(report.reason))
            case Failed():
                self._observer.remark(f"no other machine can join any more: {report.reason}")
                self._stop_keeping()

    def _stop_keeping(self) -> None:
        if self._keeper.fileno() >= 0:
            self._selector.unregister(self._keeper)
            self._keeper.close()

    def _unlinked(self) -> str:
        nodes = self._met.nodes if self._met is not None else 0
        return (
            f"{nodes} machines met, but only {1 + len(self.present())} of them reached port "
            f"{self._listener.port} of {self._rendezvous.host} within {self._rendezvous.silence_s:g} s. "
            "Let the machines reach each other on all ports."
        )


def _farewell(outcome: Outcome) -> Message:
    failure = outcome.failure
    if outcome.interrupted is not None:
        return {"failure": "it was interrupted there", "input": False}
    if failure is None:
        return {"failure": None, "input": False}
    words = failure.message if failure.kind in ("input", "disk", "few", "hang") else ""
    words = words or f"rank {failure.rank} on {failure.host} {failure.cause()}"
    return {"failure": words, "input": failure.kind == "input"}


def unmet(reason: str) -> Failure:
    """Return the error that the machines did not come together: nothing has run, and the command line is to be corrected."""
    return Failure(rank=0, host=env.host(), kind="input", message=reason)
