"""What a change of the group means for a run: what it releases, what it takes along, what it hands to others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.errors import InputError
from paceline.recovery.agreement import OpenBody, RolledBackError
from paceline.recovery.handover import BEGINNING, CHECKPOINT, SNAPSHOTS, WORKERS, StateSource
from paceline.recovery.membership import STATE_LOST
from paceline.recovery.position import Position
from paceline.state.chunks import LocalState
from paceline.state.optimizer_state import set_options
from paceline.strategies.base import Exactness
from paceline.strategies.replica import Replica
from paceline.training import folder, resuming
from paceline.training.attribute_changes import Then
from paceline.training.core import EngineCore
from paceline.training.description import new_receipt
from paceline.training.frozen import KEY as FROZEN
from paceline.training.frozen import freeze_as, frozen_names
from paceline.training.journal import Journal
from paceline.training.listeners import Listeners
from paceline.training.preparation import Preparation
from paceline.training.recorder import DataFacts
from paceline.training.saving import Saving
from paceline.training.user_loop.loop_state import Values
from paceline.world import all_gather_object
from paceline.world.kernels import kind_of
from paceline.world.words import say_farewell


@dataclass(kw_only=True)
class RunGroup:
    """A run as its recovery sees it."""

    core: EngineCore
    listeners: Listeners | None
    preparation: Preparation
    saving: Saving
    _joins: bool = field(default=False, init=False)
    """Whether this worker has yet to take over what the others have changed."""
    _formed_at: int | None = field(default=None, init=False)
    """How many operations were finished where the present group formed and took a snapshot; None in the first group."""
    _states: Values = field(default_factory=dict, init=False)
    """What the loop's own states were where the run goes on, should it go back."""
    _then: tuple[Replica, Then, int] | None = field(default=None, init=False)
    """What the run had changed there, after how many steps, and on what; None on a worker that joins."""

    def take_snapshot(self) -> None:
        """Send this worker's part of the state to its neighbour, where that is done.

        A group that has formed takes one at once. Until its workers have done something together, each comes from another place,
        the body of a step that broke or one that others finished, and takes no other: those beside it would not.
        """
        self.core.journal.read_pending()
        if not self.core.sharded.takes_snapshots:
            return
        if self.core.state.finished == self._formed_at:
            self.core.sharded.amend_snapshot(self.core.state.position, self.shared_state())
        else:
            self._take_snapshot(self.core.state.position, anew=True)

    def begin_snapshots(self) -> None:
        """Take the first one of a call of `run.steps`; all workers begin it together."""
        self.core.sharded.attach(self.core.state.world, self.core.state.replica)
        self._formed_at = None
        self.take_snapshot()

    def _take_snapshot(self, position: Position, *, anew: bool) -> None:
        self.core.sharded.take_snapshot(position, self.shared_state(), self.core.state.replica, anew=anew)

    # From one group to the next.

    @property
    def open_body(self) -> OpenBody | None:
        """The step in whose body a loop of the user's own is, where nothing has come of it, or nothing will."""
        return None if self.core.state.step is None else self.core.state.step.open_body

    def leave_group(self) -> None:
        """Release everybody: nobody may wait for this worker in the old group."""
        state = self.core.state
        say_farewell(state.world)
        state.world.interruption.interrupt()
        self.core.sharded.detach()
        self.saving.abandon()
        self.core.loop.leave_group()
        if state.replica_or_none is not None:
            state.replica_or_none.abandon()
        state.world.close()

    def break_off(self, *, in_step: bool) -> tuple[bool, bool]:
        """Put back what a body did in a step that broke; return whether it wrote to the model in it, and behind the last."""
        return self.core.loop.break_off(in_step=in_step)

    def prepare_group(self, before: Replica | None) -> Replica:
        """Prepare for the group that has formed, with what the replica of the one before was made of."""
        task = self.core.state.task
        if before is not None:
            self.core.changed.keep(before.model, task)
        replica = self.preparation.prepare_group(before)
        self.core.changed.put_back(replica.model, task)
        return replica

    def enter_group(self, position: Position, replica: Replica) -> None:
        """Take this worker's place in the group that has formed: its shards, its listeners, its records."""
        state = self.core.state
        state.replica_or_none = replica
        computes = replica.placement.computes
        self.core.changed.agree(state.world, replica.model, state.task, joins=self._joins, computes=computes)
        self._joins, self._then = False, None
        self.core.loop.guard.watch(replica)
        self.core.loop.body.enter_group()
        self.core.loaders.enter_group()
        if self.listeners is not None:
            self.listeners.listen(first=state.world.is_first)
        self.core.records.regroup(state.world, lambda: new_receipt(state, position))
        self.core.recovery.exits.enter_group(state.world)
        self.core.sharded.attach(state.world, replica)
        self._formed_at = state.finished
        if self.core.sharded.takes_snapshots:
            self._take_snapshot(position, anew=False)

    # The state beside the replica.

    def shared_state(self) -> dict[str, Any]:
        """Return what a worker that joins must know beside the model."""
        state, data = self.core.state, self.core.state.training
        return {
            "started_at": state.started_at,
            "workers": state.workers,
            "meta": state.meta,
            "journal": self.core.journal.state(),
            "measured": state.measured,
            "saved at": self.saving.saved_at,
            "stop at": state.stop_at,
            "epoch starts": (state.position, state.epoch_starts.at(state.position)),
            "states": self.core.loop.registered.snapshot(),
            **self.core.history.state(),
            "data": None if data is None else (DataFacts.of(data[0]), data[1]),
            "options": self.core.loop.body.options_then,
            "changed": self.core.changed.now(state.replica.model, state.task)
            if self._knows_changes
            else None,
            FROZEN: frozen_names(state.replica.model) if state.replica.whole else None,
        }

    @property
    def _knows_changes(self) -> bool:
        """Whether this worker has a model that it computes with, and has done so in the run."""
        state = self.core.state
        return not (state.waits_to_join or self._joins) and state.replica.placement.computes

    def adopt(self, position: Position, shared: dict[str, Any]) -> None:
        """Go on from where the others stand."""
        state, self._joins = self.core.state, True
        state.stand_at(position)
        state.started_at, state.meta, state.workers = shared["started_at"], shared["meta"], shared["workers"]
        if shared[FROZEN] is not None:
            freeze_as(state.replica.model, shared[FROZEN])
        self.core.journal.load(shared["journal"])
        state.stop_at = shared["stop at"]
        state.measured, self.saving.saved_at = shared["measured"], shared["saved at"]
        state.epoch_starts.adopt(position, *shared["epoch starts"])
        self.core.history.load(shared)
        state.others_training, self.core.history.adopted = shared["data"], shared["states"]
        self.core.loop.registered.load(shared["states"])

    def finish_step(self, shared: dict[str, Any]) -> None:
        """Take over the optimizer's options of right behind a step that others have finished, not those of further on."""
        if shared["options"] is not None:
            set_options(self.core.state.replica.optimizer, shared["options"], removes=True)

    # A sharded state.

    def newest_checkpoint(self) -> int | None:
        """Wait for a checkpoint that is being written, and return the step of the newest on disk."""
        self.saving.wait()
        return folder.newest_step(self.core.state.options.out)

    def restore(self, replica: Replica, source: StateSource, held: LocalState | None) -> Position:
        """Load into a new replica its part of the state from where it is, and return where the run goes on."""
        state, inputs = self.core.state, self.preparation.inputs
        if source.kind == CHECKPOINT:
            saved = resuming.load(replica, state.options, state.world, state.emit)
            self._states = saved.states
            self._agree_then(replica, source, saved.position.number, saved.changed)
            return saved.position
        self._states = self._states_at(source)
        if source.kind != BEGINNING:
            self.core.sharded.restore(replica, state.world, source, held)
        elif self.core.loop.body.beginning_changed:
            # The function does what it did to it once more, when the run starts over.
            raise RolledBackError(0)
        elif inputs is not None and not inputs.can_rebuild:
            raise InputError(
                f"{STATE_LOST}, and no copy or checkpoint has it; the beginning cannot be made "
                "again, because model or optimizer were given ready made. Give run.prepare functions that make them, "
                "--save-every or --peer-snapshots 1."
            )
        self._agree_then(replica, source, source.position.number)
        return source.position

    def _agree_then(
        self, replica: Replica, source: StateSource, number: int, saved: Then | None = None
    ) -> None:
        """Learn what the run had changed beside tensors where it goes on from; all workers call it."""
        self._then = None
        if source.kind == WORKERS:
            return
        state, mine = self.core.state, None
        if source.kind == CHECKPOINT:
            mine = self.core.changed.saved_at(number)
        elif source.kind == SNAPSHOTS and (snapshot := self.core.sharded.snapshot_at(number)) is not None:
            mine = snapshot.shared["changed"]
        joins = state.waits_to_join or self._joins
        computes = replica.placement.computes
        if saved is not None and computes:
            saved, _ = self.core.changed.from_saved(saved, replica.model, state.task)
        then = self.core.changed.agree_then(
            state.world, replica.model, state.task, None if joins else mine, saved, computes=computes
        )
        if computes and not joins:
            self._then = replica, then, number

    def _states_at(self, source: StateSource) -> Values:
        """Return what the loop's own states were where the run goes on; all workers call it."""
        if source.kind == BEGINNING:
            return self.core.loop.registered.beginning
        number = source.position.number
        snapshot = self.core.sharded.snapshot_at(number)
        mine: Values | None = None if snapshot is None else snapshot.shared["states"] or None
        state = self.core.state
        joins = state.waits_to_join  # and may have registered none yet
        if mine is None and source.kind == WORKERS and state.position.number == number and not joins:
            mine = self.core.loop.registered.snapshot()
        everybody: list[Values | None] = all_gather_object(state.world.comm, mine)
        return next((states for states in everybody if states is not None), {})

    @property
    def kernels(self) -> str:
        """What this worker's kernels are chosen by, where bits are promised."""
        state = self.core.state
        exact = state.exactness is Exactness.BITWISE
        return kind_of(state.world.device, compiled=state.options.compile, exact=exact)

    @property
    def registers_states(self) -> bool:
        """Whether the loop has registered states of its own."""
        return bool(self.core.loop.registered)

    def put_states_back(self) -> None:
        """Have them, and attributes, be what they were where the state comes from that was loaded last."""
        if self._then is not None:
            replica, then, number = self._then
            self.core.changed.set_back(replica.model, self.core.state.task, then, number)
            self._then = None
        if self.core.loop.registered:
            self.core.loop.registered.load(self._states)

    def go_back(self, position: Position) -> None:
        """Stand at an earlier step again."""
        if position.phase < self.core.state.position.phase:
            # Before this call of `steps` began: what the function did since then would be lost.
            raise RolledBackError(position.number)
        self.core.journal.load(self.core.sharded.go_back(position) or Journal.BEGINNING)
        self.core.state.stand_at(position)
        self.core.state.measured = None
        self.core.history.went_back, self.core.history.adopted = True, self._states
        self.put_states_back()
        self.saving.go_back(position)
        self.core.history.behind.drop(position.phase)
        self.core.recovery.exits.go_back(position.phase)
