"""Several models of one run as one: "generator.0.weight" is the name of a weight everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn

from paceline.errors import InputError


class Models(nn.ModuleDict):
    """The models of a run by name; each is called by itself."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        check_names(models)
        super().__init__(dict(models))

    def forward(self, *_: Any) -> NoReturn:
        """Refuse a call of all of them at once."""
        first = next(iter(self))
        raise InputError(
            f"this run has several models ({', '.join(self)}). Call one of them: models[{first!r}](x)."
        )


def called(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that a loop calls, by their path in the model: the model itself, or each one of several."""
    return dict(model.items()) if isinstance(model, Models) else {"": model}


def check_names(given: Mapping[str, object]) -> None:
    """Raise for names that no module can have."""
    if not given:
        raise InputError("run.prepare was given an empty dict. Name each model and each optimizer.")
    for name in given:
        if not isinstance(name, str) or not name.isidentifier() or hasattr(nn.ModuleDict, name):
            raise InputError(
                f"{name!r} cannot be the name of a model or an optimizer. Use a word of letters that torch.nn.Module does not "
                'use itself: "generator", "discriminator".'
            )
