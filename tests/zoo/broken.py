"""Tasks that are wrong on purpose, and so are not in the zoo: what a verdict must notice."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from paceline import Loss
from paceline.errors import InputError
from tests.zoo.exhibits import Exhibit
from tests.zoo.tasks.base import Small


class Astray(Small):
    """Its loss depends on the worker that computes it."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        made = super().loss(model, batch)
        return Loss(made.total * (1 + 1e-3 * (os.environ.get("RANK") == "1")), made.weight)


class Raising(Small):
    """It raises in the last step but one, on one worker of two."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        if os.environ.get("RANK") == "1":
            raise ZeroDivisionError("as it was told")
        return super().loss(model, batch)


class Refusing(Small):
    """It is refused for a reason that nobody has declared."""

    def model(self) -> nn.Module:
        raise InputError("no model today. Come again tomorrow.")


def broken(made: type) -> Exhibit:
    """Return an exhibit for one of them."""
    return Exhibit(name=made.__name__, about="", made=made)
