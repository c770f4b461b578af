"""What goes wrong in the user's code or input arrives as what it is, wherever it happened."""

from __future__ import annotations

from typing import Any

import pytest

import paceline
from paceline.data.permutation import EpochPermutation
from paceline.data.shards import shard_bounds
from paceline.errors import InputError, WorkerFailedError
from paceline.training import trainer
from paceline.training.spec import TrainSpec
from tests.dist.training import broken

SHARDS, BATCH, SAMPLES = 4, 8, 61


def train(task: str, strategy: str = "ddp", workers: int = 2, *, steps: int = 8, **options: Any) -> None:
    spec = TrainSpec(task=f"tests.dist.training.broken:{task}", name=task, steps=steps)
    paceline.launch(trainer.main, spec, strategy=strategy, workers=workers, shards=SHARDS, **options)


def place_of_poison() -> tuple[int, int, list[int]]:
    """Work out by hand the step, the shard and the samples of the shard that the spoilt sample is in."""
    order = EpochPermutation(SAMPLES, 0)
    step, place = divmod(order.position(0, broken.POISON), BATCH)
    bounds = [shard_bounds(shard, SHARDS, min(BATCH, SAMPLES - step * BATCH)) for shard in range(SHARDS)]
    shard = next(number for number, (low, high) in enumerate(bounds) if low <= place < high)
    low, high = bounds[shard]
    return step, shard, order.indices(0, step * BATCH + low, step * BATCH + high).tolist()


@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("dp", 2), ("ddp", 3)])
def test_nan_names_step_shard_and_samples_and_leaves_the_weights(strategy: str, workers: int) -> None:
    step, shard, samples = place_of_poison()
    assert step > 0
    for message, untouched, stopped_at in paceline.launch(
        broken.caught, strategy=strategy, workers=workers, shards=SHARDS
    ):
        assert message.startswith(f"step {step}: the loss is nan.")
        assert f"shard {shard}, samples {', '.join(map(str, samples))}." in message
        assert untouched
        assert stopped_at == step


def test_nan_in_a_task_on_threads() -> None:
    step, shard, _ = place_of_poison()
    with pytest.raises(WorkerFailedError) as caught:
        train("NotANumber", "dp", 3)
    assert f"stopped: step {step}: the loss is nan. It comes from shard {shard}," in str(caught.value)


@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("dp", 2), ("ddp", 2)])
def test_an_infinite_auxiliary_term_stops_the_run_too(strategy: str, workers: int) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        train("InfiniteTerm", strategy, workers)
    assert "stopped: step 0: the auxiliary term size is inf. It comes from shard 0," in str(caught.value)


def test_a_batch_without_any_weight() -> None:
    with pytest.raises(WorkerFailedError) as caught:
        train("WithoutWeight")
    assert "step 0: the weight of the whole global batch is 0: no sample has any" in str(caught.value)


def test_an_exception_in_the_data_set_of_one_worker_arrives_as_it_is() -> None:
    _, shard, _ = place_of_poison()
    with pytest.raises(WorkerFailedError) as caught:
        train("TornPicture", workers=4)
    assert caught.value.rank == shard
    assert "KeyError: 'the picture is torn'" in caught.value.trace
    assert f"while reading sample {broken.POISON} of the data set, in epoch 0" in caught.value.trace


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("BareTensor", r"loss\(\) returned a Tensor, not a paceline.Loss. Return paceline.Loss.mean"),
        ("Frozen", "the model has no trainable parameters"),
        ("Empty", "the data set is empty"),
    ],
)
@pytest.mark.parametrize(("strategy", "workers"), [("dp", 2), ("ddp", 2)])
def test_input_that_cannot_work(task: str, words: str, strategy: str, workers: int) -> None:
    with pytest.raises(InputError, match=words) as caught:
        train(task, strategy, workers)
    assert "\n" not in str(caught.value)
