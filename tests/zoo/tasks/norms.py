"""Layers that keep statistics, buffers that change, and weights that are made anew in each pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.zoo.exhibits import NOT_FOLLOWED, exhibit
from tests.zoo.tasks.base import CLASSES, FEATURES, Small, Steady

APART = {"local-sgd": "came out differently on different shards"}
"""Workers whose weights differ get other vectors."""


@exhibit("batch-norm", "BatchNorm", meshes=True)
class BatchNorm(Steady):
    """Running statistics; no shard has fewer than two samples."""

    samples = 24

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))


@exhibit("group-norm", "a small convolutional network with GroupNorm")
class GroupNorm(Steady):
    """Six features as a picture."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)),
            nn.Conv2d(1, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 4, 1),
            nn.InstanceNorm2d(4, affine=True),
            nn.Flatten(),
            nn.Linear(4 * 6, CLASSES),
        )


@exhibit("weight-norm-old", "`nn.utils.weight_norm`, the old form")
class WeightNormOld(Steady):
    """A hook makes the weight before each pass."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(FEATURES, 16)), nn.Tanh(), nn.Linear(16, CLASSES))


@exhibit("weight-norm", "`parametrizations.weight_norm`")
class WeightNorm(Steady):
    """A parametrization makes the weight whenever it is asked for."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            parametrizations.weight_norm(nn.Linear(FEATURES, 16)), nn.Tanh(), nn.Linear(16, CLASSES)
        )


@exhibit("spectral-norm-old", "`nn.utils.spectral_norm`, the old form", APART)
class SpectralNormOld(Steady):
    """Each pass moves the vectors of its power iteration."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.utils.spectral_norm(nn.Linear(FEATURES, 16)), nn.Tanh(), nn.Linear(16, CLASSES)
        )


@exhibit("spectral-norm", "`parametrizations.spectral_norm`", APART)
class SpectralNorm(Steady):
    """The same as a parametrization."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(FEATURES, 16)), nn.Tanh(), nn.Linear(16, CLASSES)
        )


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.chosen: Tensor
        self.register_buffer("chosen", torch.zeros(CLASSES))

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.layer(features)
        if self.training:
            self.chosen += torch.bincount(scores.argmax(1), minlength=CLASSES)
        return scores


@exhibit("counting", "a buffer that the forward pass changes, with a rule in `Task.buffers`", NOT_FOLLOWED)
class Counting(Small):
    """How often each class was the answer."""

    def model(self) -> nn.Module:
        return _Counting()

    def buffers(self) -> Mapping[str, Any]:
        return {"chosen": "sum"}


@exhibit(
    "counting-unsaid",
    "a buffer that the forward pass changes, without a rule",
    {"*": "the buffer chosen", "single": None, **NOT_FOLLOWED},
)
class CountingUnsaid(Counting):
    """Nobody has said what becomes of it."""

    def buffers(self) -> Mapping[str, Any]:
        return {}


class _Centred(nn.Module):
    """Takes a running mean from its features, in evaluation too."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(FEATURES), persistent=persistent)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, features: Tensor) -> Tensor:
        self.centre = 0.9 * self.centre + 0.1 * features.mean(0).detach()
        self.passes += 1
        scores: Tensor = self.layer(features - self.centre)
        return scores


@exhibit("evaluation-moves", "buffers that evaluation changes too: they are put back", plain=False)
class EvaluationMoves(Small):
    """A running mean that is replaced, and a count, whatever the mode."""

    def model(self) -> nn.Module:
        return _Centred(persistent=True)

    def buffers(self) -> Mapping[str, Any]:
        return {"centre": "mean", "passes": "sum"}


@exhibit(
    "unsaved-buffer",
    "a changing buffer with `persistent=False`",
    dict.fromkeys(("fsdp", "tp", "ps", "local-sgd", "pp"), "is registered with persistent=False"),
    plain=False,
)
class UnsavedBuffer(EvaluationMoves):
    """Checkpoints hold it all the same."""

    def model(self) -> nn.Module:
        return _Centred(persistent=False)


class _Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.steps: Tensor
        self.centre: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("centre", torch.zeros(FEATURES))

    def forward(self, features: Tensor) -> Tensor:
        if self.training:
            if self.steps >= 2:
                self.centre.data.mul_(0.9).add_(0.1 * features.mean(0).detach())
            self.steps += 1
        scores: Tensor = self.layer(features - self.centre)
        return scores


@exhibit(
    "late-buffer",
    "a buffer without a rule that begins to change later, through `.data`",
    {"*": "began to change after the first step", "single": None, **NOT_FOLLOWED},
    plain=False,
)
class LateBuffer(Small):
    """As a codebook does after a warm-up."""

    def model(self) -> nn.Module:
        return _Late()

    def buffers(self) -> Mapping[str, Any]:
        return {"steps": "max"}
