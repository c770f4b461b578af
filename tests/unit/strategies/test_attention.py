"""Attention that the compiler meets: on a CPU, and where the kernels do not fit, it is torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional as F

from paceline.strategies.attention.swap import attention, swap_attention


def test_a_graph_for_the_cpu_stays_as_it_is() -> None:
    graph = fx.symbolic_trace(lambda x: F.scaled_dot_product_attention(x, x, x))
    before = graph.code
    swap_attention(graph, torch.device("cpu"))
    assert graph.code == before


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.tril(torch.ones(5, 5, dtype=torch.bool))},
        {"enable_gqa": True},
    ],
    ids=["plain", "causal", "scale", "mask", "groups"],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_what_the_kernels_do_not_take_is_torchs(how: dict[str, Any], autocast: bool) -> None:
    query, key, value = torch.randn(3, 2, 4, 5, 64, generator=torch.Generator().manual_seed(1)).unbind()
    if how.get("enable_gqa"):
        key, value = key[:, :2], value[:, :2]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours = attention(query, key, value, **how)
        assert torch.equal(ours, F.scaled_dot_product_attention(query, key, value, **how))
