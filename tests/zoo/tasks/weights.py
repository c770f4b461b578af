"""What parameters can be: tied, frozen, unused, in groups, of odd shapes and types, made anew in each pass."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from paceline import Loss
from tests.zoo.exhibits import NO_LINEAR, NO_ROW, ONLY_INSIDE, ONLY_OUTPUT, WRITTEN, exhibit
from tests.zoo.tasks.base import CLASSES, FEATURES, WORDS, Small, Words


@exhibit("plain", "a small classifier with dropout", meshes=True)
class Plain(Small):
    """Nothing special."""


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(WORDS, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.relu(self.middle(self.embedding(words))))
        return scores


@exhibit("tied", "tied weights (embedding and head)", NO_ROW)
class Tied(Words):
    """One weight in two places."""

    def model(self) -> nn.Module:
        return _Tied()


class _Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16))
        self.head = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, features: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.body(features)
        scores: Tensor = self.head(features)
        return scores


@exhibit(
    "backbone",
    "a backbone called under `torch.no_grad()`, its parameters in the optimizer",
    {"pp": "a stage begins inside"},
)
class Backbone(Small):
    """A stage of pp begins inside of the no_grad()."""

    find_unused_parameters = True

    def model(self) -> nn.Module:
        return _Backbone()


@exhibit("frozen", "a frozen part", meshes=True)
class Frozen(Small):
    """The first layer never trains, and the optimizer is not told."""

    def model(self) -> nn.Module:
        made = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)
        )
        made[0].requires_grad_(False)
        return made


@exhibit("groups", "several parameter groups with their own rates and decay", meshes=True)
class Groups(Small):
    """Biases without weight decay, and the head faster."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
        return torch.optim.AdamW(
            [
                {"params": [model[0].weight], "lr": 0.01},
                {"params": [model[3].weight], "lr": 0.03, "betas": (0.8, 0.9)},
                {"params": biases, "weight_decay": 0.0},
            ],
            lr=0.02,
            weight_decay=0.1,
        )


@exhibit("half-optimized", "an optimizer that has only some of the parameters")
class HalfOptimized(Small):
    """The first layer gets gradients that nobody asked for."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model[3].parameters(), lr=0.02)


class _Branches(nn.Module):
    """A spare head that is never used, and one that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self.spare, self.rare = nn.Linear(16, CLASSES), nn.Linear(16, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        made = torch.tanh(self.body(features))
        scores: Tensor = self.head(made)
        return scores + self.rare(made) if features[0, 0] > 0.8 else scores


@exhibit("unused", "parameters unused in some steps, or in all (`find_unused_parameters`)", NO_ROW)
class Unused(Small):
    """Weight decay must leave alone what has no gradient."""

    find_unused_parameters = True

    def model(self) -> nn.Module:
        return _Branches()


@exhibit(
    "unused-unsaid",
    "unused parameters without `find_unused_parameters`",
    {"*": "no gradient for", "single": None, "dp": None, "tp": None, "ps": None, "local-sgd": None, **NO_ROW},
)
class UnusedUnsaid(Unused):
    """What nobody has said may be unused."""

    find_unused_parameters = False


class _Scaled(nn.Module):
    """A number as a parameter, three of them, and layers whose sizes nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 7), nn.Linear(7, CLASSES, bias=False)
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(1))
        self.odd = nn.Parameter(torch.ones(CLASSES, 1))

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.second(torch.tanh(self.first(features)) * self.scale + self.shift)
        return scores * self.odd.squeeze(1)


@exhibit(
    "odd-shapes",
    "0-dimensional and odd-sized parameters",
    {**NO_ROW, "fsdp": "which fsdp cannot cut into rows"},
)
class OddShapes(Small):
    """Nothing that a number of workers divides."""

    def model(self) -> nn.Module:
        return _Scaled()


@exhibit("double", "float64 parameters and data")
class Double(Small):
    """All in double precision."""

    def model(self) -> nn.Module:
        return super().model().double()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        features, labels = batch
        return super().loss(model, (features.double(), labels))


_TOGETHER = {**NO_ROW, "fsdp": "but fsdp gathers them together"}


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES).double()
        self.norm = nn.LayerNorm(16).bfloat16()

    def forward(self, features: Tensor) -> Tensor:
        made = self.norm(torch.tanh(self.first(features)).bfloat16())
        scores: Tensor = self.second(made.double())
        return scores.float()


@exhibit(
    "mixed-types",
    "parameters of three types (float32, float64, bfloat16)",
    _TOGETHER,
)
class MixedTypes(Small):
    """Each layer in another precision."""

    def model(self) -> nn.Module:
        return _Mixed()


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(FEATURES // 2 + 1, 5, dtype=torch.complex64) * 0.5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.head((torch.fft.rfft(features) @ self.turn).abs())
        return scores


@exhibit("complex", "complex parameters", {**_TOGETHER, **NO_LINEAR})
class Complex(Small):
    """A filter in the frequency domain."""

    def model(self) -> nn.Module:
        return _Complex()


@exhibit("direct", "a loss that uses parameters of the model directly", {**ONLY_OUTPUT, **ONLY_INSIDE})
class Direct(Small):
    """An L1 penalty on a weight, beside the loss."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        features, labels = batch
        penalty = 0.01 * model[0].weight.abs().sum()
        return Loss.mean(F.cross_entropy(model(features), labels, reduction="none") + penalty)


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh()), nn.Linear(16, CLASSES)

    def encode(self, features: Tensor) -> Tensor:
        made: Tensor = self.encoder(features)
        return made

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encode(features))
        return scores


