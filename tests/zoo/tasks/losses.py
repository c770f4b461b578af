"""Losses that are more than one forward pass and one mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import Loss, Mean
from tests.zoo.exhibits import NO_ROW, NOT_FOLLOWED, exhibit
from tests.zoo.tasks.base import CLASSES, FEATURES, Small


class _Experts(nn.Module):
    """Each sample goes to one of four experts; whom none is sent to has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, 4)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(4))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(features).softmax(-1)
        chosen = shares.argmax(-1)
        scores = features.new_zeros(len(features), CLASSES)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().squeeze(1)
            if len(mine):
                scores = scores.index_add(0, mine, expert(features[mine]) * shares[mine, number, None])
        return scores, shares


@exhibit(
    "experts",
    "a mixture of experts with a balance loss (an auxiliary term), some experts unused",
    NOT_FOLLOWED,
)
class Experts(Small):
    """The balance loss depends on the router alone."""

    find_unused_parameters = True

    def model(self) -> nn.Module:
        return _Experts()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        features, labels = batch
        scores, shares = model(features)
        balance = Loss(0.1 * shares.square().sum(), len(shares))
        return Loss.mean(F.cross_entropy(scores, labels, reduction="none"), balance=balance)


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh())
        self.first, self.second = nn.Linear(16, CLASSES), nn.Linear(16, 1)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        made = self.body(features)
        return self.first(made), self.second(made).squeeze(1)


@exhibit("auxiliary-only", "parameters that only an auxiliary term reaches")
class AuxiliaryOnly(Small):
    """A second head that has a loss of its own."""

    def model(self) -> nn.Module:
        return _TwoHeads()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        features, labels = batch
        scores, size = model(features)
        other = Loss(0.3 * (size - features.norm(dim=1)).square().sum(), len(size))
        return Loss.mean(F.cross_entropy(scores, labels, reduction="none"), other=other)


@exhibit(
    "several-passes",
    "several forward calls for one loss (consistency of two views)",
    {"pp": "the loss calls the model twice"},
)
class SeveralPasses(Small):
    """The same batch twice, with other dropout, and once without a gradient."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        features, labels = batch
        one, two = model(features), model(features + 0.1 * torch.randn_like(features))
        with torch.no_grad():
            anchor = model(features)
        apart = (one - two).square().sum(1) + (one - anchor).square().sum(1)
        return Loss.mean(F.cross_entropy(one, labels, reduction="none") + 0.1 * apart)


class _Depths(nn.Module):
    """How many layers a batch goes through depends on what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, 12), nn.Linear(12, CLASSES)
        self.again = nn.Linear(12, 12)

    def forward(self, features: Tensor) -> Tensor:
        made = torch.tanh(self.first(features))
        for _ in range(1 + int(features.sum().abs().item()) % 3):
            made = torch.tanh(self.again(made))
        scores: Tensor = self.head(made)
        return scores


@exhibit(
    "control-flow", "control flow that depends on the data; a layer used a varying number of times", NO_ROW
)
class ControlFlow(Small):
    """One to three times through the same layer."""

    def model(self) -> nn.Module:
        return _Depths()


@dataclass
class Output:
    """What models of a well-known library give."""

    loss: Tensor | None
    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None


class _WithOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, 16), nn.Linear(16, 16)])
        self.classifier = nn.Linear(16, CLASSES)

    def forward(self, input_values: Tensor, labels: Tensor | None = None, **_: Any) -> Output:
        hidden = [input_values]
        for layer in self.layers:
            hidden.append(torch.relu(layer(hidden[-1])))
        logits = self.classifier(hidden[-1])
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return Output(loss, logits, tuple(hidden))


@exhibit("model-output", "dict batches with strings, keyword arguments, an output object")
class ModelOutput(Small):
    """As code around pretrained models is written."""

    def model(self) -> nn.Module:
        return _WithOutput()

    def data(self, samples: int, seed: int) -> Any:
        features, labels = super().data(samples, seed).tensors
        return [
            {"input_values": one, "labels": label, "text": f"number {number}", "meta": {"length": number}}
            for number, (one, label) in enumerate(zip(features, labels, strict=True))
        ]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        made = model(input_values=batch["input_values"], labels=batch["labels"])
        assert all(text.startswith("number") for text in batch["text"])
        return Loss(made.loss * len(made.logits), len(made.logits))

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        logits = model(input_values=batch["input_values"]).logits
        loss = F.cross_entropy(logits, batch["labels"], reduction="sum")
        right = (logits.argmax(-1) == batch["labels"]).sum()
        return {"loss": Mean(loss, len(logits)), "accuracy": Mean(right, len(logits))}


@exhibit("clipped", "gradient clipping", meshes=True)
class Clipped(Small):
    """A norm that is too large in every step."""

    max_grad_norm = 0.1


@exhibit("micro-batches", "micro-batches that do not divide a shard", meshes=True)
class MicroBatches(Small):
    """One to three samples at a time."""

    micro_batch = 3
    max_grad_norm = 0.5


@exhibit("bf16", "bf16 autocast", meshes=True)
class Bf16(Small):
    """Half precision in the products."""

    precision = "bf16"


@exhibit("annealed", "a weight of the loss that grows with the steps (`task.steps_done`), as of a KL term")
class Annealed(Small):
    """What grows is the same on every worker, in the evaluation and after a resume."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        features, labels = batch
        scores = model(features)
        growing = min(1.0, self.steps_done / 4)
        losses = F.cross_entropy(scores, labels, reduction="none")
        return Loss.mean(losses + growing * 0.1 * scores.square().mean(-1))


@exhibit(
    "gradient-penalty",
    "a gradient in the loss (`create_graph=True`: WGAN-GP, R1)",
    dict.fromkeys(("fsdp", "tp", "pp"), "the loss takes gradients and learns from them"),
    plain=False,
)
class GradientPenalty(Small):
    """A backward pass that another one goes through."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        features, labels = batch
        with torch.enable_grad():
            features = features.clone().requires_grad_()
            scores = model(features)
            losses = F.cross_entropy(scores, labels, reduction="none")
            (made,) = torch.autograd.grad(scores.square().sum(), features, create_graph=True)
        return Loss.mean(losses + 0.1 * made.square().sum(1))
