"""A schedule steps once per optimizer step, whatever the number of workers."""

from __future__ import annotations

from tests.contract.conftest import Compared
from tests.contract.distance import assert_same, bound
from tests.contract.jobs import HALFWAY, STEPS
from tests.contract.tasks import LEARNING_RATE


def test_learning_rate(compared: Compared) -> None:
    for trained in (compared.one["schedule"], compared.many["schedule"], compared.many["resumed"]):
        assert trained.learning_rate == LEARNING_RATE * (1 / (1 + STEPS))
    assert compared.many["half"].learning_rate == LEARNING_RATE * (1 / (1 + HALFWAY))


def test_weights(compared: Compared) -> None:
    limit = bound(8, STEPS, gain=LEARNING_RATE)
    assert_same(compared.case, compared.one["schedule"].weights, compared.many["schedule"].weights, limit)
