"""The experiments that need only one process: is the backward pass linear, is the loss a sum, has every operation a kernel."""

from __future__ import annotations

import re

import numpy as np
import torch

from paceline.data.reading import reader_of
from paceline.strategies.base import ShardWork
from paceline.verify.proof.lab.notes import SplitLosses
from paceline.verify.proof.lab.step_runner import Gradients, StepRunner
from paceline.verify.proof.task_harness import TaskHarness

STRETCH = 2.0**20
"""A power of two, so that a linear backward pass gives the same bits times this; large, so that any clipping bites."""
_NO_KERNEL = re.compile(r"^(\S+) does not have a deterministic implementation")


def bent(runner: StepRunner, shard: ShardWork, plain: Gradients) -> tuple[str, ...]:
    """Name the parameters whose gradient does not grow as the start of the backward pass does."""
    _, stretched = runner.attempt(shard, STRETCH)
    wrong = []
    for name, gradient in plain.items():
        wide = torch.complex128 if gradient.is_complex() else torch.float64
        wanted = gradient.to(wide) * STRETCH
        got = stretched[name].to(wide) if name in stretched else torch.zeros_like(wanted)
        # Half precision overflows under the stretch, which says nothing about the task.
        if bool(torch.isfinite(got).all()) and not torch.allclose(got, wanted, rtol=1e-3, atol=1e-30):
            wrong.append(name)
    return tuple(wrong)


def parts(runner: StepRunner, harness: TaskHarness) -> SplitLosses:
    """Measure three samples at once, and the same as one and two."""
    samples = harness.loader.samples
    if samples is None and harness.loader.uneven and hasattr(harness.dataset, "__getitem__"):
        samples = len(harness.dataset)  # read in an order of the task's own
    if samples is None or not hasattr(harness.dataset, "__getitem__"):
        raise ValueError("the training set is a stream, which cannot be cut at will")
    if samples < 3:
        raise ValueError("the training set has fewer than three samples")
    reader = reader_of(harness.dataset, seed=harness.options.seed, collate=harness.task.collate)
    ids = np.arange(3, dtype=np.int64)
    whole, one, two = (runner.measure(reader.read(0, [cut])[0]) for cut in (ids, ids[:1], ids[1:]))
    return SplitLosses(
        whole_total=whole[0],
        whole_weight=whole[1],
        parts_total=one[0] + two[0],
        parts_weight=one[1] + two[1],
    )


def no_kernel(runner: StepRunner, shard: ShardWork) -> str | None:
    """Name the first operation of a step that torch has no deterministic kernel for."""
    before = torch.get_deterministic_debug_mode()
    # The same switch as torch.use_deterministic_algorithms(True), which would import the compiler (5 s) to tell it too.
    torch.set_deterministic_debug_mode("error")
    try:
        runner.attempt(shard)
    except RuntimeError as error:
        name = operation(str(error))
        if name is None:
            raise
        return name
    finally:
        torch.set_deterministic_debug_mode(before)
    return None


def operation(message: str) -> str | None:
    """Read the operation's name out of torch's complaint; None where it complains about something else."""
    found = _NO_KERNEL.match(message)
    if found:
        return found[1]
    return "a matrix product in cuBLAS" if "CUBLAS_WORKSPACE_CONFIG" in message else None
