"""What is asked of transformers and peft, which need not be installed."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from paceline.errors import InputError
from paceline.strategies.pipeline.call import behind


def transformers() -> Any:
    """Return the library, or raise with what to install."""
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise InputError(
            "paceline.hf needs transformers, which is not installed. pip install 'paceline[hf]' brings it."
        ) from None


def bare(model: nn.Module) -> Any:
    """Return the model that adapters of peft's lie around; any other is returned as it is. Under pp its values are elsewhere."""
    model = behind(model)
    inner = getattr(model, "get_base_model", None)
    return model if inner is None else inner()


def class_names(model: nn.Module) -> list[str]:
    """Return the names of a model's class and of those it is made from: fsdp and users make subclasses."""
    return [kind.__name__ for kind in type(bare(model)).__mro__]
