"""Layers that keep statistics, or that make their weights anew in each pass."""

from __future__ import annotations

from torch import nn

from tests.zoo.exhibits import exhibit
from tests.zoo.tasks.base import CLASSES, FEATURES, Small
from tests.zoo.tasks.weights import NO_SPARSE


@exhibit("batch-norm", "BatchNorm", refused_by=NO_SPARSE)
class BatchNorm(Small):
    """Running statistics; no shard has fewer than two samples."""

    samples = 24

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))