@exhibit("methods", "a loss that calls other methods of the model", ONLY_OUTPUT)
class Methods(Small):
    """`model.encode` and `model.head`, and never `model` itself."""

    def model(self) -> nn.Module:
        return _Encoder()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        features, labels = batch
        made = model.encode(features)
        return Loss.mean(F.cross_entropy(model.head(made), labels, reduction="none") + made.square().mean(1))


@exhibit(
    "outside",
    "a parameter that the optimizer has and the model has not",
    {"*": "the optimizer holds a parameter of shape () that the model has not"},
    plain=False,
)
class Outside(Small):
    """A learned temperature that the task keeps."""

    def __init__(self) -> None:
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW([*model.parameters(), self.temperature], lr=0.01)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        features, labels = batch
        return Loss.mean(F.cross_entropy(model(features) / self.temperature, labels, reduction="none"))


_BY_STRIDES = {**NO_ROW, **NO_LINEAR, "fsdp": "does not lie row by row in memory"}


class _Picture(nn.Module):
    """A convolution in channels_last, a weight that is another's transpose, and one that has gaps in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, (2, 2)).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(16, 7).t() * 0.3)
        self.gaps = nn.Parameter(torch.randn(14, 6)[::2, ::2] * 0.3)

    def forward(self, features: Tensor) -> Tensor:
        made = self.conv(torch.cat([features, features.square()], 1).view(-1, 2, 2, 3))
        return torch.tanh(torch.tanh(made).flatten(1) @ self.turned.t()) @ self.gaps


@exhibit(
    "strides",
    "parameters that are not contiguous (`channels_last`, a transposed weight)",
    _BY_STRIDES,
)
class Strides(Small):
    """Clipped, because a norm adds in the order of memory."""

    max_grad_norm = 0.3

    def model(self) -> nn.Module:
        return _Picture()


@exhibit("strides-terms", "the same beside an auxiliary term", _BY_STRIDES)
class StridesTerms(Strides):
    """Some gradients come from the term alone."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        features, labels = batch
        main = F.cross_entropy(model(features), labels, reduction="none")
        sizes = model(features.flip(1)).square().sum()
        return Loss(main.sum(), len(main), {"size": Loss(0.1 * sizes, len(main))})


class _Teacher(nn.Module):
    """A frozen copy that follows the student, as MoCo and BYOL are published."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        if self.training:
            for mine, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.data = 0.9 * mine.data + 0.1 * other.data
        scores: Tensor = self.student(features) + 0.3 * self.teacher(features)
        return scores


@exhibit(
    "mean-teacher",
    "a mean teacher that the forward pass moves (`t.data = ...`)",
    {
        **WRITTEN,
        "pp": "of the pipeline share student",
        "fsdp": "was given another tensor",
    },
)
class MeanTeacher(Small):
    """How often it moves depends on the number of passes."""

    def model(self) -> nn.Module:
        return _Teacher()


class _Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"passes": 0}

    def set_extra_state(self, state: Any) -> None:
        pass


@exhibit("extra-state", "`get_extra_state`", {"*": "not a tensor"}, sparse=True, plain=False)
class ExtraState(Small):
    """What a state_dict holds beside tensors."""

    def model(self) -> nn.Module:
        return nn.Sequential(_Extra(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


@exhibit("lazy", "lazy modules that were never called", {"*": "has no size yet"}, sparse=True, plain=False)
class Lazy(Small):
    """`nn.LazyLinear`."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.Linear(16, CLASSES))
