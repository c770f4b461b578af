"""A plain loop without paceline, to see that a task learns."""

import itertools

import torch
from torch.utils.data import DataLoader


def train(task, steps):
    """Train for some steps on one process; give the model and each step's mean loss."""
    threads = torch.get_num_threads()
    # Operations this small only lose time to a second thread, above all on a busy machine.
    torch.set_num_threads(1)
    try:
        return _train(task, steps)
    finally:
        torch.set_num_threads(threads)


def _train(task, steps):
    torch.manual_seed(task.seed)
    model = task.model()
    optimizer = task.optimizer(model)
    scheduler = task.scheduler(optimizer, steps)
    shuffled = DataLoader(task.train_data(), task.batch_size, shuffle=True, collate_fn=task.collate)
    losses = []
    for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(shuffled)), steps):
        loss = task.loss(model, batch)
        mean = loss.total / loss.weight
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(mean.item())
    return model.eval(), losses
