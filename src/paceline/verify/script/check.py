"""Verifies a script: runs it on several workers and on one, under watch, and compares what was seen."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import InputError
from paceline.launch.base import LaunchSpec
from paceline.launch.job import ScriptCall
from paceline.launch.local import LocalLauncher
from paceline.option_fields import Options, ranged, required
from paceline.ranges import THREADS, WORKERS
from paceline.verify.proof.bounds import Size, bound
from paceline.verify.report import Finding
from paceline.verify.script import probes, step_probes
from paceline.verify.script.call import WatchedScript
from paceline.verify.script.probes import Seen
from paceline.verify.script.report import ScriptReport
from paceline.verify.script.script_trace import KEPT_STEPS, ScriptTrace
from paceline.world import env

PROBES: list[Callable[[Seen], Finding | None]] = [
    probes.every_rank_all_data,
    probes.parts_differ,
    probes.repeated_samples,
    probes.unequal_batches,
    probes.same_order,
    probes.unseeded_weights,
    probes.initial_weights,
    step_probes.schedule,
    step_probes.clipped_early,
    step_probes.scaled,
    step_probes.not_reduced,
    step_probes.steps_differ,
    step_probes.rows_differ,
    step_probes.randomness,
    probes.batch_of_world,
]


@dataclass(frozen=True, kw_only=True)
class ScriptRequest(Options):
    """Which script, on how many workers."""

    script: str
    arguments: list[str] = field(default_factory=list)
    workers: int = required(WORKERS)
    threads: int | None = ranged(None, THREADS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not Path(self.script).is_file():
            raise InputError(f"there is no script {self.script}. Give the path of a Python file.")
        if self.workers < 2:
            raise InputError(f"-n {self.workers}: a comparison with one process needs at least 2 workers.")


def verify_script(request: ScriptRequest) -> ScriptReport:
    """Run the script both ways and say whether it computes what its one-process run computes."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as text:
        folder = Path(text)
        many = _run(request, request.workers, folder / "many")
        one = _run(request, 1, folder / "one")[0]
        scale = _scale(one, many)
        if scale > 1:
            one = _run(request, 1, folder / "one", scale)[0]
        if not one.steps or not many[0].steps:
            raise InputError(
                f"{request.script} made no optimizer step, so there is nothing to compare. Check its arguments."
            )
        seen = Seen(one=one, many=many, scale=scale, multiple=_multiple(folder))
        sizes = _sizes(seen, folder)
    findings = [finding for probe in PROBES if (finding := probe(seen)) is not None]
    wrong = [size for size in sizes if size.relative > bound(size.step, "fp32")]
    return ScriptReport(
        script=request.script,
        workers=request.workers,
        steps=(len(one.steps), len(many[0].steps)),
        found="diverged" if wrong else "numeric" if sizes else "bitwise",
        relative=max((size.relative for size in sizes), default=0.0),
        first=_told(wrong[0]) if wrong else "",
        findings=findings,
        observed=_observed(seen),
        unobserved=_unobserved(seen),
        seconds=time.perf_counter() - started,
    )


