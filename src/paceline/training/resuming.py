"""Going on from where a run was saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint.compare import check_fits
from paceline.checkpoint.manifest import EXTRA_STATE, Manifest, newest_readable
from paceline.checkpoint.read import unusable
from paceline.checkpoint.store import Checkpoints, Found, find_newest
from paceline.errors import CheckpointError, InputError
from paceline.observe import CheckpointDamaged, Event
from paceline.recovery.position import Position
from paceline.state.chunks import MODEL, ChunkBounds, TensorMeta
from paceline.strategies.replica import Replica
from paceline.training.attribute_changes import Then, read_saved
from paceline.training.checks.epoch_starts import KEY as STREAM
from paceline.training.folder import CHECKPOINTS
from paceline.training.options import RunOptions
from paceline.training.saved_attributes import KEY as CHANGED
from paceline.training.user_loop.call_history import KEY as OUTCOMES
from paceline.training.user_loop.loop_state import KEY, Values
from paceline.world import World, all_gather_object


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint says beside the state of the replica."""

    position: Position
    meta: dict[str, Any]
    states: Values
    """The loop's own."""
    outcomes: list[Any] | None
    """What was measured between calls of `run.steps`; None where nothing was, or where it was not kept."""
    epoch_start: dict[str, Any] | None
    """What the stream's epoch began with, if it was saved in the middle of one."""
    changed: Then | None
    """What the run had changed beside tensors; None in a checkpoint that does not say."""


def newest_meta(options: RunOptions) -> dict[str, Any]:
    """Return what the newest readable checkpoint says of its run; nothing of its tensors is read."""
    with suppress(CheckpointError):
        return {} if options.out is None else dict(newest_readable(options.out, Manifest.read)[1].meta)
    return {}


def load(replica: Replica, options: RunOptions, world: World, emit: Callable[[Event], None]) -> Resumed:
    """Load the newest whole checkpoint and return what it holds beside the state. All workers call it; each reads its part."""
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
    extra_state = found.extra_state
    return Resumed(
        Position(**found.manifest.position),
        dict(meta),
        extra_state.get(KEY, {}),
        extra_state.get(OUTCOMES),
        extra_state.get(STREAM),
        _changed(found),
    )


def _changed(found: Found) -> Then | None:
    try:
        return read_saved(found.extra_state.get(CHANGED))
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = f"{EXTRA_STATE}: {CHANGED} is not what a run writes ({' '.join(str(error).split())})"
        raise unusable(found.path, CheckpointError(reason)) from error


def _check_answer(out: Path, options: RunOptions, meta: Mapping[str, Any]) -> None:
    """Refuse to go on where the answer would be another."""
    for key, here in (("shards", options.total_shards), ("seed", options.seed)):
        there = meta.get(key, here)
        if there != here:
            raise CheckpointError(
                f"the run in {out} has {key} {there}, not {here}: the result would differ. Use --{key} {there}."
            )


def _take(replica: Replica, world: World, found: Found) -> None:
    with found.open() as parts:
        check_fits(_model_metas(replica, world), _of_model(parts.catalogue))

        def read(key: str, bounds: ChunkBounds) -> Tensor:
            try:
                return parts.read(key, bounds)
            except CheckpointError as error:
                raise unusable(found.path, error) from error

        try:
            replica.load_local_state(parts.catalogue, read, found.extra_state)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            reason = f"its state was not taken ({type(error).__name__}: {' '.join(str(error).split())})"
            raise unusable(found.path, CheckpointError(reason)) from error


def _model_metas(replica: Replica, world: World) -> dict[str, TensorMeta]:
    """Return what the whole model consists of, wherever it is."""
    metas = _of_model({key: chunk.meta for key, chunk in replica.local_state().chunks.items()})
    if replica.whole:
        return metas
    everybody: list[dict[str, TensorMeta]] = all_gather_object(world.comm, metas)
    return {name: meta for one in everybody for name, meta in one.items()}


def _of_model(metas: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
    return {key.partition("/")[2]: meta for key, meta in metas.items() if key.startswith(f"{MODEL}/")}
