"""Where a model has its parameters: what takes the place of one, or of the module that holds it, is trained by nobody.

A look compares the members of all modules with those of the look before (0.6 us for each module, 0.3 ms for 482); names and
objects, found anew from the root, are compared only where that has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from itertools import chain
from operator import is_
from typing import Any, NoReturn

from torch import nn

from paceline.compat.modules import buffers_of, children_of, names_in, parameters_of, values_in
from paceline.errors import InputError
from paceline.state.chunks import MODEL

Table = dict[str, Any]


class Members:
    """The modules and parameters in the modules of a model, and the names of its buffers, as they were found last."""

    def __init__(self, model: nn.Module, *, swapped: bool = False) -> None:
        """`swapped`: passes put other objects into the places of parameters, of which the names alone are compared."""
        self._model, self._swapped = model, swapped
        self._find()

    def _find(self) -> None:
        modules = list(self._model.modules())
        children, parameters = list(map(children_of, modules)), list(map(parameters_of, modules))
        self._tables: list[Table] = [*children, *parameters, *map(buffers_of, modules)]
        self._sizes = list(map(len, self._tables))
        # What is empty needs no other look.
        self._named = list(filter(None, self._tables))
        self._valued: list[Table] = list(
            filter(None, children if self._swapped else [*children, *parameters])
        )
        self._names, self._values = self._now()

    def _now(self) -> tuple[list[str], list[Any]]:
        names = list(chain.from_iterable(map(names_in, self._named)))
        return names, list(chain.from_iterable(map(values_in, self._valued)))

    def have_changed(self) -> bool:
        """Return whether they are others than in the look before."""
        if list(map(len, self._tables)) == self._sizes:
            names, values = self._now()
            if names == self._names and all(map(is_, values, self._values)):
                return False
        self._find()
        return True


class AnyPlace:
    """Of a placement that computes with what is there, and saves it: whatever was put there."""

    def check(self) -> None:
        """Raise nothing."""


class Places(AnyPlace):
    """The parameters in their modules, as they were wired up."""

    def __init__(self, model: nn.Module, *, swapped: bool = False, buffers: bool = False) -> None:
        """`swapped`: as above, for objects that are checked elsewhere; `buffers`: a new one could not be saved either."""
        self._model, self._swapped = model, swapped
        self._members = Members(model, swapped=swapped)
        self._parameters = self._found(parameters_of)
        self._buffers = self._found(buffers_of) if buffers else None

    def check(self) -> None:
        """Raise where a parameter was replaced, added or taken away, by itself or with its module."""
        if self._members.have_changed():
            self._compare()

    def _compare(self) -> None:
        now = self._found(parameters_of)
        for name, (table, value) in self._parameters.items():
            there, held = now.get(name, (None, None))
            if there is not table or (held is not value and not self._swapped):
                refuse_replaced(name)
        _refuse_added(now, self._parameters)
        if self._buffers is not None:
            _refuse_added(self._found(buffers_of), self._buffers)

    def _found(self, tables: Callable[[nn.Module], Mapping[str, Any]]) -> dict[str, tuple[Any, Any]]:
        """Return by name where each is, and what it is; what two modules share, or one with two names, by each name."""
        return {
            f"{path}.{key}".lstrip("."): (tables(module), value)
            for path, module in self._model.named_modules(remove_duplicate=False)
            for key, value in tables(module).items()
            if value is not None
        }


def _refuse_added(now: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    added = next((name for name in now if name not in known), None)
    if added is not None:
        raise InputError(
            f"{added} was added to the model after it was prepared, and this strategy would neither train nor save it. Make it "
            "before run.prepare, frozen at first if need be, or use single, dp or ddp."
        )


def refuse_replaced(name: str) -> NoReturn:
    """Raise for a parameter that has taken another's place: neither the optimizer nor what sums gradients knows of it."""
    raise InputError(
        f"{name} was replaced (an assignment, another module, load_state_dict(assign=True), model.double()), and what is there "
        "now is not trained. Change weights in place: p.copy_() under torch.no_grad()."
    )


def refuse_made_later(state: Iterable[str], known: Container[str]) -> None:
    """Raise where a state, of which these are the keys, has more of a model than there is of it here."""
    names = (key.removeprefix(f"{MODEL}/") for key in state if key.startswith(f"{MODEL}/"))
    added = next((name for name in names if name not in known), None)
    if added is not None:
        raise InputError(
            f"{added} was added to the model during the run, so a worker that replaces another does not have it. Make all "
            "modules before run.prepare, frozen at first if need be."
        )
