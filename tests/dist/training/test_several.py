"""A GAN in a loop of its own: the bits of one process under every strategy that trains several models, and when it is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.verify.receipts.audit import audit
from tests.dist.training import gans


def launch(**options: Any) -> Any:
    kwargs: dict[str, Any] = {
        key: options.pop(key) for key in ("given", "freezes", "ordered", "epochs", "steps") if key in options
    }
    return paceline.launch(gans.train, shards=gans.SHARDS, threads=1, device="cpu", kwargs=kwargs, **options)


@pytest.fixture(scope="module")
def alone() -> Any:
    found = launch(strategy="single")[0]
    assert [turn for turn, _ in found[1]] == [*gans.TURNS] * 12
    assert found[2] == {"generator": 0.01 * 0.5**4, "discriminator": 0.01}
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "ddp", "workers": 2, "freezes": True},
        {"strategy": "ddp", "workers": 2, "shard_optimizer": True},
        {"strategy": "dp", "workers": 2},
        {"strategy": "fsdp", "workers": 2},
        {"strategy": "ps", "workers": 2, "servers": 2},
    ],
    ids=["ddp", "zero-1", "dp", "fsdp", "ps"],
)
def test_the_bits_are_those_of_one_process(options: dict[str, Any], alone: Any) -> None:
    for found in launch(**options):
        assert found == alone


@pytest.mark.parametrize(("ordered", "samples"), [(False, 44), (True, sum(gans.SIZES))])
def test_a_run_goes_on_between_two_turns(tmp_path: Path, alone: Any, ordered: bool, samples: int) -> None:
    """It was saved in the middle of an epoch, with a batch that the generator had yet to see."""
    out = tmp_path / "run"
    alone = launch(strategy="single", ordered=True)[0] if ordered else alone
    first = launch(strategy="single", out=out, steps=11, ordered=ordered)[0]
    assert first[1][-1][0] == "discriminator"
    for found in launch(strategy="ddp", workers=2, out=out, resume=True, ordered=ordered):
        assert found[0] == alone[0]
        assert found[1] == alone[1][11:]
        assert found[2] == alone[2]
    report = audit(out)
    assert report.problems == []
    assert report.samples == 2 * 3 * samples
