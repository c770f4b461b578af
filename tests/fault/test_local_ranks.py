"""A worker keeps its place on its machine, and so its GPU; its replacement gets the one that it set free."""

import os
import signal

import torch

import paceline

STEPS = 60


def main(run, folder):
    model, _ = run.prepare(torch.nn.Linear(2, 1), lambda made: torch.optim.SGD(made.parameters(), lr=0.001))
    seen = set()
    for step in run.steps(list(torch.ones(3 * STEPS, 2)), batch_size=3, steps=STEPS):
        if step.number == 5 and run.world.local_rank == 1 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        for batch in step:
            step.backward(model(batch).squeeze(-1))
        step.apply()
        seen.add(run.world.local_rank)
    return os.getpid(), seen


def test_a_place_is_free_before_another_gets_it(tmp_path):
    results = paceline.launch(
        main, tmp_path, workers=3, shards=3, threads=1, device="cpu", out=tmp_path / "run"
    )
    assert (tmp_path / "killed").exists()
    places = [seen for _, seen in results]
    assert all(len(seen) == 1 for seen in places)  # nobody has ever moved
    assert len(set.union(*places)) == len(places)  # and no two have the same
    assert set.union(*places) <= {0, 1, 2}
