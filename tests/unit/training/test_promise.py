"""The level of exactness that a run promises, by its strategy and options."""

from __future__ import annotations

import pytest

from paceline import strategies
from paceline.errors import InputError
from paceline.strategies.base import Exactness
from paceline.training.checks.before_first_step import promise
from paceline.training.options import RunOptions


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("ddp", Exactness.BITWISE), ("fsdp", Exactness.NUMERIC), ("ddp=1,fsdp=2", Exactness.NUMERIC)],
)
def test_blocks_that_are_compiled_alone_have_other_bits_than_the_whole_model(
    strategy: str, expected: Exactness
) -> None:
    options = RunOptions(strategy=strategy, workers=2, compile=True)
    assert promise(strategies.load(strategy), options) is expected


def test_more_than_the_level_is_refused() -> None:
    options = RunOptions(strategy="fsdp", workers=2, compile=True, exact="bitwise")
    with pytest.raises(InputError, match="--exact bitwise is more than --strategy fsdp can give"):
        promise(strategies.load("fsdp"), options)
