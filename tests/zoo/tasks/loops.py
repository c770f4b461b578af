"""Loops of one's own: what a Task cannot say."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import paceline
from tests.zoo.exhibits import NO_SPARSE, exhibit
from tests.zoo.tasks.base import CLASSES, FEATURES, HELD_OUT, SAMPLES, Small, measured
from tests.zoo.working import Loop


class Own(Loop):
    """A classifier in a loop."""

    def made(self) -> tuple[nn.Module, Optimizer]:
        model = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)
        )
        self.before(model)
        return model, self.optimizer(model)

    def before(self, model: nn.Module) -> None:
        """Do something to the model before it is prepared."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def at(self, number: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Do something before a step."""

    def train(self, run: paceline.Run, steps: int) -> dict[str, float]:
        model, optimizer = run.prepare(*self.made())
        small = Small()
        for step in run.steps(small.data(SAMPLES, 1), batch_size=8, steps=steps):
            self.at(step.number, model, optimizer)
            for features, labels in step:
                losses = F.cross_entropy(model(features), labels, reduction="none")
                step.backward(losses.sum(), len(losses))
            step.apply(1.0)
        return run.evaluate(small.data(HELD_OUT, 2), measured, batch_size=8)


NO_OWN = {"pp": "step.compute"}
CHANGED = {
    "*": "after the model was prepared",
    "single": None,
    "dp": None,
    "ddp": None,
    **NO_OWN,
    **NO_SPARSE,
}


@exhibit(
    "own-loop",
    "a loop of one's own (`run.prepare`, `run.steps`, `step.backward`, `step.apply`)",
    NO_OWN,
    plain=False,
)
class OwnLoop(Own):
    """Nothing special."""


@exhibit("unfrozen", "a part that is frozen at first and begins to train later", CHANGED, plain=False)
class Unfrozen(Own):
    """The first layer joins at step 3; the optimizer has had it all along."""

    def before(self, model: nn.Module) -> None:
        model[0].requires_grad_(False)

    def at(self, number: int, model: nn.Module, optimizer: Optimizer) -> None:
        if number >= 3:
            model[0].requires_grad_(True)


@exhibit(
    "added-group", "`optimizer.add_param_group` in the middle of a run", CHANGED, plain=False, resumes=False
)
class AddedGroup(Own):
    """The first layer is given to the optimizer at step 3."""

    def before(self, model: nn.Module) -> None:
        model[0].requires_grad_(False)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW([*model[2].parameters(), *model[4].parameters()], lr=0.01)

    def at(self, number: int, model: nn.Module, optimizer: Optimizer) -> None:
        if number == 3:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})


@exhibit("frozen-later", "a part that stops training later", CHANGED, plain=False)
class FrozenLater(Own):
    """The first layer leaves at step 3."""

    def at(self, number: int, model: nn.Module, optimizer: Optimizer) -> None:
        if number >= 3:
            model[0].requires_grad_(False)
