"""The reference itself: one process with one shard is a plain torch loop, to the bit."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from paceline.data.permutation import EpochPermutation
from paceline.world import seeds
from tests.contract.jobs import STEPS, Job
from tests.contract.tasks import Classify
from tests.contract.training import train


def plain_loop(task: Classify, batch_size: int) -> dict[str, torch.Tensor]:
    """Train as a textbook does; only the order of samples and the seeds of dropout are paceline's."""
    with seeds.preserved():
        torch.manual_seed(seeds.derive(task.seed, "model"))
        model = task.model()
        optimizer = task.optimizer(model)
        features, labels = task.train_data().tensors
        order, per_epoch = EpochPermutation(task.samples, task.seed), -(-task.samples // batch_size)
        for step in range(STEPS):
            epoch, place = divmod(step, per_epoch)
            start = place * batch_size
            chosen = torch.from_numpy(order.indices(epoch, start, min(start + batch_size, task.samples)))
            torch.manual_seed(seeds.derive(task.seed, "shard", step, 0))
            loss = F.cross_entropy(model(features[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.state_dict()


def test_one_shard_is_a_plain_loop_to_the_bit() -> None:
    kinds = {kind: Job(settings={"optimizer": kind}, options={"shards": 1}) for kind in ("adamw", "momentum")}
    trained = train(kinds)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for kind in kinds:
            wanted = plain_loop(Classify(optimizer=kind), 8)
            assert all(torch.equal(wanted[name], trained[kind].weights[name]) for name in wanted), kind
    finally:
        torch.set_num_threads(threads)
