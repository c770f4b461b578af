"""Workers killed at any moment of a save that they write together leave the old checkpoints or the new one, whole."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

import paceline
from paceline.checkpoint import load
from paceline.checkpoint.compare import same
from paceline.checkpoint.saver import Saver
from paceline.errors import WorkerFailedError
from paceline.state.chunks import assemble
from tests.checkpoints import Checkpoints
from tests.dist.checkpoint.cut import REST, held, moment, whole
from tests.unit.checkpoint.states import refuse, run_state


def save_until_killed(run: paceline.Run, folder: Path, victim: int, number: int) -> None:
    """Save step after step in the background; one worker dies when it is about to touch the folder for the given time."""
    seen = 0
    lock = threading.Lock()

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event.startswith(("os.", "open", "shutil.")) and arguments and str(folder) in str(arguments[0]):
            with lock:
                seen += 1
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)

    saver = Saver(Checkpoints(folder, keep=2))
    for step in range(1, 1000):
        if step == 3 and run.world.rank == victim:
            sys.addaudithook(count)
        mine = held(run.world.rank, run.world.size, cut=True, add=step)
        assert not saver.save(run.world, mine, moment(step), background=True)


@pytest.mark.parametrize(("victim", "number"), [(0, 5), (0, 23), (0, 61), (1, 1), (1, 6)])
def test_death_in_the_middle(tmp_path: Path, victim: int, number: int) -> None:
    with pytest.raises(WorkerFailedError, match=r"SIGKILL|killed"):
        paceline.launch(
            save_until_killed, tmp_path, victim, number, workers=2, threads=1, device="cpu", elastic=False
        )
    committed = [path.name for path in Checkpoints(tmp_path).committed()]
    newest = Checkpoints(tmp_path).newest(refuse)
    assert newest is not None
    assert newest.step >= 1
    for name in committed:
        one = load(tmp_path / name)
        state = assemble(whole(one.step), REST)
        assert same({key: one.state[key] for key in state}, state)
    Checkpoints(tmp_path, keep=2).save(newest.step + 1, run_state(1))
    assert [path.name for path in sorted(tmp_path.iterdir())] == sorted(
        [newest.path.name, f"step-{newest.step + 1}"]
    )
