"""Saving where a run stands, and going on from there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint import CheckpointMetadata, Checkpoints, Found, Saved, Saver, check_fits, find_newest
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.read import unusable
from paceline.errors import CheckpointError, InputError
from paceline.observe import CheckpointDamaged, CheckpointSaved, Event, Note
from paceline.state.chunks import MODEL, ChunkBounds, TensorMeta
from paceline.strategies.base import Replica
from paceline.training.between import KEY as BETWEEN
from paceline.training.between import Between
from paceline.training.folder import CHECKPOINTS
from paceline.training.frozen import KEY as FROZEN
from paceline.training.frozen import frozen_names
from paceline.training.loop_state import KEY, LoopState, Values
from paceline.training.nonfinite import check_weights
from paceline.training.options import RunOptions
from paceline.training.position import Position
from paceline.training.recorder import NoRecords
from paceline.world import World, all_gather_object


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint says beside the state of the replica."""

    position: Position
    meta: dict[str, Any]
    states: Values
    """The loop's own."""
    between: list[Any] | None
    """What was measured between calls of `run.steps`; None where nothing was, or where it was not kept."""


def open_saver(options: RunOptions, records: NoRecords, emit: Callable[[Event], None]) -> Saver:
    """Return what saves a run: one for its whole life, because a save may be under way between two calls."""
    if options.out is None:
        raise InputError("a run is saved in a folder. Give out= to paceline.launch, or --out.")

    def saved(made: Saved) -> None:
        records.after_save(made.step, made.weights_sha256)
        emit(CheckpointSaved(step=made.step, path=str(made.path), seconds=made.seconds))

    return Saver(
        Checkpoints(options.out / CHECKPOINTS, keep=options.keep),
        saved=saved,
        note=lambda text: emit(Note(text=text)),
    )


def save(
    replica: Replica,
    options: RunOptions,
    position: Position,
    world: World,
    meta: dict[str, Any],
    records: NoRecords,
    saver: Saver,
    loop_state: LoopState,
    between: Between,
    *,
    last: bool = False,
    unless_saved: bool = False,
) -> tuple[str, bool]:
    """Write a checkpoint with all workers. Gives what went wrong, the same on all, and whether it was the disk.

    All wait until it is there, or is not; where the run saves beside the training, only until it is copied. The `last`
    one of a run is always waited for; `unless_saved` it is written only if the one before is not of this very step.
    """
    background = options.save_async and not last
    records.before_save()
    replica.settle()
    check_weights(replica, world, position.number)
    facts = {
        "seed": options.seed,
        "shards": options.total_shards,
        "strategy": options.strategy,
        "mesh": str(world.mesh),
        **({FROZEN: frozen_names(replica.model)} if replica.whole else {}),
        "workers": options.workers if options.processes == 1 else world.size - world.mesh.servers,
    }
    moment = CheckpointMetadata(step=position.number, position=asdict(position), meta={**meta, **facts})
    held = replica.held()
    if loop_state:
        held = replace(held, rest={**held.rest, KEY: loop_state.check_same(world)})
    if between:
        held = replace(held, rest={**held.rest, BETWEEN: between.state()})
    fault = saver.save(world, held, moment, background=background, unless_saved=unless_saved)
    return fault.message, fault.disk


def newest_meta(options: RunOptions) -> dict[str, Any]:
    """Return what the newest readable checkpoint says of its run; nothing of its tensors is read."""
    paths = [] if options.out is None else Checkpoints(options.out / CHECKPOINTS).committed()
    for path in reversed(paths):
        with suppress(CheckpointError):
            return dict(Manifest.read(path).meta)
    return {}


def load(replica: Replica, options: RunOptions, world: World, emit: Callable[[Event], None]) -> Resumed:
    """Take over the newest whole checkpoint; return what else it says. All workers call it; each reads what it holds."""
    if options.out is None:
        raise InputError("--resume needs the folder of the run to resume. Give --out.")
    found = find_newest(
        world,
        Checkpoints(options.out / CHECKPOINTS),
        lambda path, reason: emit(CheckpointDamaged(path=str(path), reason=reason)),
    )
    if found is None:
        raise CheckpointError(
            f"no checkpoint in {options.out / CHECKPOINTS} is whole, so there is nothing to resume from."
        )
    meta = found.manifest.meta
    _check_answer(options.out, options, meta)
    _take(replica, world, found)
    return Resumed(
        Position(**found.manifest.position), dict(meta), found.rest.get(KEY, {}), found.rest.get(BETWEEN)
    )


def _check_answer(out: Path, options: RunOptions, meta: Mapping[str, Any]) -> None:
    """Refuse to go on where the answer would be another."""
    for key, here in (("shards", options.total_shards), ("seed", options.seed)):
        there = meta.get(key, here)
        if there != here:
            raise CheckpointError(
                f"the run in {out} has {key} {there}, not {here}: the answer would be another. Use --{key} {there}."
            )


def _take(replica: Replica, world: World, found: Found) -> None:
    with found.open() as parts:
        saved = {
            key.partition("/")[2]: form
            for key, form in parts.catalogue.items()
            if key.startswith(f"{MODEL}/")
        }
        check_fits(_forms(replica, world), saved)

        def read(key: str, box: ChunkBounds) -> Tensor:
            try:
                return parts.read(key, box)
            except CheckpointError as error:
                raise unusable(found.path, error) from error

        try:
            replica.take(parts.catalogue, read, found.rest)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            reason = f"its state was not taken ({type(error).__name__}: {' '.join(str(error).split())})"
            raise unusable(found.path, CheckpointError(reason)) from error


def _forms(replica: Replica, world: World) -> dict[str, TensorMeta]:
    """Return what the whole model consists of, wherever it is."""
    forms = {
        key.partition("/")[2]: piece.form
        for key, piece in replica.held().pieces.items()
        if key.startswith(f"{MODEL}/")
    }
    if replica.whole:
        return forms
    everybody: list[dict[str, TensorMeta]] = all_gather_object(world.comm, forms)
    return {name: form for one in everybody for name, form in one.items()}
