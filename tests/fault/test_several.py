"""A GAN that loses a worker in the turn of each of its models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.world import fault_points
from tests.dist.training import gans


@pytest.fixture(scope="module")
def quiet() -> Any:
    return paceline.launch(
        gans.train, strategy="single", shards=gans.SHARDS, threads=1, device="cpu", kwargs={"given": False}
    )[0]


@pytest.mark.parametrize(
    "options",
    [{"strategy": "ddp"}, {"strategy": "fsdp", "peer_snapshots": 1, "snapshot_every": 1}],
    ids=["ddp", "fsdp"],
)
def test_a_turn_is_given_once_more(options: dict[str, Any], tmp_path: Path, quiet: Any) -> None:
    """Step 5 is the generator's, step 10 the discriminator's."""
    faults = [(fault_points.BACKWARD, 5, 1, "kill"), (fault_points.OPTIMIZER, 10, 1, "kill")]
    kwargs = {"given": False, "folder": str(tmp_path), "faults": faults}
    for found in paceline.launch(
        gans.train,
        workers=3,
        shards=gans.SHARDS,
        threads=1,
        device="cpu",
        out=tmp_path / "run",
        kwargs=kwargs,
        **options,
    ):
        assert found[0] == quiet[0]
        assert found[1][-1] == quiet[1][-1]
        assert set(found[1]) <= set(quiet[1])  # fsdp goes back to a snapshot
        assert found[2] == quiet[2]
        assert found[3]
    assert len(set(tmp_path.glob("fault-*"))) == 2
