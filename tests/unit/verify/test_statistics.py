"""The band that a statistical promise is held to, and the operation that is the first to differ."""

from __future__ import annotations

import math

from paceline.verify.proof.bisecting import first_operation
from paceline.verify.proof.differences import Difference
from paceline.verify.proof.record import TorchCall
from paceline.verify.proof.statistics import band, second_half

FALLING = [2.0 - 0.05 * step for step in range(20)]


def test_a_run_as_far_off_as_another_seed_is_in_the_band_and_one_that_learns_nothing_is_not() -> None:
    others = [[loss + shift for loss in FALLING] for shift in (-0.02, 0.01, 0.03)]
    found = band(FALLING, others)
    assert found.holds(second_half(FALLING))
    assert found.holds(second_half([loss + 0.05 for loss in FALLING]))
    assert not found.holds(2.0)
    assert not found.holds(math.nan)
    assert not found.holds(math.inf)
    assert not found.holds(-5.0)


def test_a_reference_that_diverged_itself_lets_nothing_pass() -> None:
    assert not band([1.0, math.nan], [[math.nan, math.nan]]).holds(1.0)


def call(
    function: str, output: str, *inputs: str, gradient: str = "g", shard: int = 0, module: str = ""
) -> TorchCall:
    return TorchCall(
        shard=shard,
        batch=0,
        module=module,
        function=function,
        inputs=inputs,
        output=output,
        gradient=gradient,
    )


def told(mine: list[TorchCall], theirs: list[TorchCall], kind: str = "gradient") -> str:
    return first_operation(mine, [theirs], Difference(step=0, kind=kind, name="w", rank=0))


def test_the_first_operation_that_differs() -> None:
    mine = [call("linear", "a", "x", module="0"), call("relu", "b", "a"), call("mul", "c", "b", "1")]
    assert "relu in the loss function: the same inputs, another output" in told(
        mine, [mine[0], call("gather", "z", "w"), call("relu", "other", "a"), mine[2]]
    )
    assert "mul in the loss function: its argument 1 is another (2 not 1)" in told(
        mine, [*mine[:2], call("mul", "other", "b", "2")]
    )
    assert "the gradient that arrives at the output of linear in module 0" in told(
        mine, [call("linear", "a", "x", module="0", gradient="h"), *mine[1:]]
    )
    assert "none of the 3 operations" in told(mine, mine)
    assert "where the gradients of the shards are combined" in told(mine, mine)
    assert "optimizer's update" in told(mine, mine, "weight")
