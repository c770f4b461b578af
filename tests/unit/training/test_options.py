"""How a run is to be done is checked when it is said, in one line that says what would work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InputError, UnknownNameError
from paceline.recovery.position import Position
from paceline.training.options import Every, RunOptions
from paceline.training.spec import TrainSpec


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"strategy": "dpp"}, "unknown strategy 'dpp'. Did you mean"),
        ({"device": "gpu"}, "unknown --device 'gpu'.*Known: auto, cpu, cuda"),
        ({"backend": "glo"}, "unknown --backend 'glo'. Did you mean 'gloo'"),
        ({"precision": "fp64"}, "unknown --precision 'fp64'"),
        ({"exact": "bit"}, "unknown --exact 'bit'"),
        ({"workers": 0}, "--workers is 0, but must be at least 1"),
        ({"workers": -2}, "--workers is -2"),
        ({"shards": 0}, "--shards is 0"),
        ({"micro_batch": 0}, "--micro-batch is 0"),
        ({"keep": 0}, "--keep is 0"),
        (
            {"workers": 3, "shards": 2},
            "3 workers for 2 shards.*Use --workers 2 or fewer, or --shards 3 or more",
        ),
        ({"save_every": "often", "out": Path("x")}, "neither a number of steps"),
        ({"save_every": "10"}, "--save-every needs a folder"),
        ({"resume": True}, "--resume needs the folder"),
    ],
)
def test_what_cannot_work(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        RunOptions(**given)
    assert "\n" not in str(caught.value)


def test_shards_and_processes() -> None:
    assert RunOptions(workers=3).total_shards == 3
    assert RunOptions(workers=3, shards=8).total_shards == 8
    assert RunOptions(workers=3).processes == 3
    assert RunOptions(workers=3, strategy="dp").processes == 1
    assert RunOptions(strategy="single").processes == 1
    with pytest.raises(InputError, match="single is one process, but 2 workers"):
        _ = RunOptions(strategy="single", workers=2).processes


@pytest.mark.parametrize(
    ("text", "steps", "epochs"),
    [("100", 100, None), ("1epoch", None, 1), ("2 epochs", None, 2), ("3steps", 3, None), (" 7 ", 7, None)],
)
def test_save_every(text: str, steps: int | None, epochs: int | None) -> None:
    assert Every.parse(text) == Every(steps=steps, epochs=epochs)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "epoch", "10 minutes", "0epochs"])
def test_save_every_refuses(text: str) -> None:
    with pytest.raises(InputError, match="--save-every"):
        Every.parse(text)


def test_when_a_checkpoint_is_due() -> None:
    assert [n for n in range(1, 8) if Every(steps=3).after_step(n)] == [3, 6]
    assert not any(Every(steps=3).after_epoch(n) for n in range(1, 8))
    assert [n for n in range(1, 6) if Every(epochs=2).after_epoch(n)] == [2, 4]
    assert not any(Every(epochs=1).after_step(n) for n in range(1, 8))
    assert not Every().after_step(1)
    assert not Every().after_epoch(1)


def test_position() -> None:
    position = Position().after_step().after_step()
    assert position == Position(epoch=0, step=2, number=2)
    assert position.next_epoch().after_step() == Position(epoch=1, step=1, number=3)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"epochs": 1, "steps": 1}, "--epochs and --steps both"),
        ({"epochs": 0}, "--epochs is 0"),
        ({"steps": -1}, "--steps is -1"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"max_grad_norm": 0.0}, "--max-grad-norm is 0"),
        ({"max_grad_norm": -1.0}, "--max-grad-norm is -1"),
    ],
)
def test_a_training_that_cannot_be(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        TrainSpec(task="digits", name="digits", **given)


def test_an_unknown_name_travels_as_the_finished_message() -> None:
    import pickle

    with pytest.raises(UnknownNameError) as caught:
        RunOptions(strategy="dpp")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301  (made on the line itself)
