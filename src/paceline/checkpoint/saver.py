"""Saves a run in all workers together: each writes its part, the first one commits; beside the training if asked to.

All workers must call `save`, in step. In the background it returns when this worker's part is copied to host memory; a
thread writes it, without a word to the others: each leaves a done-marker, and the first worker's thread commits when all have.
At most one save is in flight: the next one waits for it, so that which checkpoints exist does not depend on time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from paceline.checkpoint.background import Background
from paceline.checkpoint.contents import (
    CheckpointMetadata,
    Contents,
    own_slots,
    plain_extra_state,
    with_slots,
    written,
)
from paceline.checkpoint.durable import committing, discarding, remove
from paceline.checkpoint.file_record import FileRecord
from paceline.checkpoint.pending_checkpoint import Fault, PendingCheckpoint
from paceline.checkpoint.planning import ShardInventory, WritePlan, assign_writers
from paceline.checkpoint.staging import Staging
from paceline.checkpoint.store import Checkpoints
from paceline.checkpoint.tensors import dense
from paceline.checkpoint.writing import SaveAbortedError, Saved, Writing
from paceline.errors import CheckpointError
from paceline.state.chunks import LocalState
from paceline.world import Comm, World, all_gather_object, broadcast_object

Value = TypeVar("Value")
CLOSING_S = 10.0
"""How long the end of a process waits for a save that is in progress."""


@dataclass(frozen=True)
class _Hello:
    """What each worker says at the beginning of a save."""

    changed: bool
    """Whether it holds other chunks than at the last save of this group."""
    fault: Fault
    last: int
    slots: dict[str, Any]
    """What its optimizer keeps that is no tensor."""
    own: bool
    """Whether it knows of a checkpoint of this step that the run itself has saved."""


class Saver:
    """One worker's part in all saves of a run."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        *,
        saved: Callable[[Saved], None] = lambda _: None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Register callbacks: `saved` and `note` run in the training thread of the worker that commits."""
        self.checkpoints = checkpoints
        self._saved, self._note = saved, note
        self._staging = Staging()
        self._job: Background[Saved | None] | None = None
        self._last = -1
        self._late = Fault()
        """What went wrong in the background, until all have been told."""
        self._agreed: tuple[Comm, ShardInventory, WritePlan] | None = None

    def save(
        self,
        world: World,
        held: LocalState,
        metadata: CheckpointMetadata,
        *,
        background: bool = False,
        unless_saved: bool = False,
    ) -> Fault:
        """Write a checkpoint, `unless_saved` already at this step; all workers learn what went wrong.

        In the background what goes wrong later is told by the next call, or is a note where it was the disk.
        """
        started = time.perf_counter()
        self.wait()
        inventory = ShardInventory.of(world.host, held.chunks)
        extra_state, fault = self._checked(world, held, metadata)
        changed = self._agreed is None or self._agreed[0] is not world.comm or self._agreed[1] != inventory
        slots = {} if world.is_first else own_slots(extra_state)
        own = metadata.step in self.checkpoints.own
        everybody: list[_Hello] = all_gather_object(
            world.comm, _Hello(changed, fault, self._last, slots, own)
        )
        self._late = Fault()
        fault = _worst(hello.fault for hello in everybody)
        if fault or (unless_saved and everybody[0].last == metadata.step):
            return fault
        if any(hello.changed for hello in everybody):
            self._agreed = None
        if any(hello.own for hello in everybody):
            self.checkpoints.own.add(metadata.step)
        try:
            plan, pending = self._prepare(world, inventory, metadata.step)
        except CheckpointError as error:
            return Fault.of(error)  # the same on all workers
        part = plan.part_of(world.rank)
        tensors = {} if part is None else written(held.chunks, plan.keys[part])
        writing = Writing(
            checkpoints=self.checkpoints,
            pending=pending,
            part=part,
            contents=Contents(
                metadata=metadata,
                plan=plan,
                tensors=tensors,
                extra_state=with_slots(extra_state, *(hello.slots for hello in everybody))
                if world.is_first
                else {},
            ),
            started=started,
        )
        fault = self._begin(world, writing) if background else self._write(world, writing)
        if not fault:
            self.checkpoints.own.add(metadata.step)
        return fault

    def poll(self) -> None:
        """Report a save in the background that has come to its end; to be called often, costs nothing."""
        if self._job is not None and self._job.done:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in flight, if there is one, and report what came of it."""
        job, self._job = self._job, None
        if job is None:
            return
        try:
            saved = job.result()
        except SaveAbortedError as error:
            self._note(str(error))
        except CheckpointError as error:
            fault = Fault.of(error)
            if fault.disk:
                self._note(f"{error} Training goes on; the next checkpoint is tried when it is due.")
            else:
                self._late = fault
        else:
            if saved is not None:
                self._finish(saved)

    def abandon(self) -> None:
        """Abort the save in flight, unless all parts are written: the group has changed."""
        self._agreed = None
        if self._job is not None:
            self._job.give_up()

    def close(self) -> None:
        """Wait for a save in progress, and abandon it if that takes longer than CLOSING_S."""
        if self._job is not None:
            if not self._job.ends_within(CLOSING_S):
                self._job.give_up()
            self.wait()

    # What all agree on.

    def _checked(
        self, world: World, held: LocalState, metadata: CheckpointMetadata
    ) -> tuple[dict[str, Any], Fault]:
        """Find what cannot be saved before anybody has begun."""
        if self._late:
            return {}, self._late
        try:
            metadata.check()
            for key, chunk in held.chunks.items():
                dense(chunk.values, key.partition("/")[2])
            extra_state = held.extra_state if world.is_first else with_slots({}, own_slots(held.extra_state))
            return plain_extra_state(extra_state), Fault()
        except CheckpointError as error:
            return {}, Fault.of(error)

    def _prepare(
        self, world: World, inventory: ShardInventory, step: int
    ) -> tuple[WritePlan, PendingCheckpoint]:
        """Agree on who writes what; where others than the first one write, the folder is open afterwards."""
        known = None if self._agreed is None else self._agreed[2]
        pending = self.checkpoints.pending(step)
        if known is not None:
            several = known.writers != (0,)
            return known, _from_first(world, lambda: self._opened(known, pending)) if several else pending
        inventories: list[ShardInventory] = all_gather_object(world.comm, inventory)
        plan, pending = _from_first(world, lambda: self._planned(inventories, pending))
        if plan.writers != (0,):
            sees: list[bool] = all_gather_object(world.comm, pending.partial.is_dir())
            if not all(sees):
                with _tidy(world, pending):
                    plan = _from_first(world, lambda: assign_writers(inventories, sees))
        self._agreed = world.comm, inventory, plan
        return plan, pending

    def _planned(
        self, inventories: list[ShardInventory], pending: PendingCheckpoint
    ) -> tuple[WritePlan, PendingCheckpoint]:
        plan = assign_writers(inventories)
        return plan, self._opened(plan, pending)

    def _opened(self, plan: WritePlan, pending: PendingCheckpoint) -> PendingCheckpoint:
        if plan.writers != (0,):
            with committing(pending.partial, pending.final):
                self.checkpoints.open(pending)
        return pending

    # Writing.

    def _write(self, world: World, writing: Writing) -> Fault:
        """Write the checkpoint in the foreground: all workers wait."""
        fault = Fault()
        saved: Saved | None = None
        with _tidy(world, writing.pending):
            told: list[tuple[FileRecord | None, Fault]] = []
            weights: Background[str] | None = None
            if not writing.alone:
                part = writing.begin_part()
                fault = _worst(all_gather_object(world.comm, part.fault))
                if world.is_first and not fault:
                    # All parts can be read now, while they go to the disk.
                    weights = Background(lambda _: writing.fingerprint())
                told = all_gather_object(world.comm, part.record())
                fault = fault or _worst(one for _, one in told)
            if world.is_first and fault:
                remove(writing.pending.partial)
            elif world.is_first:
                try:
                    saved = self._commit(writing, told, weights)
                except CheckpointError as error:
                    fault = Fault.of(error)
            outcome: Fault = broadcast_object(world.comm, fault)
        if saved is not None:
            self._finish(saved)
        return outcome

    @staticmethod
    def _commit(
        writing: Writing, told: list[tuple[FileRecord | None, Fault]], weights: Background[str] | None
    ) -> Saved:
        if weights is None:
            return writing.commit_alone()
        records = {part: told[rank][0] for part, rank in enumerate(writing.contents.plan.writers)}
        found = {part: record for part, record in records.items() if record is not None}
        return writing.commit(found, weights.result)

    def _begin(self, world: World, writing: Writing) -> Fault:
        """Copy this worker's part and have a thread write it."""
        copied = writing.copied(self._staging)
        if world.is_first:
            self._job = Background(lambda job: copied.commit_when_done(job, world.interruption))
        elif copied.part is not None:
            self._job = Background(lambda _: copied.write_part_and_mark())
        return Fault()

    def _finish(self, saved: Saved) -> None:
        self._last = saved.step
        for text in saved.notes:
            self._note(text)
        self._saved(saved)


def _from_first(world: World, act: Callable[[], Value]) -> Value:
    """Call `act` on rank 0 and return its result on every worker, or raise its error on every worker."""
    value: Value | None = None
    fault = Fault()
    if world.is_first:
        try:
            value = act()
        except CheckpointError as error:
            fault = Fault.of(error)
    value, fault = broadcast_object(world.comm, (value, fault))
    if fault:
        raise fault.error()
    return cast(Value, value)


def _tidy(world: World, pending: PendingCheckpoint) -> AbstractContextManager[None]:
    """Return a context that removes the partial folder on an error, on the worker that made it and on no other."""
    return discarding(pending.partial) if world.is_first else nullcontext()


def _worst(faults: Iterable[Fault]) -> Fault:
    """Return the gravest fault: one that is not the disk's, else one of the disk, else None."""
    return max(faults, key=lambda one: (bool(one), not one.disk))
