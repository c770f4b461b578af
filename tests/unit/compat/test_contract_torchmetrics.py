"""Contract on torchmetrics: how each state of a metric is reduced, and in which order two metrics are merged."""

from __future__ import annotations

import importlib.util

import torch

from tests.unit.compat.contracts import leans_on

if importlib.util.find_spec("torchmetrics") is not None:  # a machine with another torch may lack it

    @leans_on("torchmetrics.Metric:_reductions")
    def test_a_metric_says_how_its_states_are_reduced() -> None:
        from torchmetrics import MeanMetric, PearsonCorrCoef
        from torchmetrics.classification import BinaryAUROC

        from paceline.compat.torchmetrics_states import unmergeable

        assert {name: one.__name__ for name, one in MeanMetric()._reductions.items()} == {
            "mean_value": "dim_zero_sum",
            "weight": "dim_zero_sum",
        }
        assert unmergeable(MeanMetric()) is None
        assert unmergeable(PearsonCorrCoef()) is not None
        first, second = BinaryAUROC(), BinaryAUROC()
        first.update(torch.tensor([0.1]), torch.tensor([0]))
        second.update(torch.tensor([0.9]), torch.tensor([1]))
        second.merge_state(first)
        assert torch.cat([*second.preds]).tolist() == torch.tensor([0.1, 0.9]).tolist()
