"""What workers tell each other lies in the launcher's store: it does not grow with the calls of a run."""

from __future__ import annotations

import torch
from torch import nn

import paceline

ROWS = [(torch.ones(3) * place, torch.ones(1)) for place in range(8)]


def train(run: paceline.Run) -> list[int]:
    """Evaluate, begin another call of `steps` and change what trains, each many times; gives how many keys there are."""
    model, _ = run.prepare(lambda: nn.Linear(3, 1), lambda made: torch.optim.SGD(made.parameters(), lr=0.01))
    counts = []
    for turn in range(6):
        model.bias.requires_grad_(bool(turn % 2))
        for step in run.steps(ROWS, batch_size=4, epochs=1):
            for features, targets in step:
                step.backward((model(features) - targets).square().flatten())
            step.apply()
            if turn % 3 == 0:
                break
        for _ in range(3):
            run.evaluate(
                ROWS, lambda made, batch: {"mean": paceline.Mean(made(batch[0]).sum(), len(batch[0]))}
            )
        run.world.comm.barrier()  # whoever is late has deleted its words by then
        assert run.world.store is not None
        counts.append(run.world.store.num_keys())
        run.world.comm.barrier()
    return counts


def test_the_number_of_keys_stays_the_same() -> None:
    for counts in paceline.launch(train, workers=2, strategy="ddp", threads=1, device="cpu"):
        assert len(set(counts[2:])) == 1, counts
