"""What a run says of itself when steps begin: to those who listen, and in its receipt."""

from __future__ import annotations

import hashlib
import inspect
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import strategies
from paceline.data import ShardedLoader
from paceline.observe import RunStarted
from paceline.records.receipt import Receipt, RunSegment
from paceline.recovery.position import Position
from paceline.strategies.tuning import Tuning
from paceline.task import Task
from paceline.training.options import RunOptions
from paceline.training.recorder import DataFacts
from paceline.training.spec import TrainSpec
from paceline.training.state import RunState
from paceline.version import __version__
from paceline.world import World

PACKAGE = Path(__file__).parents[1]


def announcement(state: RunState, loader: ShardedLoader, epochs: int | None, last: float) -> RunStarted:
    """Return the event that steps begin."""
    world, options = state.world, state.options
    return RunStarted(
        task=state.name,
        strategy=options.strategy,
        workers=state.workers,
        shards=options.total_shards,
        exactness=str(state.exactness),
        device=str(world.device),
        backend=world.backend,
        parameters=state.parameters,
        samples=loader.samples,
        batch_size=loader.batch_size,
        total_steps=None if math.isinf(last) else int(last),
        epochs=epochs,
        start_step=state.position.number,
        out=str(options.out or ""),
        shards_from=options.shards_from,
        transport=state.transport,
    )


def new_receipt(state: RunState, position: Position) -> Receipt:
    """Return the receipt of a run that begins at `position`; `Records` gives it its place in the run's history."""
    data, max_grad_norm = state.training or state.others_training or (None, None)
    if data is None:
        raise RuntimeError("records are begun with the steps")
    start = describe_start(
        state.options,
        state.world,
        position.next_epoch() if position.step == data.steps_per_epoch else position,
        data,
        exactness=str(state.exactness),
        max_grad_norm=max_grad_norm,
        transport=state.transport,
        about=state.about,
    )
    return Receipt(
        name=state.name,
        seed=state.options.seed,
        shards=state.options.total_shards,
        batch_size=data.batch_size,
        shards_from=state.options.shards_from,
        history=(start,),
    )


def describe_start(
    options: RunOptions,
    world: World,
    position: Position,
    loader: ShardedLoader | DataFacts,
    *,
    exactness: str,
    max_grad_norm: float | None,
    transport: str = "",
    about: Mapping[str, Any],
) -> RunSegment:
    """Write down where a run starts from and everything that its bits depend on."""
    order = loader.order
    threaded = strategies.entry(options.strategy).threaded
    return RunSegment(
        generation=0,
        step=position.number,
        epoch=position.epoch,
        step_of_epoch=position.step,
        strategy=options.strategy,
        workers=options.workers if threaded else world.size - world.mesh.servers,
        processes=world.size,
        mesh=str(world.mesh) if world.dp_size != world.size else "",
        shares=world.shares,
        exactness=exactness,
        stream=order is None,
        samples=loader.samples,
        shuffle=order is not None and order.shuffle,
        repeats=loader.repeats,
        order_seed=options.seed if order is None else order.seed,
        uneven=loader.uneven,
        precision=options.precision,
        compile=options.compile,
        micro_batch=options.micro_batch,
        num_workers=options.num_workers,
        find_unused_parameters=options.find_unused_parameters,
        sync_batchnorm=options.sync_batchnorm,
        transport_asked=options.transport,
        transport=transport,
        tuning={
            name: value for name, value in asdict(options.tuning).items() if value != getattr(Tuning, name)
        },
        max_grad_norm=max_grad_norm,
        **{"task": None, "settings": {}, "sources": {}, "horizon": None, **about},
        device=world.device.type,
        device_name=_device_name(world.device),
        threads=torch.get_num_threads(),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "paceline": __version__,
        },
        paceline_sha256=package_sha256(),
    )


def about_task(task: Task, spec: TrainSpec, horizon: int | None) -> dict[str, Any]:
    """Return what a receipt says of a task: how to make it again, and what its source was."""
    files = {
        file
        for kind in type(task).__mro__
        if issubclass(kind, Task) and kind is not Task and (file := _source_file(kind))
    }
    sources = {
        str(Path(file).resolve()): hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for file in sorted(files)
    }
    return {
        "task": spec.task or None,
        "settings": dict(spec.settings),
        "sources": sources,
        "horizon": horizon,
    }


def _source_file(kind: type) -> str | None:
    """Return the file that a class was read from; None for one that came as a value."""
    try:
        return inspect.getsourcefile(kind)
    except (TypeError, OSError):
        return None


@cache
def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@cache
def package_sha256() -> str:
    """Return the hash of this package's source: some 400 files, which the fork server reads once for all its workers."""
    made = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        made.update(f"{path.relative_to(PACKAGE)}\0".encode())
        made.update(path.read_bytes())
    return made.hexdigest()
