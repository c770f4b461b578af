"""Where random generators stand, whoever made them, and whether one has been drawn from or seeded anew since."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from paceline.strategies.guards.reached import Generator

_AHEAD = [1 << 12, *[1 << 18] * 16]
"""How far is looked ahead for where a Mersenne twister stands now: four million numbers, which take 0.1 s, once."""
_STREAMS = {"PCG64": "inc", "PCG64DXSM": "inc", "Philox": "key"}
"""What of the state of numpy's generators no draw changes."""

State = tuple[str, Any, Any]
"""A kind, what no draw changes, and what draws change."""


def kind_of(one: Generator) -> str:
    """Return what a generator is, in words."""
    module = type(one).__module__.partition(".")[0].removeprefix("_")
    return f"{module}.Generator" if isinstance(one, torch.Generator) else f"{module} {type(one).__name__}"


def state_of(one: Generator) -> State | None:
    """Return where a generator stands; None for one that draws from the machine's entropy, and so stands nowhere."""
    if isinstance(one, torch.Generator):
        return "torch", one.initial_seed(), one.get_state().numpy().tobytes()
    if isinstance(one, random.Random):
        try:
            _, words, gauss = one.getstate()
        except NotImplementedError:
            return None
        return "MT19937", None, (np.array(words[:-1], np.uint32).tobytes(), words[-1], gauss)
    state: Any = (
        one.get_state(legacy=False)
        if isinstance(one, np.random.RandomState)
        else (one.bit_generator if isinstance(one, np.random.Generator) else one).state
    )
    kind, inner = state["bit_generator"], state["state"]
    if kind == "MT19937":
        return kind, None, (inner["key"].tobytes(), inner["pos"], state.get("gauss"))
    return kind, _plain(inner.get(_STREAMS.get(kind))), _plain(state)


def drew_on(before: State, after: State) -> bool | None:
    """Return whether a generator has been drawn from without being seeded anew first; None where its state does not tell."""
    if before == after or before[:2] != after[:2]:
        return False
    return True if before[0] != "MT19937" or _follows(before[2][:2], after[2][:2]) else None


def _follows(before: tuple[bytes, int], after: tuple[bytes, int]) -> bool:
    """Return whether a Mersenne twister comes by the later state: what it gives then is among what it gives from the first."""
    wanted = _twister(*after).random_raw(4)
    twister = _twister(*before)
    ahead = twister.random_raw(4)
    for count in _AHEAD:
        ahead = np.concatenate([ahead[-4:], twister.random_raw(count)])
        for place in np.flatnonzero(ahead[:-3] == wanted[0]):
            if np.array_equal(ahead[place : place + 4], wanted):
                return True
    return False


def _twister(key: bytes, position: int) -> np.random.MT19937:
    made = np.random.MT19937(0)
    words = np.frombuffer(key, np.uint32)
    made.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": position}}
    return made


def _plain(state: Any) -> Any:
    """Return a state that can be compared."""
    if isinstance(state, dict):
        return tuple((key, _plain(value)) for key, value in state.items())
    return state.tobytes() if isinstance(state, np.ndarray) else state
