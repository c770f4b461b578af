"""What an optimizer keeps of weights whose state another worker has: a loop that reads it here is told so, in one line.

`optimizer.state` is a dict that makes an empty entry for whoever it does not know, and `["exp_avg"]` of that is a bare KeyError.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from paceline.errors import InputError


class AbsentEntries(defaultdict[Any, Any]):
    """The state of an optimizer on one worker; it makes no entry for a weight that is not updated here."""

    names: dict[int, str] = {}  # noqa: RUF012  (of a copy, which refuses nothing)
    where = ""

    def __missing__(self, key: Any) -> Any:
        if id(key) in self.names:
            raise InputError(
                f"the loop looked up {self.names[id(key)]} in optimizer.state, but {self.where}, and its state is not here. "
                "Go through optimizer.state.items(), which has what this worker keeps; to find the state of every weight on "
                "each worker use --strategy ddp without --shard-optimizer."
            )
        return super().__missing__(key)


def guard_entries(optimizers: Iterable[Optimizer], names: dict[int, str], where: str) -> None:
    """Have the optimizers refuse to be asked for these weights, given by their ids: also where loading has made another dict."""
    for one in optimizers:
        if type(one.state) is defaultdict:
            made = AbsentEntries(one.state.default_factory, one.state)
            made.names, made.where = names, where
            one.state = made
