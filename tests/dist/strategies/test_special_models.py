"""What a strategy must also get right: unused parameters, mixed precision, compiled models."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

import paceline
from paceline.errors import InputError
from paceline.training import trainer
from paceline.training.spec import TrainSpec
from tests.contract.training import Trained

STEPS = 8


def work(run: paceline.Run, spec: TrainSpec) -> Trained:
    result = trainer.main(run, spec)
    return Trained(
        {name: tensor.clone() for name, tensor in run._engine.state.replica.state()["model"].items()},
        result,
        0.0,
    )


def train(task: str, strategy: str, workers: int, *, samples: int = 61, **options: Any) -> Trained:
    module = "tests.contract.tasks" if task == "Classify" else "tests.dist.strategies.models"
    spec = TrainSpec(task=f"{module}:{task}", name=task, steps=STEPS, settings={"samples": str(samples)})
    first, *others = paceline.launch(
        work, spec, strategy=strategy, workers=workers, **{"shards": 2, "threads": 1, **options}
    )
    for other in others:
        assert other.result["weights_sha256"] == first.result["weights_sha256"]
    trained: Trained = first
    return trained


# With two workers of one shard each ddp adds two numbers, as one process does: everything is bit-equal.
@pytest.mark.parametrize("strategy", ["dp", "ddp"])
@pytest.mark.parametrize("samples", [61, 9])  # 9: the last batch is one sample, and one worker has none
def test_parameters_without_a_gradient_stay_as_they_are(strategy: str, samples: int) -> None:
    one = train("Branching", "single", 1, samples=samples)
    two = train("Branching", strategy, 2, samples=samples)
    assert one.weights.keys() == two.weights.keys()
    for name, tensor in one.weights.items():
        assert torch.equal(tensor, two.weights[name]), name


def test_an_unused_parameter_that_nobody_announced() -> None:
    with pytest.raises(InputError, match=r"no gradient for .*branches.*find_unused_parameters = True"):
        train("ForbiddenBranching", "ddp", 2)


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_bf16_is_the_same_on_two_workers(strategy: str) -> None:
    one, two = train("Halved", "single", 1), train("Halved", strategy, 2)
    assert all(tensor.dtype == torch.float32 for tensor in two.weights.values())
    assert two.result["weights_sha256"] == one.result["weights_sha256"]


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_a_loss_that_reads_a_weight_is_the_same_on_two_workers(strategy: str) -> None:
    one, two = train("Weighed", "single", 1), train("Weighed", strategy, 2)
    assert two.result["weights_sha256"] == one.result["weights_sha256"]


@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("c++") is None, reason="needs a C++ compiler"
)
def test_a_compiled_model_on_two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "TORCHINDUCTOR_COMPILE_THREADS", "1"
    )  # a pool of compilers would cost more than it saves
    plain, compiled = train("Plain", "ddp", 2), train("Plain", "ddp", 2, compile=True)
    assert compiled.weights.keys() == plain.weights.keys(), "the bare module's names"
    # Compiled code may add the 4 samples and 6 features of a shard in another order: 24 roundings a step.
    for name, tensor in plain.weights.items():
        assert torch.allclose(compiled.weights[name], tensor, rtol=0, atol=STEPS * 24 * 2**-23)
