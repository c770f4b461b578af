"""The options that tune single strategies: memory, communication, meshes. Only what was given changes anything."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import typer

from paceline.errors import InputError
from paceline.strategies import choice
from paceline.strategies.tuning import Tuning, check_use

Recompute = Annotated[
    str | None,
    typer.Option(
        help="Compute activations again in the backward pass: blocks, or selective (all but products)."
    ),
]
RecomputeEvery = Annotated[int | None, typer.Option(help="Recompute one of so many blocks. Default: 1.")]
ShardOptimizer = Annotated[
    bool | None,
    typer.Option(
        "--shard-optimizer/--no-shard-optimizer",
        help="ddp: each worker keeps the optimizer state of its part of the parameters (ZeRO-1).",
    ),
]
Offload = Annotated[
    bool | None,
    typer.Option("--offload/--no-offload", help="fsdp: weights and optimizer state live in host memory."),
]
Reshard = Annotated[
    bool | None,
    typer.Option(
        "--reshard/--no-reshard",
        help="fsdp: let go of gathered weights after the forward pass. Default: yes.",
    ),
]
Gather = Annotated[
    str | None,
    typer.Option(help="fsdp: gather weights as fp32, bf16 or fp16 (level numeric)."),
]
Compress = Annotated[
    str | None,
    typer.Option(help="ddp: send gradients as bf16, fp16 (numeric) or powersgd:RANK (statistical)."),
]
BucketMb = Annotated[
    float | None,
    typer.Option(help="ddp: megabytes of gradients that are summed at once."),
]
Schedule = Annotated[
    str | None,
    typer.Option(help="pp: gpipe, 1f1b, interleaved or zero-bubble. Default: 1f1b."),
]
StagesAWorker = Annotated[
    int | None,
    typer.Option(help="pp: stages that each worker holds. Default: what the schedule needs."),
]
SequenceParallel = Annotated[
    bool | None,
    typer.Option(
        "--sequence-parallel/--no-sequence-parallel",
        help="tp: norms between split layers work on a part of the sequence each.",
    ),
]
LossParallel = Annotated[
    bool | None,
    typer.Option(
        "--loss-parallel/--no-loss-parallel", help="tp: scores stay split when the loss is computed."
    ),
]
LocalSteps = Annotated[int | None, typer.Option(help="local-sgd: steps between two averages. Default: 8.")]
LocalWarmup = Annotated[
    int | None, typer.Option(help="local-sgd: first steps that are taken together. Default: 0.")
]
Outer = Annotated[
    str | None,
    typer.Option(help="local-sgd: what is done with the averaged change: average, or nesterov (DiLoCo)."),
]
OuterLr = Annotated[float | None, typer.Option(help="local-sgd: learning rate of nesterov. Default: 0.7.")]
OuterMomentum = Annotated[float | None, typer.Option(help="local-sgd: momentum of nesterov. Default: 0.9.")]
Staleness = Annotated[
    int | None,
    typer.Option(help="ps: steps that a worker may be ahead of the slowest. Default: 0, all steps together."),
]


def given(strategy: str, before: dict[str, Any], **said: Any) -> dict[str, Any]:
    """Put what was said on the command line, if the strategy has a use for it, over what a resumed run was begun with."""
    now = said_for((strategy,), said)
    strange = sorted(before.keys() - {one.name for one in fields(Tuning)})
    if strange:
        raise InputError(
            f"the run was begun with {strange[0]} = {before[strange[0]]!r}, which this version of paceline does not know. "
            "Go on with the version that began it, or take it out of spec.json."
        )
    return before | now


def said_for(strategies: tuple[str, ...], said: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were said, each of which must mean something to one of the strategies."""
    now = {one.name: said[one.name] for one in fields(Tuning) if said.get(one.name) is not None}
    chosen = {text: choice(text) for text in strategies}
    check_use(now, {text: (one.name, dict(one.sizes)) for text, one in chosen.items()})
    return now
