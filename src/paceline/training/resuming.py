"""Saving where a run stands, and going on from there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.checkpoint import Checkpoints, caused_by_disk, check_fits
from paceline.errors import CheckpointError, InputError
from paceline.observe import CheckpointDamaged, CheckpointSaved, Event, Note
from paceline.strategies.base import Replica
from paceline.training.folder import CHECKPOINTS
from paceline.training.options import RunOptions
from paceline.training.position import Position
from paceline.training.recorder import NoRecords
from paceline.world import World, all_gather_object


def save(
    replica: Replica,
    options: RunOptions,
    position: Position,
    world: World,
    meta: dict[str, Any],
    records: NoRecords,
    emit: Callable[[Event], None],
) -> tuple[str, bool]:
    """Write a checkpoint; all workers wait until it is there, or is not. Gives what went wrong, and whether it was the disk."""
    if options.out is None:
        raise InputError("run.save needs a folder. Give out= to paceline.launch, or --out.")
    records.before_save()
    problem = "", False
    try:
        state = _write(options.out, replica, options, position, world, meta, emit)
        records.after_save(position.number, state["model"])
    except CheckpointError as error:
        problem = str(error), caused_by_disk(error)
    told: list[tuple[str, bool]] = all_gather_object(world.comm, problem)
    return max(told)


def _write(
    out: Path,
    replica: Replica,
    options: RunOptions,
    position: Position,
    world: World,
    meta: dict[str, Any],
    emit: Callable[[Event], None],
) -> dict[str, Any]:
    """All workers give their part of the state, the first one writes it."""
    started = time.perf_counter()
    state = replica.state()
    if world.is_first:
        meta = {
            **meta,
            "seed": options.seed,
            "shards": options.total_shards,
            "strategy": options.strategy,
            "workers": options.workers if options.processes == 1 else world.size,
        }
        path = Checkpoints(out / CHECKPOINTS, keep=options.keep).save(
            position.number,
            {**state, "position": asdict(position), "meta": meta},
            note=lambda text: emit(Note(text=text)),
        )
        emit(CheckpointSaved(step=position.number, path=str(path), seconds=time.perf_counter() - started))
    return state


def newest_step(options: RunOptions) -> int | None:
    paths = [] if options.out is None else Checkpoints(options.out / CHECKPOINTS).committed()
    return int(paths[-1].name.rpartition("-")[2]) if paths else None


def load(
    replica: Replica,
    options: RunOptions,
    world: World,  # noqa: ARG001
    emit: Callable[[Event], None],
) -> tuple[Position, dict[str, Any]]:
    """Take over the newest whole checkpoint and give the position it stands at, and what it says of its run."""
    if options.out is None:
        raise InputError("--resume needs the folder of the run to resume. Give --out.")
    loaded = Checkpoints(options.out / CHECKPOINTS).newest(
        lambda path, reason: emit(CheckpointDamaged(path=str(path), reason=reason))
    )
    if loaded is None:
        raise CheckpointError(
            f"no checkpoint in {options.out / CHECKPOINTS} is whole, so there is nothing to resume from."
        )
    for key, here in (("shards", options.total_shards), ("seed", options.seed)):
        there = loaded.meta.get(key, here)
        if there != here:
            raise CheckpointError(
                f"the run in {options.out} has {key} {there}, not {here}: the answer would be another. Use --{key} {there}."
            )
    check_fits(replica.model.state_dict(), loaded.state["model"])
    replica.load(loaded.state)
    return Position(**loaded.position), dict(loaded.meta)
