"""Metrics beyond means, exact over workers: states merged in one order, values collected in the order of the samples.

Each logical shard has a state of its own, merged batch after batch through the whole data set on the one worker that carries
the shard; in the end the states of all shards are merged in the order of the shards. So no order depends on the workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from paceline.compat.torchmetrics_states import keep_alone, unmergeable
from paceline.declared import Collected, MetricState
from paceline.errors import InputError
from paceline.task import Mean, fault_of
from paceline.world import World, all_gather_object

Key = tuple[int, int, int]
"""Step, shard, and batch of the shard."""
_returned: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Objects that metrics() has returned: one that comes a second time holds what was counted before."""


@dataclass
class Merging:
    """What one worker has measured so far of the metrics that are no means."""

    states: dict[str, dict[int, MetricState]] = field(default_factory=dict)
    """By name and shard."""
    collected: dict[str, dict[Key, tuple[Tensor, ...]]] = field(default_factory=dict)
    computes: dict[str, Any] = field(default_factory=dict)
    """The function of each collected metric."""

    def add(self, rows: Mapping[Key, Mapping[str, Any]]) -> None:
        """Take what was measured of some batches, in their order."""
        for key in sorted(rows):
            for name, value in rows[key].items():
                if isinstance(value, Collected):
                    self.collected.setdefault(name, {})[key] = value.values
                    self.computes[name] = value.compute
                elif not isinstance(value, Mean):
                    shards = self.states.setdefault(name, {})
                    mine = _on_cpu(value)
                    shards[key[1]] = mine if key[1] not in shards else _merged(shards[key[1]], mine)

    def results(self, world: World) -> dict[str, float]:
        """Put together what all workers have; all call it."""
        everybody: list[tuple[Any, Any]] = all_gather_object(world.comm, (self.states, self.collected))
        found: dict[str, float] = {}
        for name in sorted({name for states, _ in everybody for name in states}):
            # Workers beside each other in a mesh measure the same batches: one of them is enough.
            shards = {
                shard: state for states, _ in everybody for shard, state in states.get(name, {}).items()
            }
            found |= _numbers(name, _computed([shards[shard] for shard in sorted(shards)]))
        mine: dict[str, dict[str, float]] = {}
        names = sorted({name for _, collected in everybody for name in collected})
        for name in names:
            if name in self.computes:
                rows = {
                    key: values
                    for _, collected in everybody
                    for key, values in collected.get(name, {}).items()
                }
                columns = zip(*(rows[key] for key in sorted(rows)), strict=True)
                mine[name] = _numbers(name, self.computes[name](*(torch.cat(column) for column in columns)))
        if names:
            # A worker without a sample knows no function.
            for theirs in reversed(all_gather_object(world.comm, mine)):
                for numbers in theirs.values():
                    found |= numbers
        return found


def check_state(name: str, value: Any) -> None:
    """Raise for what is no metric, or holds more than its own batch."""
    if not isinstance(value, MetricState) or not (hasattr(value, "merge") or hasattr(value, "merge_state")):
        raise InputError(
            "metrics() must return a dict of paceline.Mean(total, weight), of paceline.Collected, or of objects with merge() and "
            f"compute(), as torchmetrics' are; the metric {name} is {value!r:.80}."
        )
    if _returned.get(id(value)) is value:
        raise InputError(
            f"metrics() returned the same object for the metric {name} twice, so what it held before would be counted again. "
            "Make a new one for each batch; paceline merges them."
        )
    if (reason := unmergeable(value)) is not None:
        raise InputError(
            f"the metric {name}, a {type(value).__name__}, cannot be merged over batches: {reason}. Use "
            "paceline.Collected(preds, targets, compute=function), whose function is given all values."
        )
    try:
        _returned[id(value)] = value
    except TypeError:  # it has __slots__
        return


def _on_cpu(value: Any) -> Any:
    return value.cpu() if callable(getattr(value, "cpu", None)) else value


def _merged(earlier: Any, later: Any) -> Any:
    """Return one state of two, the earlier one's values first."""
    if hasattr(earlier, "merge"):
        made = earlier.merge(later)
        return made if isinstance(made, MetricState) else earlier  # some return what they have made of both
    try:
        later.merge_state(earlier)  # torchmetrics puts what comes in before what is there
    except TypeError as error:
        raise InputError(
            f"the metric {type(later).__name__} cannot be merged with another of its kind: merge_state(other) raised "
            f"{error}. Where it takes a list of metrics, give it a method merge(self, other) that calls merge_state([other])."
        ) from error
    return later


def _computed(states: list[Any]) -> Any:
    whole = states[0]
    for state in states[1:]:
        whole = _merged(whole, state)
    keep_alone(whole)
    return whole.compute()


def _numbers(name: str, value: Any) -> dict[str, float]:
    """Return what was computed as single numbers; those of classes have names like recall/0."""
    if isinstance(value, Mapping):
        return {
            key: number
            for part, one in value.items()
            for key, number in _numbers(f"{name}/{part}", one).items()
        }
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return {
            key: number
            for place, one in enumerate(value)
            for key, number in _numbers(f"{name}/{place}", one).items()
        }
    if not isinstance(value, int | float):
        raise InputError(
            f"the metric {name} came to {value!r:.80}, which is no number, tensor or dict of them. Return one from compute()."
        )
    if fault := fault_of(value):
        raise InputError(f"the metric {name} {fault}. Return another number from compute().")
    return {name: float(value)}
