"""Evaluation measures every sample once: 103 of them, which no number of workers divides."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.contract.conftest import Compared
from tests.contract.tasks import Classify


def test_every_sample_once(compared: Compared) -> None:
    for trained in (compared.one["adamw"], compared.many["adamw"]):
        assert trained.result["metrics"]["samples"] == 103
        assert trained.result["metrics"]["sum of numbers"] == 103 * 102 / 2


def test_a_plain_evaluation_says_the_same(compared: Compared) -> None:
    trained, task = compared.many["adamw"], Classify()
    model = task.model()
    model.load_state_dict(trained.weights)
    model.eval()
    held_out = task.eval_data()
    assert held_out is not None
    features, labels, _ = held_out.tensors
    with torch.no_grad():
        scores = model(features)
    metrics = trained.result["metrics"]
    assert metrics["accuracy"] == (scores.argmax(1) == labels).sum().item() / 103
    # One sum of 103 float32 numbers here, sums of two or three there, added in float64.
    loss = F.cross_entropy(scores.double(), labels).item()
    assert metrics["loss"] == pytest.approx(loss, rel=16 * torch.finfo(torch.float32).eps)


def test_metrics_are_the_same_bits_where_the_weights_are(compared: Compared) -> None:
    one, many = compared.one["adamw"], compared.many["adamw"]
    if compared.case.bitwise:
        assert many.result["metrics"] == one.result["metrics"]
    else:
        assert many.result["metrics"]["loss"] == pytest.approx(one.result["metrics"]["loss"], abs=1e-4)
