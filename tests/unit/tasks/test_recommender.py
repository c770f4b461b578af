import torch

from paceline.strategies import sparse
from paceline.tasks.recommender import Recommender
from tests.unit.tasks.training_loop import train


def measured(task, model):
    with torch.no_grad():
        found = task.metrics(model, task.eval_data()[:])
    return {name: float(one.total) / one.weight for name, one in found.items()}


def test_the_clicks_are_the_same_every_time_and_unlike_the_evaluation_set():
    task = Recommender()
    first, held_out = task.train_data(), task.eval_data()
    assert len(first) == 131_072
    assert torch.equal(first.tensors[2], Recommender().train_data().tensors[2])
    assert not torch.equal(first.tensors[0][: len(held_out)], held_out.tensors[0])
    assert int(first.tensors[0].max()) == 999
    assert int(first.tensors[1].max()) == 499


def test_the_generator_knows_what_nobody_can_beat():
    _, _, clicked, chance = Recommender().train_data().tensors
    right = ((chance > 0.5) == (clicked > 0.5)).float().mean()
    best = torch.maximum(chance, 1 - chance).mean()
    assert abs(float(right - best)) < 0.005
    assert 0.8 < float(best) < 0.85


def test_it_learns_most_of_what_can_be_known():
    task = Recommender(users=60, items=40, clicks=16_384)
    torch.sparse.check_sparse_tensor_invariants.disable()
    model, losses = train(task, steps=96)
    assert len(sparse.sparse_parameters(model)) == 2
    found = measured(task, model)
    assert abs(losses[0] - 0.69) < 0.2
    assert 0.5 < found["best_accuracy"] - 0.06 < found["accuracy"] < found["best_accuracy"] + 0.01
    assert found["best_loss"] < found["loss"]
