"""What is in the zoo: a task per exhibit, with what it stands for and who is allowed to refuse it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Made = TypeVar("Made", bound=type)

ALL = "*"
"""Stands for every strategy in `refused_by`."""
NO_SPARSE = {"hybrid": "keeps embeddings with sparse=True on servers, and the model has none"}
NO_ROW = {"pp": "finds no row of layers"}
BY_ROWS = {"fsdp": "may look across rows", "tp": "may look across rows"}
WHOLE_GRADIENTS = dict.fromkeys(("fsdp", "tp", "pp", "ps", "local-sgd"), "is an embedding with sparse=True")
NO_LINEAR = {"tp": "finds no layer to split"}
NOT_FOLLOWED = {"pp": "cannot follow the forward pass"}
ONLY_INSIDE = {"fsdp": "outside of that block's forward pass", "tp": "outside of its layer's forward pass"}
ONLY_OUTPUT = {"pp": "sees only the model's output"}
WRITTEN = dict.fromkeys(("ddp", "zero", "fsdp", "tp", "ps", "local-sgd"), "wrote to the weights")
EXHIBITS: dict[str, Exhibit] = {}


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """One task of the zoo, and what is declared of it."""

    name: str
    about: str
    """What ordinary code it stands for; one phrase, for the page of what works with what."""
    made: type
    refused_by: Mapping[str, str | None] = field(default_factory=dict)
    """The strategies that refuse it, each with a part of the line that says so; `ALL` is every strategy but those with None."""
    meshes: bool = False
    """Whether it is also tried on meshes of two strategies."""
    resumes: bool = True
    """Whether it can be saved and resumed."""
    plain: bool = True
    """Whether a textbook loop can be written for it that a run of one shard must agree with."""

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def reference(self) -> str:
        """Return the task as the command line names it."""
        return f"{self.made.__module__}:{self.made.__qualname__}"

    def refusal(self, strategy: str) -> str | None:
        """Return a part of the line by which a strategy refuses this task, or None where it must train it."""
        return self.refused_by.get(strategy, self.refused_by.get(ALL))


def exhibit(
    name: str,
    about: str,
    refused_by: Mapping[str, str | None] | None = None,
    *,
    sparse: bool = False,
    **declared: Any,
) -> Callable[[Made], Made]:
    """Put a task (or a loop) into the zoo; `sparse` where it has what `hybrid` is for."""
    who = {**({} if sparse else NO_SPARSE), **(refused_by or {})}

    def enter(made: Made) -> Made:
        if name in EXHIBITS:
            raise ValueError(f"two exhibits are called {name}")
        EXHIBITS[name] = Exhibit(name=name, about=about, made=made, refused_by=who, **declared)
        return made

    return enter


def load() -> dict[str, Exhibit]:
    """Import every module of tasks and return all exhibits, sorted by name."""
    package = importlib.import_module("tests.zoo.tasks")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(sorted(EXHIBITS.items()))


def chosen(names: Iterable[str]) -> list[Exhibit]:
    """Return the exhibits of these names, all where none is named."""
    known = load()
    wanted = list(names) or list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"no task {unknown[0]!r} in the zoo. Known: {', '.join(known)}.")
    return [known[name] for name in wanted]
