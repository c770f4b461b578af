"""State of the loop's own (a moving average, the best score), saved with the run and handed on as its weights are."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from paceline.checkpoint.fingerprint import raw_bytes
from paceline.checkpoint.tensors import plain
from paceline.errors import CheckpointError, InputError
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
        self._objects: dict[str, Stateful | dict[Any, Any]] = {}
        self._saved: Values | None = None
        """What the checkpoint held that this process resumed from, less what has been taken over."""
        self._beginning: Values | None = None
        self._is_small: dict[str, bool] = {}
        self._given: dict[str, str] = {}
        """What each object held right after it took over its state of a checkpoint."""

    def register(self, name: str, value: Any) -> bool:
        """Keep an object's state from now on; return whether it took over that of a checkpoint."""
        if not isinstance(value, dict | Stateful):
            raise InputError(
                f"run.register_state({name!r}) was given a {type(value).__name__}, which has no state_dict() and "
                "load_state_dict(). Give an object with both, or a dict."
            )
        if name in self._objects:
            raise InputError(
                f"run.register_state({name!r}) was called before. Give each state a name of its own."
            )
        self._objects[name] = value
        if self._saved is not None and name in self._saved:
            self._take_over(name, self._saved.pop(name))
            return True
        return False

    def resume(self, saved: Values) -> list[str]:
        """Take over what a checkpoint holds; return the registered names that it does not know."""
        self._saved = dict(saved)
        for name in self._objects:
            if name in self._saved:
                self._take_over(name, self._saved.pop(name))
        return [name for name in self._objects if name not in saved]

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
                "be lost. Call run.register_state with that name before run.steps."
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
        return plain(value if isinstance(value, dict) else value.state_dict(), f"the state {name!r}")

    def load(self, values: Values) -> None:
        """Load into every object its state of another moment, or of another worker."""
        for name in self._objects:
            if name not in values:
                raise InputError(
                    f"the other workers have no state {name!r}. Call run.register_state on every worker, before run.steps."
                )
            self._give(name, values[name])

    def small(self) -> dict[str, Values]:
        """Return copies of the states that cost next to nothing to keep for each call of `run.steps`: scores, counts, rates."""
        kept = {}
        for name in self._objects:
            with suppress(CheckpointError):  # what no checkpoint can hold is refused where one is written
                value = self._value(name)
                if _weight(value) <= SMALL:
                    kept[name] = copy.deepcopy(value)
        return {"states": kept}

    def small_known(self) -> dict[str, Values]:
        """Return copies of the states that were small when they were first looked at: cheap enough for each step."""
        if self._is_small.keys() != self._objects.keys():
            self._is_small = {name: name in self.small()["states"] for name in self._objects}
        known = (name for name, small in self._is_small.items() if small)
        return {"states": {name: copy.deepcopy(self._value(name)) for name in known}}

    def large_digests(self) -> dict[str, str]:
        """Return one number for each of the others."""
        self.small_known()
        return {name: _digest(self._value(name)) for name, small in self._is_small.items() if not small}

    def objects(self) -> list[Any]:
        """Return what was registered."""
        return list(self._objects.values())

    def give_known(self, then: Mapping[str, Any]) -> None:
        """Load into the objects what `small` returned for them."""
        for name, state in then["states"].items():
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
                        "Compute it from what all workers share: the weights, a step's result, run.evaluate."
                    )
        return values

    def _give(self, name: str, state: Any) -> None:
        value, state = self._objects[name], copy.deepcopy(state)
        if isinstance(value, dict):
            value.clear()
            value.update(state)
        else:
            value.load_state_dict(state)

    def __bool__(self) -> bool:
        """Return whether anything is registered."""
        return bool(self._objects)


def _weight(value: Any) -> int:
    """Return how many numbers and letters a state holds."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_weight(item) for item in value.values())
    return sum(map(_weight, value)) if isinstance(value, list | tuple) else 1


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
