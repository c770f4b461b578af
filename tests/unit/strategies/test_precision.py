"""Which precisions there are, where they work, and what they do to a forward pass."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import InputError, UnknownNameError
from paceline.strategies.precision import Precision

CPU = torch.device("cpu")


def test_fp16_needs_a_gpu() -> None:
    with pytest.raises(InputError, match=r"fp16 needs a CUDA device\. Use bf16"):
        Precision("fp16", CPU)


def test_an_unknown_name() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'bf16'"):
        Precision("bf61", CPU)


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_what_a_product_is_computed_in(name: str, dtype: torch.dtype) -> None:
    precision = Precision(name, CPU)
    with precision.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert precision.scaler() is None
