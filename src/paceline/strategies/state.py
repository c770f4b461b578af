"""The state of a replica by name, so that it moves between strategies and numbers of workers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import CheckpointError


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Give the optimizer's state keyed by parameter name instead of by position."""
    names = _names(model, optimizer)
    packed = optimizer.state_dict()
    return {
        "state": {names[number]: dict(entry) for number, entry in packed["state"].items()},
        "groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in packed["param_groups"]
        ],
    }


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load what `optimizer_state` gave."""
    names = _names(model, optimizer)
    numbers = {name: number for number, name in enumerate(names)}
    here = [list(group["params"]) for group in optimizer.state_dict()["param_groups"]]
    there = [group["params"] for group in saved["groups"]]
    if [sorted(names[number] for number in group) for group in here] != [sorted(group) for group in there]:
        moved = sorted({name for group in there for name in group} ^ numbers.keys())
        raise CheckpointError(
            f"the checkpoint's optimizer has parameter groups of {[len(group) for group in there]} parameters, "
            f"this one of {[len(group) for group in here]}, and they do not hold the same"
            f"{' (' + ', '.join(moved[:5]) + ')' if moved else ''}. Use the task that wrote the checkpoint."
        )
    optimizer.load_state_dict(
        {
            "state": {numbers[name]: dict(entry) for name, entry in saved["state"].items()},
            # torch matches parameters by their place, so the places are this optimizer's.
            "param_groups": [
                {**group, "params": places} for group, places in zip(saved["groups"], here, strict=True)
            ],
        }
    )


def _names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Give the name of each parameter in the order in which the optimizer numbers them."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [
        known.get(id(parameter), f"outside the model.{number}") for number, parameter in enumerate(parameters)
    ]


def plain(value: Any) -> Any:
    """Keep what a checkpoint can hold: numbers, strings, tensors, lists and dicts; functions are rebuilt, not saved."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if _is_plain(item)}
    if isinstance(value, (list, tuple)):
        return (
            type(value)(plain(item) for item in value)
            if type(value) in (list, tuple)
            else list(map(plain, value))
        )
    return value


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, Tensor, dict, list, tuple))
