"""In which worker a fault goes off."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.verify.chaos.faults import DISK, KILL, Fault, Marks
from paceline.verify.chaos.plan import FaultPlan
from paceline.verify.chaos.worker import Trap
from paceline.world.fault_points import CHECKPOINT, FORWARD

SERVER = SimpleNamespace(world=SimpleNamespace(rank=2, size=3))


@pytest.mark.parametrize(
    ("kind", "point", "rank", "due"),
    [
        (DISK, CHECKPOINT, 0, True),
        (KILL, CHECKPOINT, 0, True),
        (KILL, FORWARD, 0, False),
        (KILL, FORWARD, 2, True),
    ],
)
def test_a_fault_in_a_checkpoint_goes_off_in_whoever_writes(tmp_path: Path, kind, point, rank, due):
    fault = Fault(number=0, kind=kind, point=point, step=4, rank=rank)
    trap = Trap(SERVER, FaultPlan(faults=(fault,), steps=9, workers=2, save_every=2), Marks(tmp_path))
    assert trap._is_due(fault, 5) is due
    assert not trap._is_due(fault, 3)
