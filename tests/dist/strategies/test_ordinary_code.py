"""Ordinary training code under sharded strategies: one process's bits, or one line that names what cannot be done."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.checkpoint import weights_sha256
from paceline.errors import InputError
from paceline.strategies.tuning import Tuning
from paceline.training.evaluation import evaluate
from paceline.world import determinism
from paceline.world.interruption import InterruptedWaitError
from tests.dist.strategies import ordinary
from tests.dist.strategies.ordinary import FEATURES, Made, MadeWords
from tests.dist.strategies.side_by_side import STEPS, Interrupted, launched, prepared, steps_of

SPARSE = "sparse=True.*--strategy hybrid or ddp"
WRITTEN = r"step 0: .*wrote to the weights of 0\.weight.*max_norm"
OUTSIDE = "read outside of its layer's forward pass, but under tp"
NO_ROW = "pp finds no row of layers|pp cannot follow|under pp the loss sees only|pp needs each of the modules"


@dataclass(frozen=True)
class Case:
    """A task, and the strategies that refuse it with what they say; the others give one process's bits."""

    make: Any
    refused: dict[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    """Strategies that it is not tried with."""


CASES: dict[str, Case] = {
    "auxiliary terms that miss parameters": Case(ordinary.Balance, {"pp": NO_ROW}),
    "the same, clipped": Case(partial(ordinary.Balance, max_grad_norm=True), {"pp": NO_ROW}),
    "a head of an auxiliary term alone": Case(ordinary.TwoHeads, {"pp": NO_ROW}),
    "methods of the model": Case(ordinary.Methods, {"pp": NO_ROW, "tp": OUTSIDE}),
    "a loss over all weights": Case(
        ordinary.ReadsBlocks,
        {"fsdp": r"weights of blocks\.0, blocks\.1 outside.*block_modules\(\) return \[\]", "pp": NO_ROW, "tp": "comes out diff"},
    ),
    "the same in one wrap": Case(ordinary.ReadsBlocksAtOnce, {"pp": NO_ROW, "tp": "comes out diff"}),
    "a metric of a block's weight": Case(
        ordinary.MeasuresBlocks,
        {"fsdp": r"weights of blocks\.0, blocks\.1 outside", "tp": OUTSIDE},
        beside=("pp",),  # it too refuses, on the worker of the last stage alone
    ),
    "state made in the constructor": Case(
        partial(Made, optimizer=partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1))
    ),
    "a hook on a parameter": Case(
        partial(Made, model=ordinary.hooked),
        dict.fromkeys(("fsdp", "tp"), r"0\.weight has a hook \(register_hook\)"),
    ),
    "a parameter that is held twice": Case(
        partial(Made, model=ordinary.kept_twice),
        dict.fromkeys(("fsdp", "tp"), r"listed holds the parameter head\.weight a second time"),
    ),
    "weights changed in the forward pass": Case(
        partial(MadeWords, model=lambda: _words(nn.Embedding(11, 8, max_norm=0.5))),
        dict.fromkeys(("fsdp", "ps", "tp", "local-sgd"), WRITTEN),
    ),
    "sparse embeddings": Case(
        partial(MadeWords, model=lambda: _words(nn.Embedding(11, 8, sparse=True)), optimizer=partial(torch.optim.SGD, lr=0.1)),
        dict.fromkeys(("fsdp", "pp", "ps", "tp", "local-sgd"), SPARSE),
    ),
    "a parameter outside of the model": Case(
        partial(Made, optimizer=lambda held: torch.optim.SGD([*held, nn.Parameter(torch.ones(1))], lr=0.1)),
        dict.fromkeys(("fsdp", "pp", "ps", "tp", "local-sgd"), "holds a parameter of shape \\(1,\\) that the model has not"),
    ),
    "two types, clipped": Case(
        partial(Made, model=ordinary.mixed(torch.float64), max_grad_norm=0.1, blocks=["0", "1", "2"]),
    ),
    "complex, clipped": Case(
        partial(Made, model=ordinary.mixed(torch.complex64), max_grad_norm=0.1, blocks=["0", "1", "2"]),
    ),
    "two types in one wrap": Case(
        partial(Made, model=ordinary.mixed(torch.float64), blocks=[]), {"fsdp": "fsdp gathers them together"}
    ),
    "a single number": Case(
        partial(Made, model=ordinary.one_number), {"fsdp": "without a dimension, which fsdp cannot cut"}
    ),
    "odd sizes, clipped": Case(
        partial(Made, model=lambda: nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 3)), max_grad_norm=0.2)
    ),
    "tied weights": Case(
        partial(MadeWords, model=ordinary.tied), {"pp": "share 0.weight and 2.weight", "tp": "finds no layer to split"}
    ),
    "notes on parameters": Case(ordinary.Noted),
    "a weight that is computed": Case(
        partial(Made, model=lambda: _normed(torch.nn.utils.parametrizations.weight_norm))
    ),
    "evaluation of torch's own encoder": Case(ordinary.Masked, beside=("tp",)),  # which is near, not equal
}  # fmt: skip


