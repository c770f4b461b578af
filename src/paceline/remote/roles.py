"""What the workers of a role do: the function each of them runs, and whether the others can go on without one. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import InputError


@dataclass(frozen=True)
class Role:
    """A group of workers that run `function(session, *args, **kwargs)` each; without a function they only serve calls."""

    function: Callable[..., Any] | str | None = None
    """The function, or where workers find it: `package.module:name`."""
    workers: int = 1
    required: bool = True
    """Whether the loss of one of them ends the launch; else the others are told, and go on."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.function is not None and not isinstance(self.function, str) and not callable(self.function):
            raise InputError(
                f"a role runs a function, not {self.function!r}. Give one, or none for workers that only serve."
            )
        if not isinstance(self.workers, int):
            raise InputError(f"a role has a number of workers, not {self.workers!r}. Give 1 or more.")
        if self.function is None and (self.args or self.kwargs):
            raise InputError(
                "a role without a function takes no arguments. Give the function that takes them."
            )
