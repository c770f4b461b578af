"""The gradient of a step is that of the whole global batch, written out in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.data.permutation import EpochPermutation
from paceline.world import seeds
from tests.contract.conftest import Compared
from tests.contract.distance import Weights, assert_same, bound, distance
from tests.contract.jobs import JOBS
from tests.contract.tasks import LEARNING_RATE, LENGTH, PADDING, WORDS, Balanced, Classify, Tokens

EPSILON = torch.finfo(torch.float32).eps


def first_step(task: Classify | Tokens, batch_size: int) -> tuple[nn.Module, list[Tensor]]:
    """Make the model as it starts and the first global batch in one piece."""
    with seeds.preserved():
        seeds.seed_everything(seeds.derive(task.seed, "model"))
        model = task.model()
    data = task.train_data()
    samples = torch.from_numpy(EpochPermutation(len(data), task.seed).indices(0, 0, batch_size))
    return model, [tensor[samples] for tensor in data.tensors]


def after(model: nn.Module, gradients: list[Tensor], rate: float) -> Weights:
    """Take one step of plain SGD."""
    pairs = zip(model.named_parameters(), gradients, strict=True)
    return {name: (value - rate * gradient).detach() for (name, value), gradient in pairs}


def test_tokens_with_accumulation(compared: Compared) -> None:
    model, (words, targets) = first_step(Tokens(), 16)
    loss = F.cross_entropy(model(words).reshape(-1, WORDS), targets.reshape(-1), ignore_index=PADDING)
    wanted = after(model, list(torch.autograd.grad(loss, list(model.parameters()))), 1.0)
    # Here a mean of sums, there a sum of parts: as many additions as there are words; no gradient exceeds 1.
    limit = EPSILON * 16 * LENGTH
    for trained in (compared.one["first tokens"], compared.many["first tokens"]):
        assert distance(wanted, trained.weights) <= limit
        assert trained.result["loss"] == pytest.approx(loss.item(), rel=EPSILON * 16 * LENGTH)


def test_auxiliary_terms_have_weights_of_their_own(compared: Compared) -> None:
    model, (words, targets) = first_step(Balanced(), 16)
    scores = model(words)
    main = F.cross_entropy(scores.reshape(-1, WORDS), targets.reshape(-1), ignore_index=PADDING)
    rare_weight = float((words == 0).sum()) + 0.5 * len(words)
    loss = main + 0.1 * scores.square().mean() + 0.3 * scores.abs().sum() / WORDS / rare_weight
    wanted = after(model, list(torch.autograd.grad(loss, list(model.parameters()))), 1.0)
    # Three sums now; the term `rare` is divided by a weight some 6 times smaller than it has words.
    limit = 3 * 6 * EPSILON * 16 * LENGTH
    for trained in (compared.one["first auxiliary"], compared.many["first auxiliary"]):
        assert distance(wanted, trained.weights) <= limit
        assert trained.result["loss"] == pytest.approx(loss.item(), rel=EPSILON * 16 * LENGTH)


def test_clipping_by_the_norm_of_the_global_gradient(compared: Compared) -> None:
    task = Classify(dropout=0.0)
    model, (features, labels) = first_step(task, 8)
    gradients = torch.autograd.grad(F.cross_entropy(model(features), labels), list(model.parameters()))
    norm = torch.sqrt(sum(gradient.square().sum() for gradient in gradients))
    assert norm > 0.1, "the limit of 0.05 must bite"
    wanted = after(model, [gradient * (0.05 / norm) for gradient in gradients], LEARNING_RATE)
    # torch's guard against a norm of zero (1e-6 beside norms above 0.1) moves the factor by 1e-5 at most.
    limit = LEARNING_RATE * 0.05 * 1e-5 + 4 * EPSILON
    for trained in (compared.one["first clip"], compared.many["first clip"]):
        assert distance(wanted, trained.weights) <= limit
        moved = torch.sqrt(
            sum((trained.weights[name] - value).square().sum() for name, value in model.named_parameters())
        )
        assert moved.item() == pytest.approx(LEARNING_RATE * 0.05, rel=1e-3)


@pytest.mark.parametrize(
    ("job", "additions"),
    [
        ("tokens", 16 * LENGTH),
        ("max_grad_norm", 8),
        # The gradient of `rare` is a sum over a weight some 6 times smaller than it has words; 12 is ample.
        ("auxiliary", 12 * 16 * LENGTH),
        ("auxiliary short", 12 * 3 * LENGTH),
        ("many shards", 12 * 16 * LENGTH),
    ],
)
def test_the_same_at_the_end(compared: Compared, job: str, additions: int) -> None:
    limit = bound(additions, JOBS[job].steps, gain=LEARNING_RATE)
    assert_same(compared.case, compared.one[job].weights, compared.many[job].weights, limit)
    loss = compared.one[job].result["loss"]
    assert compared.many[job].result["loss"] == pytest.approx(loss, abs=4 * limit)
