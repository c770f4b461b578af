"""What stands in for the model when a task's loss is called: no worker of a pipeline has the whole one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from paceline.data import copied
from paceline.errors import InputError
from paceline.world import seeds

Function = Callable[[Any, Any], Any]
"""A task's loss or metrics."""


class StandIn:
    """Takes the place of the model in a loss; only its call is there."""

    __slots__ = ("_calls", "_compute", "_model", "training")

    def __init__(
        self,
        compute: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        training: bool,
        model: nn.Module | None = None,
    ) -> None:
        own = object.__setattr__
        own(self, "_model", model)
        own(self, "_compute", compute)
        own(self, "_calls", 0)
        own(self, "training", training)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the stage."""
        object.__setattr__(self, "_calls", self._calls + 1)
        if self._calls > 1:
            raise InputError(
                "the loss calls the model twice, or the metrics do, but under pp a micro-batch goes through the pipeline once. "
                "Call it once with both inputs together, or use another strategy."
            )
        return self._compute(args, kwargs)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InputError(
            f"under pp the loss sees only the model's output, not model.{name}: the weights lie on other workers. "
            "Compute it inside the model's forward, or use another strategy."
        )

    def __getitem__(self, place: Any) -> NoReturn:
        self.__getattr__(f"[{place!r}]".replace("'", ""))

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise InputError(
            f"the loss changes model.{name}, but under pp it sees only the model's output: the model's parts on other workers "
            "would not learn of it. Hand it to the model's forward as an argument, or use another strategy."
        )

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    def __setitem__(self, place: Any, value: Any) -> NoReturn:
        self.__setattr__(f"[{place!r}]".replace("'", ""), value)

    def __delitem__(self, place: Any) -> NoReturn:
        self.__setitem__(place, None)

    @property
    def called(self) -> bool:
        """Whether the model was called."""
        return self._calls > 0


def behind(model: Any) -> Any:
    """Return the model that a loss was given, for what is no tensor of it: its class, its configuration."""
    found = object.__getattribute__(model, "_model") if isinstance(model, StandIn) else None
    return model if found is None else found


class Reached(BaseException):
    """Ends a loss where its purpose is reached, with what it has come to. No `Exception`: the user's code must not catch it."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def call_of(function: Function, batch: Any, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which a loss calls the model; the batch stays as it is, for it is yet to be learned from."""

    def seen(args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        raise Reached((args, kwargs))

    with torch.no_grad(), seeds.preserved():
        try:
            function(StandIn(seen, training=True, model=model), copied(batch))
        except Reached as reached:
            args, kwargs = reached.value
            return args, kwargs
    raise uncalled()


def uncalled() -> InputError:
    """Return the error for a loss that has not called the model."""
    return InputError(
        "the loss returned without calling the model, so nothing would be learned. Call model(...)."
    )
