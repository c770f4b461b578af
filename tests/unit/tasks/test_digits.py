import importlib.util
import sys
from importlib.machinery import ModuleSpec

import pytest
import torch

from paceline.errors import InputError
from paceline.tasks import digits
from paceline.tasks.digits import Digits, read_digits
from tests.unit.tasks.training_loop import train


def test_the_file_says_what_scikit_learn_says():
    datasets = pytest.importorskip("sklearn.datasets")
    truth = datasets.load_digits()
    images, labels = read_digits()
    assert torch.equal(images, torch.from_numpy(truth.images).float())
    assert torch.equal(labels, torch.from_numpy(truth.target))


def test_reading_does_not_import_scikit_learn(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    read_digits()
    assert "sklearn" not in sys.modules


def test_the_split_is_fixed_and_keeps_every_image_once():
    train_set, test_set = Digits().train_data(), Digits().eval_data()
    assert (len(train_set), len(test_set)) == (1437, 360)
    assert train_set.tensors[0].shape[1:] == (1, 8, 8)
    assert 0 <= train_set.tensors[0].min() < train_set.tensors[0].max() == 1
    images, _ = read_digits()
    split = torch.cat([train_set.tensors[0], test_set.tensors[0]]).flatten(1) * 16
    assert torch.equal(
        *(torch.unique(each, dim=0, return_counts=True)[1] for each in (split, images.flatten(1)))
    )
    assert torch.equal(split.sum(0), images.flatten(1).sum(0))
    digits._shuffled.cache_clear()
    assert torch.equal(Digits().train_data().tensors[0], train_set.tensors[0])
    assert sorted(test_set.tensors[1].unique().tolist()) == list(range(10))


def test_two_epochs_reach_most_digits():
    task = Digits()
    model, losses = train(task, steps=46)
    with torch.no_grad():
        metrics = task.metrics(model, task.eval_data()[:])
    assert losses[0] > 2 > 1 > losses[-1]
    assert metrics["accuracy"].total / metrics["accuracy"].weight > 0.75
    assert metrics["loss"].weight == 360


def test_width_and_rate_are_options():
    task = Digits(lr=0.5, width=8)
    model = task.model()
    assert model[0].out_channels == 8
    assert task.optimizer(model).param_groups[0]["lr"] == 0.5


def test_a_schedule_takes_more_steps_than_it_was_made_for():
    task = Digits()
    optimizer = task.optimizer(task.model())
    schedule = task.scheduler(optimizer, 10)
    rates = []
    for _ in range(15):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[0] == max(rates) == task.lr
    assert rates[10:] == [0.0] * 5
    assert task.scheduler(optimizer, None) is None


@pytest.mark.parametrize("found", [None, ModuleSpec("sklearn", None, origin="/nowhere/sklearn/__init__.py")])
def test_missing_data_is_said_with_the_command_that_helps(monkeypatch, found):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(InputError, match=r"paceline\[data\]"):
        read_digits()
