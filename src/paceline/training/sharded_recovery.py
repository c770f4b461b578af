"""What a worker knows and keeps of a state that is cut up among the workers: its outline, and copies of its parts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from paceline.checkpoint import digest
from paceline.checkpoint.contents import with_slots
from paceline.state.chunks import MODEL, LocalState, collect, rows_of, survey
from paceline.strategies.base import Replica
from paceline.training import departing_state, folder
from paceline.training.handover import COPIES, WORKERS, Offer, Source, receive
from paceline.training.journal import Journal
from paceline.training.options import RunOptions
from paceline.training.peer_snapshots import PeerSnapshots
from paceline.training.position import Position
from paceline.world import World, all_gather_object


class ShardedRecovery:
    """Serves a replica that holds only a part; for one that holds everything there is nothing to do."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._copies = PeerSnapshots(options.snapshot_every) if options.peer_snapshots else None
        self._outline: dict[str, bool] = {}
        """Every tensor of the model, and whether it is trained."""
        self._left: dict[int, list[LocalState]] = {}
        """What workers that left have put down; of the rest only what their optimizers kept that is no tensor."""
        self._journals: dict[int, dict[str, float]] = {}
        """What the journal held at each checkpoint of this process, should the run go back there."""
        self._recent: dict[int, dict[str, float]] = {}
        """What it held after the last steps, where this worker may be ahead of those that hold the state."""

    def expected(self, world: World) -> bool:
        """Return whether a group's workers will each hold only a part."""
        return (
            world.mesh.servers > 0
            or world.mesh.size("fsdp", "tp", "pp") > 1
            or (self._options.tuning.shard_optimizer and world.size > 1)
        )

    def survey(self, replica: Replica, world: World) -> int:
        """Learn what the state consists of on all workers, and give the number of the model's parameters."""
        parameters = dict(replica.model.named_parameters())
        held = {} if replica.whole else replica.held().pieces
        # Of a tensor that is cut up the whole counts, not the part that lies here.
        sizes = {
            name: math.prod(held[f"{MODEL}/{name}"].form.shape)
            if f"{MODEL}/{name}" in held
            else value.numel()
            for name, value in parameters.items()
        }
        trained = {f"{MODEL}/{name}" for name, value in parameters.items() if value.requires_grad}
        if replica.whole:
            # The next group may be one that cuts it up.
            names = (f"{MODEL}/{name}" for name in replica.model.state_dict())
            self._outline = {key: key in trained for key in names}
            return sum(sizes.values())
        mine = {key: key in trained for key in held if key.startswith(f"{MODEL}/")}
        for outline, others in all_gather_object(world.comm, (mine, sizes)):
            self._outline |= outline
            sizes |= others
        return sum(sizes.values())

    # Copies in neighbours' memory.

    def attach(self, world: World, replica: Replica) -> None:
        """Keep copies in a group that has just formed; everybody calls it."""
        if self._copies is not None and not replica.whole:
            self._copies.attach(world)

    def detach(self) -> None:
        """Let go of the group."""
        if self._copies is not None:
            self._copies.detach()

    @property
    def keeps_copies(self) -> bool:
        """Whether parts of the state are copied to neighbours at all."""
        return self._copies is not None

    def due(self, position: Position) -> bool:
        """Return whether a copy is to be taken behind a step: it is time, or one was taken before the loop had done with it."""
        return self._copies is not None and (
            self._copies.due(position) or position.number in self._copies.kept
        )

    def copy(self, position: Position, shared: dict[str, Any], replica: Replica, *, anew: bool) -> None:
        """Put this worker's part aside and send it to its neighbour, while training goes on."""
        if self._copies is not None and not replica.whole:
            self._copies.take(position, shared, replica.held(), anew=anew)

    # A new group.

    def offer(self, finished: int, position: Position, held: LocalState | None) -> Offer:
        """Return what this worker can bring of the state."""
        kept = {} if self._copies is None else self._copies.kept
        self._left = {} if self._options.out is None else departing_state.read(self._options.out)
        return Offer(
            finished=finished,
            position=position,
            rows={} if held is None else rows_of(held.pieces),
            copies={
                number: (copy.position, [rows_of(copy.own), rows_of(copy.received)])
                for number, copy in kept.items()
            },
            left={number: [rows_of(one.pieces) for one in parts] for number, parts in self._left.items()},
            checkpoint=folder.newest_step(self._options.out),
            outline=self._outline,
        )

    def fill(self, replica: Replica, world: World, source: Source, held: LocalState | None) -> None:
        """Load into a new replica its part of what the workers hold, now or aside; all workers call it."""
        brings = world.rank in source.bringers
        copy = None if self._copies is None else self._copies.kept.get(source.position.number)
        parts = self._left.get(source.position.number, [])
        left = [one.pieces for one in parts]
        if source.kind == WORKERS and held is not None and brings:
            rest = with_slots(held.rest, *(one.rest for one in parts))
            receive(world, source, [held.pieces, *left], rest, replica)
        elif source.kind == COPIES and copy is not None and brings:
            receive(world, source, [copy.own, copy.received], copy.rest, replica)
        else:
            receive(world, source, left, None, replica)

    def clear_up(self, world: World) -> None:
        """Remove what was left for a group that now holds everything."""
        world.comm.barrier()
        if self._left and self._options.out is not None:
            departing_state.remove(self._options.out)
        self._left = {}

    def bequeath(self, position: Position, held: LocalState) -> None:
        """Put this worker's part down for the others: it was told to leave."""
        if self._options.out is not None:
            departing_state.write(self._options.out, position, held)

    def note_checkpoint(self, position: Position, journal: Journal) -> None:
        """Remember what the journal held at a checkpoint, or at the beginning."""
        self._journals[position.number] = journal.state()

    def note_step(self, position: Position, journal: Journal) -> None:
        """Remember what the journal held after a step, where workers do not take steps together."""
        ahead = self._options.tuning.staleness
        if ahead:
            self._recent[position.number] = journal.state()
            self._recent.pop(position.number - ahead - 2, None)

    def states_at(self, number: int) -> dict[str, Any] | None:
        """Return the loop's own states as they were put aside with a copy of that step, if there is one."""
        copy = None if self._copies is None else self._copies.kept.get(number)
        states: dict[str, Any] | None = None if copy is None else copy.shared["states"]
        return states

    def go_back(self, position: Position) -> dict[str, float]:
        """Forget what came later, and give what the journal held then."""
        copy = None if self._copies is None else self._copies.kept.get(position.number)
        if self._copies is not None:
            self._copies.forget_after(position.number)
        if copy is not None:
            journal: dict[str, float] = copy.shared["journal"]
            return journal
        recent = self._recent.get(position.number)
        return recent if recent is not None else self._journals.get(position.number, Journal.BEGINNING)


def weights_sha256(world: World, replica: Replica) -> str:
    """Return one number for weights that are cut up, a few tensors at a time; all workers ask together."""
    pieces = {key: one for key, one in replica.held().pieces.items() if key.startswith(f"{MODEL}/")}
    found = survey(world, pieces)
    found = replace(found, forms=dict(sorted(found.forms.items())))
    return digest((key.partition("/")[2], whole) for key, whole in collect(world, pieces, found))
