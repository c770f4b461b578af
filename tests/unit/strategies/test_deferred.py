"""A construction that is carried out later gives the same bits, and never holds the whole model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.strategies.memory.meta_init import record_init
from paceline.tasks.transformer import Transformer


def gpt() -> Transformer:
    return Transformer(tokens=60, length=16, width=32, layers=6, heads=4)


def initialised() -> nn.Module:
    """Everything is written once by the layers and once more at the end."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.02)

    return gpt().apply(init)


def tied() -> nn.Module:
    model = gpt()
    model.scores.weight = model.token.weight
    return model


class Mixed(nn.Module):
    """Layers and buffers that are made in other ways than by one random write."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.padded = nn.Embedding(10, 4, padding_idx=2)
        self.recurrent = nn.LSTM(4, 5)
        orthogonal = torch.empty(6, 6)
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(orthogonal))
        self.scaled = nn.Parameter(torch.from_numpy(np.ones((3, 2), dtype=np.float32)) * 2)
        self.known = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)))
        self.register_buffer("positions", torch.arange(8), persistent=False)
        self.copied = nn.Linear(4, 4)
        self.copied.weight.data.copy_(self.orthogonal.data[:4, :4])
        self.copied.weight.data[0].fill_(3.0)


def clones() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    return nn.TransformerEncoder(layer, 3)


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(7)
        return make()

    return made


@pytest.mark.parametrize("make", [gpt, initialised, tied, Mixed, clones])
def test_the_same_bits_and_the_same_generator(make: Callable[[], nn.Module]) -> None:
    plain = seeded(make)()
    state = torch.get_rng_state()
    made, reason = record_init(seeded(make))
    assert made is not None, reason
    assert all(tensor.is_meta for tensor in (*made.model.parameters(), *made.model.buffers()))
    torch.manual_seed(99)
    values: dict[str, Tensor] = {}
    made.fill(lambda name, whole: values.__setitem__(name, whole.clone()))
    assert torch.equal(torch.get_rng_state(), state)
    wanted = dict([*plain.named_parameters(), *plain.named_buffers()])
    assert values.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(values[name], value), name
        assert values[name].stride() == value.stride()
    assert [(name, value.requires_grad) for name, value in made.model.named_parameters()] == [
        (name, value.requires_grad) for name, value in plain.named_parameters()
    ]
    assert list(made.model.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("make", [gpt, initialised, tied])
def test_no_more_than_a_few_tensors_are_held_at_once(make: Callable[[], nn.Module]) -> None:
    made, _ = record_init(seeded(make))
    assert made is not None
    sizes = [value.numel() * value.element_size() for value in made.model.parameters()]
    held = made.fill(lambda name, whole: None)
    assert held <= 2 * max(sizes) < sum(sizes) / 5


def looks() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight.data.mul_(model.weight.sum().item())
    return model


def seeds_between() -> nn.Module:
    first = nn.Linear(3, 3)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(first, nn.Linear(3, 3))


def keeps() -> nn.Module:
    model = nn.Linear(3, 3)
    model.extra = [torch.ones(3)]
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (looks, "looks at values"),
        (seeds_between, "seeds a random generator between draws"),
        (keeps, "extra is a tensor, but neither a parameter nor a buffer"),
    ],
)
def test_what_cannot_be_put_off_says_why(make: Callable[[], nn.Module], reason: str) -> None:
    made, why = record_init(seeded(make))
    assert made is None
    assert reason in why
