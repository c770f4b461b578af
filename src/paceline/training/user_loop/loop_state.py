"""State of the loop's own (a moving average, the best score), saved with the run and handed on as its weights are."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
from torch import Tensor, nn

from paceline.checkpoint.fingerprint import raw_bytes
from paceline.checkpoint.tensors import plain
from paceline.errors import CheckpointError, InputError
from paceline.training.user_loop.marks import ModuleMarks, StateMarks
from paceline.training.user_loop.registered_dict import RegisteredDict
from paceline.world import World, all_gather_object

KEY = "loop"
"""Where a checkpoint's extra state holds it."""
SMALL = 4096
"""How many numbers and letters a state may hold that is kept for each call of `run.steps`."""
Values = dict[str, Any]


@runtime_checkable
class Stateful(Protocol):
    """Anything that says what it holds, and takes it back."""

    def state_dict(self) -> Any:
        """Return tensors, numbers, strings, lists and dicts."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take them back."""


class LoopState:
    """What a loop has registered, by name; the same on every worker."""

    def __init__(self) -> None:
        self._objects: dict[str, Stateful | RegisteredDict] = {}
        self._saved: Values | None = None
        """What the checkpoint held that this process resumed from, less what has been taken over."""
        self._beginning: Values | None = None
        self._modules: dict[str, ModuleMarks] = {}
        """Of the objects whose state is the tensors of a module."""
        self._made_anew: dict[str, bool] = {}
        """Whether an object returns its state in memory of its own, each time it is asked."""
        self._given: dict[str, str] = {}
        """What each object held right after it took over its state of a checkpoint."""

    def register(self, name: str, value: Any) -> bool:
        """Keep an object's state from now on; return whether it took over that of a checkpoint."""
        if not isinstance(value, dict | Stateful):
            raise InputError(
                f"run.register({name!r}) was given a {type(value).__name__}, which has no state_dict() and "
                "load_state_dict(). Give an object with both, or a dict."
            )
        if name in self._objects:
            raise InputError(f"run.register({name!r}) was called before. Give each state a name of its own.")
        self._objects[name] = RegisteredDict(value) if isinstance(value, dict) else value
        if _holds_tensors_alone(value):
            self._modules[name] = ModuleMarks(value)
        if self._saved is not None and name in self._saved:
            self._take_over(name, self._saved.pop(name))
            return True
        return False

    def resume(self, saved: Values) -> list[str]:
        """Load what a checkpoint holds; return the registered names that it does not know."""
        self._saved = dict(saved)
        for name in self._objects:
            if name in self._saved:
                self._take_over(name, self._saved.pop(name))
        return [name for name in self._objects if name not in saved]

    def leave(self, name: str) -> None:
        """Leave what a checkpoint holds under a name: nobody needs it any more."""
        if self._saved is not None:
            self._saved.pop(name, None)

    def _take_over(self, name: str, state: Any) -> None:
        self._give(name, state)
        self._given[name] = _digest(self._value(name))

    def moved(self) -> bool:
        """Return whether the loop has changed a state since it was taken over from a checkpoint."""
        return any(_digest(self._value(name)) != given for name, given in self._given.items())

    def begin(self) -> None:
        """Raise if a checkpoint's state would be lost; remember the beginning, should the run go back there."""
        if self._saved:
            raise InputError(
                f"the checkpoint holds the state {min(self._saved)!r} of its loop, and nobody has registered it: it would "
                "be lost. Call run.register with that name before run.steps."
            )
        if self._beginning is None:
            self._beginning = self.snapshot()

    @property
    def beginning(self) -> Values:
        """What the states were before the first step of this process."""
        return self._beginning or {}

    def snapshot(self) -> Values:
        """Return a copy of all states, in memory of its own."""
        return copy.deepcopy(self.values())

    def values(self) -> Values:
        """Return all states as a checkpoint can hold them; what it cannot hold is refused by name."""
        return {name: self._value(name) for name in self._objects}

    def _value(self, name: str) -> Any:
        value = self._objects[name]
        what = f"the state {name!r}"
        return value.plain(what) if isinstance(value, RegisteredDict) else plain(value.state_dict(), what)

    def load(self, values: Values) -> None:
        """Load into every object its state of another moment, or of another worker."""
        for name in self._objects:
            if name not in values:
                raise InputError(
                    f"the other workers have no state {name!r}. Call run.register on every worker, before run.steps."
                )
            self._give(name, values[name])

    def small(self) -> Values:
        """Return copies of the states that cost next to nothing to keep for each call of `run.steps`: scores, counts, rates."""
        kept = {}
        for name in self._objects:
            with suppress(CheckpointError):  # what no checkpoint can hold is refused where one is written
                value = self._value(name)
                if _left(value, SMALL) >= 0:
                    kept[name] = copy.deepcopy(value)
        return kept

    def small_now(self) -> Values:
        """Return copies of the states that are small now: cheap enough for each step."""
        return {name: copy.deepcopy(self._value(name)) for name in self._objects if not self._is_large(name)}

    def large_digests(self) -> dict[str, str]:
        """Return one number for each of the others."""
        return {name: _digest(self._value(name)) for name in self._objects if self._is_large(name)}

    def large_marks(self) -> dict[str, Any]:
        """Return marks of each of the others, which tell later whether it was written to."""
        return {name: self.marks_of(name) for name in self._objects if self._is_large(name)}

    def marks(self) -> dict[str, Any]:
        """Return marks of all of them."""
        return {name: self.marks_of(name) for name in self._objects}

    def marks_of(self, name: str) -> Any:
        """Return marks of one state."""
        value = self._objects[name]
        if name in self._modules:
            return self._modules[name].note()
        if isinstance(value, RegisteredDict):
            return StateMarks(value.value, anew=False)
        if name not in self._made_anew:
            first, second = (StateMarks(value.state_dict(), anew=False) for _ in range(2))
            self._made_anew[name] = first != second
        return StateMarks(value.state_dict(), anew=self._made_anew[name])

    def _is_large(self, name: str) -> bool:
        value = self._objects[name]
        if isinstance(value, nn.Module) and _left(value.parameters(), SMALL) < 0:
            return True
        return _left(value.value if isinstance(value, RegisteredDict) else value.state_dict(), SMALL) < 0

    def objects(self) -> list[Any]:
        """Return what was registered."""
        return [one.value if isinstance(one, RegisteredDict) else one for one in self._objects.values()]

    def give_known(self, states: Values) -> None:
        """Load into the objects what `small` returned for them."""
        for name, state in states.items():
            if name in self._objects:
                self._give(name, state)

    def check_same(self, world: World) -> Values:
        """Return all states, or raise where they are not the same on all workers; all workers call it."""
        values = self.values()
        mine = {name: _digest(value) for name, value in values.items()}
        everybody: list[dict[str, str]] = all_gather_object(world.comm, mine) if world.size > 1 else [mine]
        for rank, theirs in enumerate(everybody[: world.size - world.mesh.servers]):
            for name in everybody[0].keys() | theirs.keys():
                if theirs.get(name) != everybody[0].get(name):
                    raise InputError(
                        f"the state {name!r} of the loop differs between rank {rank} and rank 0; a checkpoint holds one. "
                        "Compute it from what all workers share: run.evaluate, or (not with --staleness) weights or step.result."
                    )
        return values

    def _give(self, name: str, state: Any) -> None:
        value = self._objects[name]
        if isinstance(value, RegisteredDict):
            value.load(state)
        else:
            value.load_state_dict(copy.deepcopy(state))

    def __bool__(self) -> bool:
        """Return whether anything is registered."""
        return bool(self._objects)


