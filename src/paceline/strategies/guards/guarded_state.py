"""What an optimizer keeps, where a loop may ask for what is kept of a weight elsewhere: it is told so, in one line.

`optimizer.state` is a dict that makes an empty entry for whoever it does not know: `["exp_avg"]` of that is a bare KeyError, and
what is put there under the name of a weight whose rows are updated changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from paceline.errors import InputError


class GuardedState(defaultdict[Any, Any]):
    """The state of an optimizer on one worker; it makes no entry for a weight whose state is elsewhere."""

    names: dict[int, str] = {}  # noqa: RUF012  (of a copy, which refuses nothing)
    why = ""
    strict = False

    def __missing__(self, key: Any) -> Any:
        self._refuse(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or self._check(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check(key)
        super().__setitem__(key, value)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return what is kept under a key."""
        self._check(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Take it out."""
        self._check(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return it, or put something there."""
        self._check(key)
        return super().setdefault(key, default)

    def _check(self, key: object) -> bool:
        """Return that it is not there, unless all use of it is refused."""
        if self.strict:
            self._refuse(key)
        return False

    def _refuse(self, key: object) -> None:
        if id(key) in self.names:
            raise InputError(f"the loop looked up {self.names[id(key)]} in optimizer.state, but {self.why}")


def guard_state(
    optimizers: Iterable[Optimizer], names: dict[int, str], why: str, *, strict: bool = False
) -> None:
    """Have the optimizers refuse these weights, given by their ids: also where loading has made another dict.

    `strict`: also where a loop takes out, sets or looks for an entry, and not only where it needs one.
    """
    for one in optimizers:
        if type(one.state) is defaultdict:
            one.state = GuardedState(one.state.default_factory, one.state)
        if isinstance(one.state, GuardedState):
            # Of this group: the weights of the one before are gone, and their ids may be others'.
            one.state.names, one.state.why, one.state.strict = names, why, strict


def kept_elsewhere(who: str) -> str:
    """Return why a weight cannot be looked up where `who` says that another process updates it."""
    return (
        f"{who} updates it, and its state is not here. Go through optimizer.state.items(), which has what this worker keeps; to "
        "find the state of every weight on each worker use --strategy ddp without --shard-optimizer."
    )
