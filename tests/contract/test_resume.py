"""A run left in the middle of an epoch goes on under any strategy and number of workers as if nothing had been."""

from __future__ import annotations

import json

from tests.contract.conftest import Compared, into
from tests.contract.distance import assert_same, bound
from tests.contract.jobs import HALFWAY, STEPS, WHOLE
from tests.contract.tasks import ADAM_EPSILON, LEARNING_RATE
from tests.contract.training import train

LIMIT = bound(8, STEPS, gain=LEARNING_RATE / ADAM_EPSILON)


def test_one_process_began_it(compared: Compared) -> None:
    assert compared.many["resumed"].result["steps"] == STEPS
    assert compared.many["resumed"].result["samples"] == 2 * 61 + 4 * 8, "of the whole run"
    assert compared.many["resumed"].result["new_samples"] == 2 * 61 + 4 * 8 - (61 + 8), (
        "the rest, and only that"
    )
    assert_same(compared.case, compared.one["whole"].weights, compared.many["resumed"].weights, LIMIT)


def test_one_process_ends_it(compared: Compared) -> None:
    manifest = json.loads((compared.out / "checkpoints" / f"step-{HALFWAY}" / "manifest.json").read_text())
    begun = {"phase": 0, "first_epoch": 0, "first_number": 0}
    assert manifest["position"] == {"epoch": 1, "step": 1, "number": HALFWAY, **begun}
    assert manifest["meta"]["strategy"] == compared.case.strategy
    ended = train({"ended": into(WHOLE, compared.out, resume=True)})["ended"]
    assert_same(compared.case, compared.one["whole"].weights, ended.weights, LIMIT)
