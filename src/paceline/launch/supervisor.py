"""Watches over the workers of one launch: hears what happens to them, decides with the membership, and has it carried out."""

from __future__ import annotations

import dataclasses
import selectors
import signal
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.errors import InputError
from paceline.launch import deadly_steps, failures
from paceline.launch.actions import (
    Action,
    Assign,
    AwaitCause,
    Begin,
    Break,
    Expel,
    GiveUp,
    Release,
    Say,
    Start,
    StartOver,
    Tell,
)
from paceline.launch.announcements import Announcements
from paceline.launch.base import LaunchPlan, Outcome
from paceline.launch.console import Console
from paceline.launch.control import ControlSocket
from paceline.launch.failures import WorkerFailure
from paceline.launch.health.monitor import HealthMonitor
from paceline.launch.health.watch import GroupWatch
from paceline.launch.job import ScriptCall
from paceline.launch.member import State
from paceline.launch.membership import Membership
from paceline.launch.nodes.admission import FollowingMachine
from paceline.launch.nodes.inventory import LEADER, Node, Nodes
from paceline.launch.nodes.leading import Leading
from paceline.launch.nodes.probation import Probation
from paceline.launch.nodes.remote_worker_pool import RemoteWorkerPool
from paceline.launch.shutdown import ECHO_WAIT_S, STOP_WAIT_S, TERMINATE_WAIT_S, Shutdown
from paceline.launch.workers.pool import LocalWorkerPool
from paceline.launch.workers.roster import Roster, RosterEntry
from paceline.launch.workers.scheduler import WorkerScheduler
from paceline.observe.events import Event, Note, WorkerLost, to_json
from paceline.observe.verdict import Verdict
from paceline.recovery.membership import Standing
from paceline.training import folder as run_folder
from paceline.world import env

NOTICES = (signal.SIGINT, signal.SIGTERM)
"""The signals whose first one lets the run end after a step, with a checkpoint."""
ROSTER_S = 0.02
"""How long workers.json may lag behind."""
END_S = 2.0
"""Of --grace, what is left for the end of workers that did not come to one."""


