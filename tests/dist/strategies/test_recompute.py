"""--activation-checkpointing: blocks computed again; names, numbers and buffers are those of a run that keeps them."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.checkpoint import weights_sha256
from paceline.errors import InputError
from paceline.strategies.memory.recompute import Recomputed, recompute_blocks
from paceline.strategies.structure import Structure
from paceline.strategies.tuning import Tuning
from paceline.tasks.transformer import Transformer

WIDTH, LAYERS, SAMPLES = 8, 4, 26


class Block(nn.Module):
    """Attention and a feed-forward layer, each with dropout, and a normalisation that keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, stream: Tensor, *, scale: float = 1.0) -> Tensor:
        """Map (batch, length, width) to the same."""
        self.seen += stream.shape[0]
        query, key, value = F.dropout(self.inside(stream), 0.3, self.training).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.2 if self.training else 0.0)
        normal = self.norm(self.outside(mixed).transpose(1, 2)).transpose(1, 2)
        return stream + scale * F.dropout(F.gelu(normal), 0.3, self.training)


class Stack(nn.Module):
    """Blocks in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, stream: Tensor) -> Tensor:
        """Score the mean of the last block's positions."""
        for block in self.blocks:
            stream = block(stream, scale=0.5)
        scores: Tensor = self.head(stream.mean(1))
        return scores


def data() -> TensorDataset:
    drawn = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 5, WIDTH, generator=drawn), torch.randint(2, (SAMPLES,), generator=drawn)
    )


def loss(model: nn.Module, batch: list[Tensor]) -> paceline.Loss:
    return paceline.Loss.mean(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))


def train(run: paceline.Run, tunings: list[dict[str, Any]], precision: str) -> list[dict[str, Any]]:
    """Train with each tuning; gives the bits of the state, and how often blocks were computed."""
    made = []
    for tuning in tunings:
        own = paceline.Run(
            run.world, replace(run._engine.state.options, tuning=Tuning(**tuning), precision=precision)
        )
        replica = own._engine.preparation.prepare_replica(
            Stack, lambda model: torch.optim.AdamW(model.parameters(), lr=0.01), buffers={"*.seen": "sum"}
        )
        counts = [0] * LAYERS

        def count(place: int, counts: list[int], *_: Any) -> None:
            counts[place] += 1

        for place, block in enumerate(replica.model.blocks):  # type: ignore[union-attr,arg-type]
            block.inside.register_forward_hook(partial(count, place, counts))
        for step in own.steps(data(), batch_size=9, steps=5):
            step.compute(loss)
        state = replica.state()["model"]
        made.append({"weights": weights_sha256(state), "names": list(state), "counts": counts})
    return made


TUNINGS: list[dict[str, Any]] = [
    {},
    {"activation_checkpointing": "blocks"},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "blocks", "activation_checkpointing_every": 3},
]


@pytest.mark.parametrize(("strategy", "precision"), [("dp", "fp32"), ("ddp", "bf16")])
def test_the_same_bits_with_dropout_and_buffers(strategy: str, precision: str) -> None:
    options = {"strategy": strategy, "workers": 2, "shards": 3, "threads": 1, "device": "cpu"}
    kept, again, chosen, some = paceline.launch(train, TUNINGS, precision, **options)[0]
    for found in (again, chosen, some):
        assert found["names"] == kept["names"]
        assert found["weights"] == kept["weights"]
    if strategy == "ddp":  # elsewhere copies compute
        assert again["counts"] == chosen["counts"] == [2 * count for count in kept["counts"]]
        assert some["counts"] == [kept["counts"][0] * (2 if place % 3 == 0 else 1) for place in range(LAYERS)]


def held_bytes(kind: str) -> int:
    """Count what the backward pass keeps of a forward pass."""
    torch.manual_seed(0)
    model = Stack()
    recompute_blocks(model, Structure(), Tuning(activation_checkpointing=kind))
    kept: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        made = model(torch.randn(64, 5, WIDTH)).sum()
    made.backward()
    return sum(kept.values())


def test_what_is_kept() -> None:
    assert held_bytes("blocks") < held_bytes("none") / 5


def test_a_block_is_wrapped_once_and_follows_a_copy() -> None:
    model, tuning = Stack(), Tuning(activation_checkpointing="blocks")
    names = [name for name, _ in model.named_parameters()]
    recompute_blocks(model, Structure(), tuning)
    first = [block.forward for block in model.blocks]
    recompute_blocks(model, Structure(), tuning)
    assert [block.forward for block in model.blocks] == first
    assert all(isinstance(block.forward, Recomputed) for block in model.blocks)
    assert [name for name, _ in model.named_parameters()] == names
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(copied(torch.randn(3, 5, WIDTH)), torch.zeros(3, 2)), (
        "the copy computes with its own weights"
    )


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)) for _ in range(2))


def test_bad_input() -> None:
    with pytest.raises(
        InputError,
        match=r"--activation-checkpointing blocks works on the repeated blocks of a model, and Linear has none",
    ):
        recompute_blocks(nn.Linear(3, 3), Structure(), Tuning(activation_checkpointing="blocks"))
    with pytest.raises(InputError, match=r"blocks\.0\.1 \(ReLU\) writes over its input"):
        recompute_blocks(Writing(), Structure(), Tuning(activation_checkpointing="selective"))
    with pytest.raises(InputError, match="no module of the model is called so"):
        recompute_blocks(Stack(), Structure(blocks=["layers.*"]), Tuning(activation_checkpointing="blocks"))


def auxiliary(run: paceline.Run) -> str:
    """Take two steps with an auxiliary term, whose gradient is a pass of its own."""

    def both(model: nn.Module, batch: list[Tensor]) -> paceline.Loss:
        scores = model(batch[0])
        losses = F.cross_entropy(scores, batch[1], reduction="none")
        return paceline.Loss.mean(losses, size=paceline.Loss(0.1 * scores.square().sum(), scores.numel()))

    replica = run._engine.preparation.prepare_replica(
        Stack, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), buffers={"*.seen": "sum"}
    )
    for step in run.steps(data(), batch_size=9, steps=2):
        step.compute(both)
    return weights_sha256(replica.state()["model"])


def test_auxiliary_terms() -> None:
    kept, again = (
        paceline.launch(
            auxiliary, shards=2, threads=1, device="cpu", tuning={"activation_checkpointing": kind}
        )
        for kind in ("none", "blocks")
    )
    assert again == kept
    for strategy, workers in (("single", 1), ("fsdp", 2)):
        with pytest.raises(InputError, match="auxiliary terms need a pass each"):
            paceline.launch(
                auxiliary,
                strategy=strategy,
                workers=workers,
                shards=2,
                threads=1,
                device="cpu",
                tuning={"activation_checkpointing": "selective"},
            )


@pytest.mark.parametrize("kind", ["blocks", "selective"])
def test_a_compiled_model(kind: str) -> None:
    torch.manual_seed(0)
    model = Transformer(tokens=7, length=5, width=WIDTH, layers=2, heads=2)
    values = torch.randint(7, (3, 5))
    model(values).sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    recompute_blocks(model, Structure(), Tuning(activation_checkpointing=kind))
    model.compile(backend="aot_eager", fullgraph=True)
    model(values).sum().backward()
    compiled = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for left, right in zip(plain, compiled, strict=True):
        assert torch.allclose(left, right, rtol=1e-4, atol=1e-5)