def _words(embedding: nn.Module) -> nn.Module:
    return nn.Sequential(embedding, nn.Tanh(), nn.Linear(8, 11))


def _normed(norm: Any) -> nn.Module:
    model = ordinary.Ordinary().model()
    model[2] = norm(model[2])
    return model


def train(run: paceline.Run, strategy: str, shards: int, tuning: Tuning) -> dict[str, Any]:
    """Train all cases, one after the other, in one group of workers."""
    determinism.select_kernels(run.world.device, compiled=False)
    return {
        name: _train_one(run, name, strategy, shards, tuning)
        for name, case in CASES.items()
        if strategy not in case.beside
    }


def _train_one(run: paceline.Run, name: str, strategy: str, shards: int, tuning: Tuning) -> Any:
    task = CASES[name].make()
    try:
        with prepared(run, name, task, strategy, shards, tuning) as (replica, loader, world):
            for work in steps_of(loader):
                replica.step(work, task.loss, task.max_grad_norm)
            metrics = evaluate(loader, task.metrics, replica, world, 0)
            state = replica.state()
            slots = {
                f"{name}/{slot}": value
                for name, held in state["optimizer"]["state"].items()
                for slot, value in held.items()
                if isinstance(value, Tensor)
            }
            weights = {name: value.clone() for name, value in state["model"].items()}
            return weights, weights_sha256(slots), metrics
    except InputError as error:
        return str(error)
    except InterruptedWaitError as error:
        return Interrupted(error)


def _same(got: Any, wanted: Any, *, exact: bool) -> bool:
    if exact:
        return weights_sha256(got[0]) == weights_sha256(wanted[0]) and got[1:] == wanted[1:]
    # Of tp: sums over at most 16 terms in another order, through a few steps.
    return all(torch.allclose(got[0][name], value, rtol=0, atol=1e-5) for name, value in wanted[0].items())


@pytest.fixture(scope="module")
def single() -> dict[int, dict[str, Any]]:
    return {shards: launched(train, "single", 1, shards) for shards in (2, 4)}


@pytest.mark.parametrize(
    ("strategy", "shards"),
    [("fsdp", 2), ("fsdp", 4), ("ps", 2), ("ps", 4), ("pp", 4), ("tp", 2), ("local-sgd", 4)],
)
def test_one_process_or_one_line(strategy: str, shards: int, single: dict[int, dict[str, Any]]) -> None:
    tuning = Tuning(local_warmup=STEPS) if strategy == "local-sgd" else Tuning()
    several = launched(train, strategy, 2, shards, tuning)
    wrong = {}
    for name, got in several.items():
        case, wanted = CASES[name], single[shards][name]
        if strategy in case.refused:
            if not isinstance(got, str) or "\n" in got or not re.search(case.refused[strategy], got):
                wrong[name] = got if isinstance(got, str) else "was not refused"
        elif isinstance(got, str) or not _same(got, wanted, exact=strategy != "tp"):
            wrong[name] = got if isinstance(got, str) else "differs"
    assert not wrong