class Supervisor:
    """Everything that happens between the start of the first worker and the end of the last."""

    def __init__(self, plan: LaunchPlan, folder: Path, console: Console) -> None:
        self._plan, self._folder, self._console = plan, folder, console
        self._selector = selectors.DefaultSelector()
        self._pool = LocalWorkerPool(folder, console, self._selector, self, plan.output)
        self._membership = membership = Membership(plan.policy, time.monotonic)
        self._roster, self._shutdown = Roster(), Shutdown()
        self._announcements = Announcements(self._tell)
        own = Node(LEADER, env.host(), self._pool, plan.address, wanted=len(plan.jobs))
        self._nodes = Nodes(own)
        self._scheduler = WorkerScheduler(plan, self._nodes, self._roster, membership)
        self._health = HealthMonitor(
            GroupWatch(plan.policy.hang_timeout), self._nodes, self._roster, membership
        )
        self._without: list[int] = []
        """The ranks that were lost and that the others do without."""
        self._said_unsaved = False
        self._leave_by: float | None = None
        """When the time is over that SIGTERM leaves for a checkpoint."""
        if plan.out is not None and isinstance(plan.jobs[0].call, ScriptCall):
            self._shutdown.grace_s = max(TERMINATE_WAIT_S, plan.grace - TERMINATE_WAIT_S)
        self._cause_by: float | None = None
        """Until when the cause of a start that failed is waited for, if it is."""
        self._probation = Probation()
        self._roster_at: float | None = None
        """When workers.json is to be written, if it is."""
        self._told_to_break = -1
        """The latest generation whose group was told to break."""
        self._leading = Leading(plan, self._selector, self, console) if plan.rendezvous is not None else None
        if console.wake is not None:
            self._selector.register(console.wake, selectors.EVENT_READ, console.check)
        self._control: ControlSocket | None = None
        if plan.out is not None and plan.policy.elastic:
            try:
                self._control = ControlSocket(plan.out, self._on_order)
                self._selector.register(self._control, selectors.EVENT_READ, self._control.serve)
            except OSError as error:
                self._say(
                    f"note: {error.strerror}: this run takes no orders (paceline resize, paceline stop)."
                )

    # The life of a launch.

    def run(self) -> Outcome:
        """Start the workers, and serve until every one has ended and every byte it wrote has been read."""
        with self._shutdown.on_signals(self._selector, NOTICES if self._can_stop else ()):
            self._scheduler.open_store()
            if self._leading is not None:
                self._leading.open()
            while (
                self._leading is not None and not self._leading.gathered() and not self._shutdown.in_progress
            ):
                self._turn()
            if not self._shutdown.in_progress:
                self._scheduler.start_all()
            while self._busy():
                self._turn()
        results, ending = self._roster.results(), self._shutdown
        noticed = ending.notice if ending.cause is None else None
        if not results and noticed is None and not ending.in_progress and self._scheduler.started:
            self._shutdown.begin(failures.nobody_finished(env.host()))
        self._announcements.drop() if self._shutdown.in_progress else self._announcements.tell_all()
        outcome = Outcome(
            results=results,
            failure=self._shutdown.cause,
            errors=self._membership.errors,
            interrupted=ending.interrupted or noticed,
            at_once=ending.interrupted is not None,
            saved_at=run_folder.newest_step(self._plan.out) if noticed and self._plan.out else None,
            restarts=self._membership.restarts,
            lost=tuple(sorted(self._without)),
        )
        if self._leading is not None:
            self._leading.dismiss(outcome)
        return outcome

    def close(self) -> None:
        """End what still runs, and close every descriptor."""
        if self._leading is not None:
            self._leading.close()
        self._pool.close()
        self._scheduler.close()
        if self._control is not None:
            self._selector.unregister(self._control)
            self._control.close()
        self._selector.close()

    def _busy(self) -> bool:
        if self._shutdown.interrupted is not None and not self._pool.alive():
            return False
        if self._shutdown.overdue:
            return False  # what SIGKILL does not end is left behind
        busy = any(one.running and not self._only_waits(one) for one in self._roster)
        return busy or self._pool.unheard

    def _only_waits(self, entry: RosterEntry) -> bool:
        """Return whether a worker is none of the group's yet: nobody waits for one when the run ends meanwhile."""
        member = self._membership.members.get(entry.number)
        return member is not None and member.newcomer

    def _turn(self) -> None:
        """Wait for what happens next, and take it."""
        ending = self._shutdown
        look_at = None if ending.in_progress else self._health.due
        far = None if self._leading is None else time.monotonic() + self._leading.tick()
        moments = [ending.deadline, look_at, far, self._roster_at]
        if not ending.in_progress:
            moments += [self._membership.due, self._announcements.due, ending.remind_at]
            moments += [self._cause_by, self._leave_by]
        times = [moment for moment in moments if moment is not None]
        wait = max(0.0, min(times) - time.monotonic()) if times else None
        for key, _ in self._selector.select(wait):
            # A callback before this one may have closed the descriptor, and even have opened another of that number.
            if self._selector.get_map().get(key.fd) is key:
                key.data[0]() if isinstance(key.data, tuple) else key.data()
        if self._roster_at is not None and time.monotonic() >= self._roster_at:
            self._write_roster()
        if self._leading is not None:
            self._leading.tick()
            self._see_who_works()
        if not ending.in_progress:
            self._announcements.tell_due()
            if self._cause_by is not None and time.monotonic() >= self._cause_by:
                self._cause_by = None
                self._do(self._membership.unexplained())
            if (due := self._membership.due) is not None and time.monotonic() >= due:
                self._do(self._membership.tick())
            self._heed_notice()
            self._save_on_the_way()
        if ending.due:
            self._say_unsaved()
            if ending.interrupted is not None and self._pool.unstarted:
                self._pool.kill_server()  # it still loads torch: waiting for that only to end its workers helps nobody
                return
            self._end_all()
        elif not ending.in_progress and look_at is not None and time.monotonic() >= look_at:
            self._look()

    def _have_steps(self, entries: Iterable[RosterEntry]) -> bool:
        """Return whether one of these workers has finished a step."""
        readings = [self._nodes[one.node].pool.reading(one.number) for one in entries]
        return any(reading is not None and reading.steps for reading in readings)

    @property
    def _can_stop(self) -> bool:
        """Whether the run can end after a step with a checkpoint: it has a folder, and its workers can regroup."""
        return self._plan.out is not None and self._membership.policy.elastic

    def _say_unsaved(self) -> None:
        """Report that a run with a folder is left at once, where its workers cannot end after a step."""
        trains = any(one.trains for one in self._roster.running())
        if self._shutdown.interrupted is None or self._can_stop or self._plan.out is None or not trains:
            return
        if not self._said_unsaved:
            self._said_unsaved = True
            self._say(
                "interrupted: leaving at once, without a checkpoint: with --no-elastic the workers cannot end after a step. "
                "--save-every saves on the way."
            )

    def _heed_notice(self) -> None:
        """Make the workers save a checkpoint after the next step and end; tell the user, and how to leave earlier."""
        ending, now = self._shutdown, time.monotonic()
        if ending.notice is None:
            return
        if not self._membership.stopping:
            if not any(one.trains for one in self._roster.running()):
                ending.interrupt(ending.notice)  # there is nothing to save yet
                return
            terminated, grace = ending.notice == signal.SIGTERM, self._plan.grace
            who, again = ("SIGTERM", "A second one") if terminated else ("interrupted", "Ctrl-C again")
            self._say(
                f"{who}: finishing the step and saving a checkpoint"
                + (f", in {grace:g} s at most (--grace)" if terminated else "")
                + f". {again} leaves at once, without."
                if self._have_steps(self._roster.running())
                else f"{who}: no step has been finished yet. Ending before the first, with nothing to save, or with a "
                f"checkpoint after it where it is being taken. {again} leaves at once."
            )
            if terminated:
                self._leave_by = now + max(grace / 2, grace - END_S)
            else:
                ending.remind_at = now + STOP_WAIT_S
            self._do(self._membership.stop())
        elif self._leave_by is not None and now >= self._leave_by:
            self._leave_by = None
            self._say(
                f"SIGTERM: the step or its checkpoint was not done within --grace {self._plan.grace:g}. Leaving at once."
            )
            ending.interrupt(signal.SIGTERM)
        elif ending.remind_at is not None and now >= ending.remind_at:
            ending.remind_at = None
            self._say(
                f"the workers are still at it after {STOP_WAIT_S:g} s (a long step, an evaluation or a slow disk). "
                "Ctrl-C again leaves at once, without a checkpoint."
            )

    def _save_on_the_way(self) -> None:
        """Have a checkpoint saved behind the next step where SIGUSR1 asks for one, or report why none can be."""
        if not self._shutdown.saves_wanted:
            return
        self._shutdown.saves_wanted = 0
        out = self._plan.out
        if out is None or not self._can_stop or not any(one.trains for one in self._roster.running()):
            self._say(
                "SIGUSR1: no checkpoint can be saved: "
                + (
                    "training has not begun."
                    if self._can_stop
                    else "that needs a run folder (--out) and workers that can regroup."
                )
            )
            return
        self._say(f"SIGUSR1: saving a checkpoint behind this step, in {out / run_folder.CHECKPOINTS}.")
        self._do(self._membership.save())

    def _end_all(self) -> None:
        plain, training = self._shutdown.signals()
        for entry in self._roster.running():
            self._signal(entry, training if entry.trains else plain)

    def _signal(self, entry: RosterEntry, number: signal.Signals) -> None:
        self._nodes[entry.node].pool.signal(entry.number, number)

    def _look(self) -> None:
        """Act on what can be seen of the workers."""
        found = self._health.look()
        if found.verdict is not None:
            self._act_on(found.verdict)
        for change in found.changes:
            self._tell(self._health.describe(change))
        if found.shares is not None and self._membership.policy.rebalance:
            self._do(self._membership.reshare(found.shares))

    def _act_on(self, verdict: Verdict) -> None:
        """End the workers that hang: they are replaced like dead ones. Where all wait for each other, nobody is to blame."""
        if verdict.kind == "shared":
            self._tell(Note(text=verdict.sentence))
            return
        stuck = {one.number for one in self._roster.running() if one.rank in verdict.stuck}
        if not verdict.stuck:
            if self._membership.changing:
                # Whoever has left the group waits for the next; one that still waits in it will not leave by itself.
                stuck = {one.number for one in self._membership.overstaying()}
            else:
                self._do(
                    [GiveUp(WorkerFailure(rank=0, host=env.host(), kind="hang", message=verdict.sentence))]
                )
                return
        self._tell(Note(text=verdict.sentence))
        # In full where that ends the run, shortly where it was said before.
        words = "made no progress" if self._membership.policy.elastic else verdict.sentence
        for number in sorted(stuck):
            self._expel(Expel(number, WorkerFailure(rank=-1, host="", kind="hang", message=words)))

    def _expel(self, action: Expel) -> None:
        """End a worker, and go on without waiting for its end: one that the kernel holds in a read or a write has none yet."""
        if action.member not in self._roster or not self._roster[action.member].running:
            return
        entry = self._roster[action.member]
        host, failure = self._nodes[entry.node].host, action.failure
        if entry.rank < 0 and (place := self._health.place(entry)):
            failure = dataclasses.replace(failure, message=f"{failure.message}: it was {place}")
        self._signal(entry, signal.SIGKILL)
        self._lost(entry, dataclasses.replace(failure, rank=entry.rank, host=host))

    # What the worker pools tell. Those of other machines may speak of workers that are forgotten here already.

    def started(self, number: int, pid: int) -> None:  # noqa: ARG002
        """Have it written down who runs where."""
        self._write_roster_soon()

    def _write_roster_soon(self) -> None:
        """Once for all that start in the same moment: there may be thousands."""
        self._roster_at = self._roster_at or time.monotonic() + ROSTER_S

    def _write_roster(self) -> None:
        self._roster_at = None
        self._scheduler.write_roster(self._folder, self._pool.files)

    def said(self, number: int, kind: str, value: Any) -> None:
        """Take a worker's message."""
        if number not in self._roster:
            return
        entry, membership = self._roster[number], self._membership
        match kind:
            case "began":
                entry.trains = True
                self._do(membership.began(number))
                self._fill()
            case "met":
                self._do(membership.met(number))
            case "ready":
                entry.trains = True
                self._do(membership.ready(number))
            case "broken":
                standing = Standing(**value)
                self._note_unformed(standing)
                self._do(membership.broken(number, standing))
            case "leaving":
                self._do(membership.wants_to_leave(number))
            case "raised":
                self._do(membership.raised(number, value, value.step))
                self._announce(entry, dataclasses.replace(value, rank=entry.rank))
            case "failure":
                entry.reported = value
            case "result":
                entry.result, entry.returned = value, True

    def ended(self, number: int, status: int, why: str = "") -> None:
        """Take note of a worker's end, and decide how the others go on."""
        if number not in self._roster:
            return
        entry = self._roster[number]
        if not entry.running:
            return  # it was expelled, and is counted as lost already
        if self._roster_at is not None:
            self._write_roster()  # while it counts in: a group is written down whole, however short its life
        entry.running = False
        failure = entry.reported
        if failure is None and (status != 0 or self._ended_early(entry)):
            step = self._pool.last_step(number)
            failure = failures.from_status(status, entry.rank, self._nodes[entry.node].host, step)
            failure = dataclasses.replace(failure, message=f"was lost: {why.rstrip('.')}") if why else failure
        if failure is None:
            if isinstance(self._plan.jobs[0].call, ScriptCall):
                self._shutdown.note_ended(entry.rank)
                self._scheduler.note_ended(entry.rank, self._nodes[entry.node].host)
            self._do(self._membership.ended(number))
        else:
            self._lost(entry, dataclasses.replace(failure, rank=entry.rank))

    def _ended_early(self, entry: RosterEntry) -> bool:
        """Return whether a worker ended without a word before its part was done; a script says nothing at its end."""
        member = self._membership.members.get(entry.number)
        release = self._membership.stopping or (member is not None and member.state is State.RELEASED)
        return not (entry.returned or release or isinstance(self._plan.jobs[0].call, ScriptCall))

    def _announce(self, entry: RosterEntry, failure: WorkerFailure) -> None:
        """Queue the message that the user's code failed on a worker, with its traceback, for when the run goes on."""
        host = self._nodes[entry.node].host if self._nodes.get(entry.node) is not None else failure.host
        reason = f"{failure.cause()}{failure.place()}, which is tried once more"
        self._announcements.add(WorkerLost(failure.rank, host, reason, failure.step, failure.trace))

    def _lost(self, entry: RosterEntry, failure: WorkerFailure) -> None:
        entry.running = False
        if entry.node in self._probation:
            failure = self._failed_to_join(entry, failure)
        if (node := self._nodes.get(entry.node)) is not None:
            words = failure.trace or f"rank {failure.rank} {failure.message}\n"
            node.pool.write_log(entry.number, words)
        if self._shutdown.in_progress:
            self._shutdown.note(failure)
            return
        actions = self._membership.lost(entry.number, failure, failure.step)
        if not any(isinstance(action, GiveUp | AwaitCause) for action in actions):
            if failure.of_code and self._membership.policy.elastic:
                self._announce(entry, failure)
            else:
                self._tell(WorkerLost(rank=failure.rank, host=failure.host, reason=failure.cause()))
            if entry.rank in self._membership.policy.expendable and not entry.returned:
                self._without.append(entry.rank)
        self._do(actions)

    # What is heard of other machines.

    def arrived(self, machine: FollowingMachine, pool: RemoteWorkerPool) -> None:
        """Add a machine to the run: from the beginning, or from the next step on."""
        policy = self._membership.policy
        vacant = policy.most - self._nodes.wanted
        to_come = 1 if self._plan.rendezvous is None else self._plan.rendezvous.max_nodes - len(self._nodes)
        wanted = min(len(self._plan.jobs) - policy.server_count, -(-vacant // max(1, to_come)))
        node = Node(machine.index, machine.host, pool, machine.store_address, wanted, due=wanted)
        self._nodes.add(node)
        self._membership.target = self._nodes.wanted
        if self._scheduler.started:
            self._probation.begin(node.index)
            self.remark(f"{machine.name} has come; {node.wanted} workers join there.")
            self._fill()

    def left(self, machine: FollowingMachine, fate: str) -> None:
        """Take a machine's workers as lost; none is started elsewhere in their place."""
        lost = self._roster.on(machine.index)
        self._nodes.drop(machine.index)
        self._probation.end(machine.index)
        self._membership.target = self._nodes.wanted
        self.remark(f"{machine.name} and its {len(lost)} workers are gone. It {fate}.")
        for entry in lost:
            if entry.number in self._roster:  # else all were started over because of the one before
                fate = "was lost with its machine"
                self._lost(
                    entry, WorkerFailure(rank=entry.rank, host=machine.host, kind="signal", message=fate)
                )

    def unmet(self, failure: WorkerFailure) -> None:
        """End a launch whose machines did not come together."""
        self._shutdown.begin(failure)

    def remark(self, text: str) -> None:
        """Print for the user; a folder that has events before its workers have seen it would be another run's to them."""
        if any(one.trains for one in self._roster):
            self._tell(Note(text=text))
        else:
            self._console.event(Note(text=text))

    def _see_who_works(self) -> None:
        """Count new machines among the others once a worker of theirs has finished a step."""
        for index in self._probation.indices():
            if self._have_steps(self._roster.on(index)):
                self._probation.end(index)

    def _failed_to_join(self, entry: RosterEntry, failure: WorkerFailure) -> WorkerFailure:
        """Return a failure on a new machine as no more than a lost worker; the second costs that machine its place."""
        first = next(iter(failure.message.splitlines()), failure.cause())
        fate = f"failed as it joined: {first}"
        attempt = self._membership.generation if entry.rank >= 0 else -1 - entry.number
        self._count_unformed(entry.node, attempt, f"its workers failed to join, twice: {first}")
        return dataclasses.replace(failure, kind="signal", message=fate)

    def _note_unformed(self, standing: Standing) -> None:
        """Hold it against the newest machine when a group breaks that its workers are new in: it never came about, or nobody
        has told it to break.
        """
        generation = self._membership.generation
        if self._membership.changing or self._shutdown.in_progress:
            return
        if self._told_to_break >= generation and not standing.error:
            return
        members = self._membership.members
        for index in reversed(self._probation.indices()):
            if any(not members[one.number].newcomer for one in self._roster.on(index)):
                self._count_unformed(index, generation, "no group formed with its workers, twice")
                return

    def _count_unformed(self, index: int, attempt: int, reason: str) -> None:
        if self._leading is not None and self._probation.failed(index, attempt):
            self._leading.expel(index, reason)

    def _fill(self) -> None:
        """Start the first workers of machines that were not in the first group, once that trains."""
        if self._shutdown.in_progress or not self._membership.policy.elastic:
            return
        if not any(node.due for node in self._nodes):
            return
        first = [one for one in self._roster.running() if not self._only_waits(one)]
        if first and all(one.trains for one in first):
            self._scheduler.start_due()

    # What is to be done.

    def _do(self, actions: list[Action]) -> None:
        if self._shutdown.in_progress:
            return
        places = [action for action in actions if isinstance(action, Assign)]
        for action in actions:
            match action:
                case Break() | Begin() | Tell():
                    self._pass_on(action)
                case Assign() if action is places[0]:
                    self._scheduler.assign(places)
                    self._health.regrouped()
                    self._write_roster_soon()
                case Release():
                    self._roster[action.member].rank = -1
                    self._scheduler.send(action.member, {"do": "release"})
                case Start():
                    for _ in range(action.count):
                        self._scheduler.start_newcomer()
                case Expel() | Say():
                    self._expel(action) if isinstance(action, Expel) else self._tell(Note(text=action.text))
                case AwaitCause():
                    self._cause_by = self._cause_by or time.monotonic() + ECHO_WAIT_S
                case StartOver():
                    self._start_over(action.failure)
                    return
                case GiveUp():
                    found = deadly_steps.explain(action.failure, self._plan.out)
                    self._shutdown.begin(dataclasses.replace(found, host=found.host or env.host()))
                    return

    def _pass_on(self, action: Break | Begin | Tell) -> None:
        if isinstance(action, Break):
            self._told_to_break = max(self._told_to_break, action.generation)
        self._scheduler.send(action.member, _order(action))

    def _start_over(self, failure: WorkerFailure) -> None:
        self._cause_by = None
        out = self._plan.out
        saved = out is not None and run_folder.has_run(out)
        how = "from the last checkpoint" if saved else "from the beginning"
        self._tell(
            Note(text=f"no worker is left (rank {failure.rank} {failure.cause()}): starting over {how}.")
        )
        for node in self._nodes:
            node.pool.restart()
        self._roster.clear()
        self._membership.restarted()
        self._scheduler.open_store()
        self._scheduler.start_all()

    def _on_order(self, order: dict[str, Any]) -> str:
        """Carry out what somebody asks of the run from outside."""
        match order.get("do"):
            case "resize":
                return self._resize(order)
            case "stop":
                return self._stop()
        raise InputError(f"{order.get('do')!r} is not a request that a run in progress answers.")

    def _stop(self) -> str:
        """End the run as its first SIGTERM does; a second request changes nothing."""
        if not self._can_stop:
            raise InputError(
                "with --no-elastic the workers cannot end after a step. SIGTERM to the launcher ends them at once."
            )
        self._shutdown.notice = self._shutdown.notice or signal.SIGTERM
        return "the run ends after its step, with a checkpoint"

    def _resize(self, order: dict[str, Any]) -> str:
        workers, membership = order.get("workers"), self._membership
        if type(workers) is not int:
            raise InputError(f"a run can have a whole number of workers, not {str(workers)[:40]!r}.")
        policy = membership.policy
        servers = policy.server_count  # they stay: workers are those who train
        before, most = membership.target - servers, policy.most - servers
        if not policy.min_workers <= workers <= most:
            raise InputError(
                f"the run has {policy.shards} shards and --min-workers {policy.min_workers}, so {str(workers)[:20]} workers "
                f"cannot share it. Use {policy.min_workers} to {most}."
            )
        if policy.usable(workers + servers) != workers + servers:
            raise InputError(
                f"{policy.choice} cannot be laid out on {workers} workers without some that have nothing to do. "
                f"Use {policy.usable(workers + servers) - servers}, or another multiple."
            )
        if not any(one.trains for one in self._roster):
            raise InputError("the run has not begun to train yet. Try again in a moment.")
        actions = membership.resize(workers + servers)
        staying = [one for one in self._roster.running() if not membership.members[one.number].leaving]
        self._nodes.keep(Counter(one.node for one in staying))
        self._do(actions)
        return f"{before} -> {workers} workers"

    def _say(self, text: str) -> None:
        """Print for the user, whether or not there is a progress line."""
        self._console.output("err", f"{text}\n".encode(errors="backslashreplace"))

    def _tell(self, event: Event) -> None:
        """Report something about the run that no worker can say."""
        self._console.event(event)
        if self._plan.out is not None:
            line = to_json(event).encode(errors="backslashreplace") + b"\n"
            self._pool.files.append(self._plan.out / run_folder.EVENTS, line)


def _order(action: Break | Begin | Tell) -> dict[str, Any]:
    """Return what a worker is told."""
    match action:
        case Break():
            order = {"do": "break", **dataclasses.asdict(action)}
            del order["member"]
            return order
        case Begin():
            return {"do": "begin"}
        case Tell():
            return {"do": "note_lost", "rank": action.lost}
