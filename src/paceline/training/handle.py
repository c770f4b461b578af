"""The model and the optimizer that a loop of the user's own holds: they stay the live ones when a group forms anew.

Where the state is cut up, the next group makes model and optimizer anew. The objects that the loop holds then become
those: they take over class and contents, module by module, so that what the loop calls is what is trained.
"""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from paceline.strategies.base import OpenReplica
from paceline.strategies.precision import Precision
from paceline.training.autocast import autocast_forward


class Handle:
    """What `run.prepare` gave to the loop."""

    def __init__(self, replica: OpenReplica, precision: Precision) -> None:
        self.model: nn.Module = replica.model
        self.optimizer: Optimizer = replica.optimizer
        self._precision = precision
        self._switch()

    def adopt(self, replica: OpenReplica) -> None:
        """Have the loop's objects be those of another replica, and the replica work with them."""
        if replica.model is not self.model:
            made, held = dict(replica.model.named_modules()), dict(self.model.named_modules())
            for name, module in held.items():
                if name in made:
                    _become(module, made[name])
            for name, module in held.items():
                for child in module._modules:  # noqa: SLF001  (names alone do not replace)
                    path = f"{name}.{child}".lstrip(".")
                    module._modules[child] = held.get(path, module._modules[child])  # noqa: SLF001
            replica.model = self.model
        if replica.optimizer is not self.optimizer:
            _become(self.optimizer, replica.optimizer)
            replica.optimizer = self.optimizer
        self._switch()

    def _switch(self) -> None:
        if self._precision.name != "fp32":
            autocast_forward(self.model, self._precision)


def _become(one: object, other: object) -> None:
    """Have an object be another one from now on, its contents included."""
    one.__class__ = other.__class__
    object.__setattr__(one, "__dict__", vars(other))