def _run(request: ScriptRequest, workers: int, folder: Path, scale: int = 1) -> list[ScriptTrace]:
    folder.mkdir(exist_ok=True)
    spec = LaunchSpec(
        call=WatchedScript(
            script=ScriptCall(target=str(Path(request.script).resolve())), folder=str(folder), scale=scale
        ),
        workers=workers,
        # As many for one process as for each of several: the bits of a sum depend on how many threads took it.
        threads=request.threads or max(1, env.cores() // request.workers),
        arguments=[request.script, *request.arguments],
    )
    launcher = LocalLauncher()
    return list(launcher.launch(launcher.plan(spec)).value())


def _scale(one: ScriptTrace, many: list[ScriptTrace]) -> int:
    """Return by how much one process's batches must grow to be the global batch of the others."""
    if not one.training or not all(trace.training for trace in many):
        return 1
    alone = len(one.training[0].batches[0])
    together = sum(len(trace.training[0].batches[0]) for trace in many)
    read = [set(trace.training[0].indices) for trace in many]
    shares_out = 2 * len(set().union(*read)) > sum(map(len, read))
    return together // alone if shares_out and together % alone == 0 else 1


def _sizes(seen: Seen, folder: Path) -> list[Size]:
    """Measure losses, gradients and weights of the steps that were kept, in the order of time."""
    from paceline.verify.proof.sizes import whole

    found: list[Size] = []
    for number in range(min(len(seen.one.steps), len(seen.many[0].steps), KEPT_STEPS)):
        found += _loss(seen, number)
        for kind in ("gradient", "weight"):
            size = whole(number, kind, *_kept(folder, kind, number))
            # A later gradient belongs to weights that differ already.
            if size is not None and (kind == "weight" or number == 0):
                found.append(size)
    return found


def _multiple(folder: Path) -> float | None:
    """Return by which factor the whole first gradient of several workers differs from one process's; None where none fits."""
    import torch

    alone, together = _kept(folder, "gradient", 0)
    if alone.keys() != together.keys() or any(alone[name].shape != together[name].shape for name in alone):
        return None
    one, many = (torch.cat([held[name].flatten().double() for name in alone]) for held in (alone, together))
    length = float(one @ one)
    factor = float(one @ many) / length if length else 0.0
    apart = float((many - factor * one).norm()) / (abs(factor) * length**0.5) if factor else 1.0
    return factor if apart <= bound(0, "fp32") else None


def _loss(seen: Seen, number: int) -> list[Size]:
    from paceline.verify.proof.sizes import of_number

    losses = [trace.steps[number].losses for trace in seen.many if number < len(trace.steps)]
    alone = seen.one.steps[number].losses
    if not alone or not all(losses):
        return []
    mine, theirs = statistics.fmean(alone), statistics.fmean(statistics.fmean(values) for values in losses)
    size = of_number(number, "loss", "", mine, theirs)
    return [] if size is None else [size]


def _kept(folder: Path, kind: str, number: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the tensors of a step that one process and several workers wrote down, by the same names.

    They are matched by place where one run wrapped its model in DDP, which gives names, and the other did not.
    """
    from paceline.verify.proof.sizes import load
    from paceline.verify.script.watching import kept

    alone, together = (load(kept(folder / name, kind, number)) for name in ("one", "many"))
    if alone.keys() != together.keys() and len(alone) == len(together):
        alone = dict(zip(together, alone.values(), strict=True))
    return alone, together


def _told(size: Size) -> str:
    name = f" of {size.name}" if size.name else ""
    return f"step {size.step}: {size.kind}{name}, by {size.relative:.2g} relative ({size.absolute:.2g})"


def _observed(seen: Seen) -> list[str]:
    first = seen.many[0]
    kept = [
        f"{len(first.steps)} optimizer steps: loss, learning rate, gradients on every rank",
        f"{len(first.wrapped)} model(s) wrapped in DistributedDataParallel" if first.wrapped else "",
        f"{len(first.training)} training pass(es) over a DataLoader, every sample id"
        if first.training
        else "",
    ]
    return [text for text in kept if text]


def _unobserved(seen: Seen) -> list[str]:
    first = seen.many[0]
    missing = []
    if not first.wrapped:
        missing.append("initial weights: no model was wrapped in DistributedDataParallel")
    if not first.training:
        missing.append("the samples: no DataLoader over a map-style data set was used for training")
    if not all(step.losses for step in first.steps):
        missing.append("the loss of some steps: backward was not called on a scalar")
    if len(first.steps) > KEPT_STEPS:
        missing.append(f"the size of differences after the first {KEPT_STEPS} steps")
    missing.append("random numbers drawn inside the model, and anything the script computes outside torch")
    return missing