def _left(value: Any, budget: int) -> int:
    """Return how many numbers and letters still fit beside a state; negative as soon as it is known that it does not fit."""
    if isinstance(value, Tensor):
        return budget - value.numel()
    if isinstance(value, np.ndarray):
        return budget - value.size
    if isinstance(value, str):
        return budget - len(value)
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple | Iterator):
        return budget - 1
    for item in value:
        budget = _left(item, budget)
        if budget < 0:
            break
    return budget


def _holds_tensors_alone(value: Any) -> TypeGuard[nn.Module]:
    """Return whether the state of an object is the tensors of a module."""
    return (
        isinstance(value, nn.Module)
        and type(value).state_dict is nn.Module.state_dict
        and not any(type(one).get_extra_state is not nn.Module.get_extra_state for one in value.modules())
    )


def _digest(value: Any) -> str:
    made = hashlib.sha256()
    _add(made, value)
    return made.hexdigest()


def _add(made: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        made.update(json.dumps([str(value.dtype), list(value.shape)]).encode())
        made.update(raw_bytes(value).numpy().data)
    elif isinstance(value, Mapping):
        made.update(b"{")
        for key, item in value.items():
            made.update(repr(key).encode())
            _add(made, item)
        made.update(b"}")
    elif isinstance(value, list | tuple):
        made.update(b"[")
        for item in value:
            _add(made, item)
        made.update(b"]")
    else:
        made.update(repr(value).encode())
