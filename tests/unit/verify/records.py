"""Small records and notes to compare, as two shards on two workers would make them."""

from __future__ import annotations

from typing import Any

from paceline.verify.proof.lab.notes import Notes, ShardAttempt, SplitLosses
from paceline.verify.proof.record import Record, StepRecord

NAMES = ("late.weight", "early.weight")


def step(number: int, shards: tuple[int, ...] = (0, 1), **changes: Any) -> StepRecord:
    facts: dict[str, Any] = {
        "number": number,
        "epoch": 0,
        "samples": {shard: (10 * number + shard, 10 * number + shard + 5) for shard in shards},
        "data": {shard: f"data {number} {shard}" for shard in shards},
        "changed": (),
        "shard_losses": {shard: ((number + shard / 2).hex(),) for shard in shards},
        "loss": 1.5,
        "rates": (0.1,),
        "rates_moved": False,
        "gradients": dict.fromkeys(NAMES, f"gradient {number}"),
        "weights": dict.fromkeys(NAMES, f"weight {number}"),
        "optimizer": {f"{name}: momentum": f"state {number}" for name in NAMES},
        "buffers": {"early.count": f"buffer {number}"},
    }
    return StepRecord(**{**facts, **changes})


def record(rank: int = 0, shards: tuple[int, ...] = (0, 1), steps: list[StepRecord] | None = None) -> Record:
    made = dict.fromkeys(NAMES, "start")
    return Record(
        rank=rank,
        exactness="bitwise",
        precision="fp32",
        start=made,
        steps=[step(number, shards) for number in range(3)] if steps is None else steps,
        modules=["", "early", "late"],
    )


def attempt(**changes: Any) -> ShardAttempt:
    facts: dict[str, Any] = {
        "totals": ((0.5).hex(),),
        "weights": (3.0,),
        "modules": (("early", "a"), ("late", "b"), ("", "b")),
        "gradients": dict.fromkeys(NAMES, "gradient"),
        "unused": (),
        "buffers": {},
        "hidden": (),
        "seed_left": 7,
        "rates_moved": None,
    }
    return ShardAttempt(**{**facts, **changes})


def notes(rank: int = 0, **changes: Any) -> Notes:
    facts: dict[str, Any] = {
        "rank": rank,
        "samples": 40,
        "made": dict.fromkeys(NAMES, "start"),
        "data": {0: "x", 1: "y"},
        "data_again": {0: "x", 1: "y"},
        "step_data": {0: "x", 1: "y"},
        "attempts": {0: attempt(), 1: attempt()},
        "repeated": {0: attempt(), 1: attempt()},
        "bent": (),
        "touched": (),
        "parts": SplitLosses(whole_total=6.0, whole_weight=3.0, parts_total=6.0, parts_weight=3.0),
        "no_kernel": None,
    }
    return Notes(**{**facts, **changes})
