"""A model that keeps something beside parameters and buffers, and computes with it."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import InputError
from paceline.training.hidden_state import HiddenState

OWN, WRITTEN = r"step 1: the model draws from 1\.generator", r"step 1: forward writes to 1\.total"


class Hidden(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.generator = torch.Generator()
        self.total = torch.zeros(3)
        self.shown: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.what == "seeds":
            self.generator.manual_seed(5)
        if self.what in ("draws", "seeds"):
            inputs = inputs * torch.rand(inputs.shape, generator=self.generator)
        if self.what == "writes":
            self.total += inputs.mean(0)
        if self.what == "replaces":
            self.shown = inputs.mean(0)
        return inputs


@pytest.mark.parametrize(
    ("what", "several", "words"),
    [
        ("draws", False, OWN),
        ("draws", True, OWN),
        ("writes", False, WRITTEN),
        ("writes", True, WRITTEN),
        ("seeds", True, ""),
        ("replaces", True, ""),
        ("nothing", True, ""),
    ],
)
def test_what_is_told_and_refused(what: str, several: bool, words: str) -> None:
    model, watch = nn.Sequential(nn.Linear(3, 3), Hidden(what)), HiddenState()
    notes = []

    def step(number: int) -> None:
        watch.begin(model)
        model(torch.ones(2, 3))
        notes.append(watch.check(number, several=several))

    step(0)
    if what == "draws" and several:
        with pytest.raises(InputError, match=words):
            step(1)
        return
    step(1)
    model[1].total.fill_(7)  # by the loop, between two steps
    step(2)
    assert notes[0] is notes[2] is None
    assert bool(notes[1]) == bool(words)
    assert re.search(words, notes[1] or "")
