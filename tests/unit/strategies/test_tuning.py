"""Options that make no sense are refused when they are made, and a level is never more than they leave of it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from paceline.errors import InputError
from paceline.strategies import STRATEGIES, load
from paceline.strategies.base import Exactness
from paceline.strategies.tuning import USERS, Tuning, check_use


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"outer_lr": -1.0}, r"--outer-lr is -1, but must be above 0"),
        ({"bucket_mb": float("nan")}, r"--bucket-mb is nan, but must be a number above 0"),
        ({"outer_momentum": 1.0}, r"--outer-momentum is 1, but must be below 1"),
    ],
)
def test_numbers_out_of_range(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Tuning(**given)


@pytest.mark.parametrize("strategy", ["ddp", "tp"])
def test_what_compression_leaves_of_a_promise(strategy: str) -> None:
    assert load(strategy).level(Tuning(compress="powersgd:2")) is Exactness.STATISTICAL
    assert load(strategy).level(Tuning(compress="bf16")) is Exactness.NUMERIC


def test_the_table_knows_every_option_and_strategy() -> None:
    assert {one.name for one in fields(Tuning)} == {
        *USERS,
        "activation_checkpointing",
        "activation_checkpointing_every",
    }
    for users in USERS.values():
        for name, side in users:
            assert side in (STRATEGIES[name].side, *STRATEGIES[name].beside)


@pytest.mark.parametrize(
    ("given", "strategy", "sides", "owner"),
    [
        ({"schedule": "1f1b"}, "ddp", ("ddp",), "--schedule is an option of pp"),
        ({"compress": "bf16"}, "fsdp", ("ddp", "fsdp"), "--compress is an option of ddp or tp beside ddp"),
        ({"compress": "bf16"}, "tp", ("fsdp", "tp"), "Use --strategy ddp, or leave it out"),
        ({"reshard": False}, "pp", ("fsdp", "pp"), "--reshard is an option of fsdp"),
        (
            {"local_steps": 8},
            "ddp",
            ("ddp",),
            "--local-steps is an option of local-sgd, and --strategy text has",
        ),
    ],
)
def test_an_option_of_another_strategy(
    given: dict[str, Any], strategy: str, sides: tuple[str, ...], owner: str
) -> None:
    with pytest.raises(InputError, match=owner):
        check_use(given, {"text": (strategy, sides)})


def test_an_option_that_serves_or_asks_for_nothing() -> None:
    check_use({"compress": "bf16", "loss_parallel": True}, {"ddp=2,tp=2": ("tp", ("ddp", "tp"))})
    check_use(
        {"offload": False, "reshard": True, "activation_checkpointing": "blocks"},
        {"single": ("single", ("ddp",))},
    )
    check_use({"schedule": "gpipe"}, {"ddp": ("ddp", ("ddp",)), "pp": ("pp", ("pp",))})
    check_use({"activation_checkpointing": "blocks"}, {})  # an empty list is refused by whoever reads it
