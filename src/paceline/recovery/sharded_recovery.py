"""What a worker knows and keeps of a sharded state: its outline, and snapshots of its parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from paceline.checkpoint.contents import with_slots
from paceline.recovery import departing_state
from paceline.recovery.handover import (
    SNAPSHOTS,
    WORKERS,
    StateInventory,
    StateSource,
    inventory_rows,
    receive,
)
from paceline.recovery.options import RecoveryOptions
from paceline.recovery.peer_snapshots import PeerSnapshots, Snapshot
from paceline.recovery.position import Position
from paceline.state.chunks import MODEL, LocalState, TensorChunk
from paceline.strategies.replica import Replica
from paceline.world import World, all_gather_object

Numbers = dict[str, float]
"""The sums that a run tells of its steps, as they were at one of them."""


class ShardedRecovery:
    """Serves a replica that holds only a part; for one that holds everything there is nothing to do."""

    def __init__(self, options: RecoveryOptions) -> None:
        self._options = options
        self._snapshots = PeerSnapshots(options.snapshot_every)
        self.takes_snapshots = options.snapshot_every is not None
        """Whether parts of the state are copied to neighbours at all."""
        self.moved_bytes = 0
        """Bytes of the state that went from one worker to another for the group that formed last."""
        self._outline: dict[str, bool] = {}
        """Every tensor of the model, and whether it is trained."""
        self._departing: dict[int, list[LocalState]] = {}
        """What workers that left have written down; of the rest only what their optimizers kept that is no tensor."""
        self._saved_numbers: dict[int, Numbers] = {}
        """What the numbers were at each checkpoint, should the run go back there; for a worker that has joined, where else others
        may go back to, too."""
        self._recent_numbers: dict[int, Numbers] = {}
        """What they were after the last steps, where this worker may be ahead of those that hold the state."""

    def survey(self, replica: Replica, world: World) -> int:
        """Learn what the state consists of on all workers, and return the number of the model's parameters."""
        parameters = dict(replica.model.named_parameters())
        held = {} if replica.whole else replica.local_state().chunks
        # Of a tensor that is sharded the whole counts, not the part that lies here.
        sizes = {
            name: math.prod(held[f"{MODEL}/{name}"].meta.shape)
            if f"{MODEL}/{name}" in held
            else value.numel()
            for name, value in parameters.items()
        }
        trained = {f"{MODEL}/{name}" for name, value in parameters.items() if value.requires_grad}
        if replica.whole:
            # The next group may be one that shards it.
            names = (f"{MODEL}/{name}" for name in replica.model.state_dict())
            self._outline = {key: key in trained for key in names}
            return sum(sizes.values())
        mine = {key: key in trained for key in held if key.startswith(f"{MODEL}/")}
        for outline, others in all_gather_object(world.comm, (mine, sizes)):
            self._outline |= outline
            sizes |= others
        return sum(sizes.values())

    # Snapshots in neighbours' memory.

    def attach(self, world: World, replica: Replica) -> None:
        """Take snapshots in a group that has just formed; everybody calls it."""
        if self.takes_snapshots and not replica.whole:
            self._snapshots.attach(world)

    def detach(self) -> None:
        """Release the group."""
        self._snapshots.detach()

    def due(self, position: Position) -> bool:
        """Return whether a snapshot is to be taken after a step: it is time, or one was taken in the middle of its body."""
        every, number = self._snapshots.every, position.number
        return (every is not None and number % every == 0) or number in self._snapshots.kept

    def take_snapshot(
        self, position: Position, shared: dict[str, Any], replica: Replica, *, anew: bool
    ) -> None:
        """Copy this worker's part and send it to its neighbour, while training goes on."""
        if self.takes_snapshots and not replica.whole:
            self._snapshots.take(position, shared, replica.local_state(), anew=anew)

    def amend_snapshot(self, position: Position, shared: dict[str, Any]) -> None:
        """Replace the shared values in this step's snapshot by newer ones."""
        self._snapshots.amend(position, shared)

    def snapshot_at(self, number: int) -> Snapshot | None:
        """Return the snapshot of so many steps, if there is one."""
        return self._snapshots.kept.get(number)

    # A new group.

    def inventory(
        self, finished: int, position: Position, held: LocalState | None, checkpoint: int | None
    ) -> StateInventory:
        """Return what this worker can bring of the state; `checkpoint` is the newest that it sees on disk."""
        self._departing = {} if self._options.out is None else departing_state.read(self._options.out)
        self.moved_bytes = 0
        return StateInventory(
            finished=finished,
            position=position,
            rows={} if held is None else inventory_rows(held.chunks, held.answers_for),
            snapshots={
                number: (
                    one.position,
                    [
                        inventory_rows(one.own, one.answers_for),
                        inventory_rows(one.received, one.received_answers_for),
                    ],
                )
                for number, one in self._snapshots.kept.items()
            },
            departing={
                number: [inventory_rows(one.chunks, one.answers_for) for one in parts]
                for number, parts in self._departing.items()
            },
            checkpoint=checkpoint,
            outline=self._outline,
        )

    def restore(self, replica: Replica, world: World, source: StateSource, held: LocalState | None) -> None:
        """Load into a new replica its part of what the workers hold, now or in snapshots; all workers call it."""
        chunks, extra_state = self.brought(source, world.rank, held)
        self.moved_bytes = receive(world, source, chunks, extra_state, replica)

    def brought(
        self, source: StateSource, rank: int, held: LocalState | None
    ) -> tuple[list[Mapping[str, TensorChunk]], dict[str, Any] | None]:
        """Return what this worker has of the agreed state and of no other, though that be of the same step."""
        brings = rank in source.bringers
        if source.kind == SNAPSHOTS:
            snapshot = self.snapshot_at(source.position.number)
            if snapshot is None or not brings:
                return [], None
            return [snapshot.own, snapshot.received], snapshot.extra_state
        if source.kind != WORKERS:
            return [], None
        parts = self._departing.get(source.position.number, [])
        left = [one.chunks for one in parts]
        if held is None or not brings:
            return [*left], None
        return [held.chunks, *left], with_slots(held.extra_state, *(one.extra_state for one in parts))

    def leave_behind(self, position: Position, held: LocalState) -> None:
        """Write this worker's part down for the others: it was told to leave."""
        if self._options.out is not None:
            departing_state.write(self._options.out, position, held)

    def remove_departing(self, world: World) -> None:
        """Remove what was left for a group that now holds everything."""
        world.comm.barrier()
        if self._departing and self._options.out is not None:
            departing_state.remove(self._options.out)
        self._departing = {}

    # Going back.

    def note_checkpoint(self, position: Position, numbers: Callable[[], Numbers]) -> None:
        """Remember what the numbers are at a checkpoint, or at the beginning."""
        self._saved_numbers[position.number] = numbers()

    @property
    def numbers(self) -> dict[int, Numbers]:
        """What the numbers were wherever the run may go back to, for a worker that joins."""
        copied = {number: one.shared["journal"] for number, one in dict(self._snapshots.kept).items()}
        return {**self._saved_numbers, **self._recent_numbers, **copied}

    def adopt_numbers(self, numbers: dict[int, Numbers]) -> None:
        """Know what another worker returned as `numbers`."""
        self._saved_numbers = numbers

    def note_step(self, position: Position, numbers: Callable[[], Numbers]) -> None:
        """Remember what the numbers are after a step, where workers do not take steps together."""
        self._recent_numbers[position.number] = numbers()
        self._recent_numbers.pop(position.number - self._options.staleness - 2, None)

    def go_back(self, position: Position) -> Numbers | None:
        """Forget what came later, and return what the numbers were then, if that is known."""
        number = position.number
        snapshot = self.snapshot_at(number)
        self._snapshots.forget_after(number)
        if snapshot is not None:
            then: Numbers = snapshot.shared["journal"]
            return then
        return self._recent_numbers.get(number) or self._saved_numbers.get(number)
