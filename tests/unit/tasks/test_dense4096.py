import torch

from paceline.tasks.dense4096 import NOISE, Dense4096
from tests.unit.tasks.training_loop import train


def test_the_arithmetic_of_the_name():
    task = Dense4096()
    data = task.train_data()
    steps, rest = divmod(len(data), task.batch_size)
    assert (steps, rest) == (32, 0)
    assert steps * (task.batch_size // 4) * 4 == len(data) == 4096
    assert task.epochs == 2
    assert data.tensors[0].shape == (4096, 20)
    assert data.tensors[1].shape == (4096, 1)


def test_the_data_is_the_same_every_time_and_unlike_the_evaluation_set():
    first, second = Dense4096().train_data(), Dense4096().train_data()
    assert all(torch.equal(one, other) for one, other in zip(first.tensors, second.tensors, strict=True))
    held_out = Dense4096().eval_data()
    assert not torch.equal(first.tensors[0][:512], held_out.tensors[0])


def test_one_run_learns_the_teacher_down_to_its_noise():
    task = Dense4096()
    model, losses = train(task, steps=64)
    loss = task.metrics(model, task.eval_data()[:])["loss"]
    assert losses[0] > 5
    assert float(loss.total.detach()) / loss.weight < 1.5 * NOISE**2


def test_the_loss_weighs_its_items():
    task = Dense4096()
    loss = task.loss(task.model(), task.train_data()[:7])
    assert loss.weight == 7
