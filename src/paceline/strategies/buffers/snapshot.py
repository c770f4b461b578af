"""The buffers of a model as they were before passes that must leave no trace: those of an evaluation.

Each worker measures other batches, so a buffer that evaluation moved would part between the workers, and a metric that
reads one would depend on which batches this worker had before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.compat.modules import buffers_of
from paceline.compat.tensors import local_part
from paceline.strategies.buffers.buffers import mark
from paceline.strategies.guards.same_values import same_numbers


class _Entry(NamedTuple):
    module: nn.Module
    name: str
    tensor: Tensor
    before: Tensor


class BufferSnapshot:
    """Puts buffers back after each batch of an evaluation, and after the whole."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        held = [(module, name, value) for module in modules for name, value in buffers_of(module).items()]
        self._none = [(module, name) for module, name, value in held if value is None]
        """Names without a buffer; a pass may give them one."""
        self._entries = [
            _Entry(module, name, value, _here(value).clone())
            for module, name, value in held
            if value is not None and not value.is_meta  # one of another stage has no values
        ]
        self._marks = [mark(entry.tensor) for entry in self._entries]
        self._moving: set[int] | None = None
        """Which ones a batch has moved; the first is asked by value, for not every kernel counts its writes."""

    def restore_moved(self) -> None:
        """Put back what the batch before moved."""
        self._take_away()
        if not self._entries:
            return
        if self._moving is None:
            self._moving = {place for place, entry in enumerate(self._entries) if _moved(entry)}
        for place, entry in enumerate(self._entries):
            if place in self._moving or self._marks[place] != _now(entry):
                self._restore(place)

    def restore(self) -> None:
        """Put back all of them."""
        self._take_away()
        for place in range(len(self._entries)):
            self._restore(place)

    def _take_away(self) -> None:
        for module, name in self._none:
            if buffers_of(module).get(name) is not None:
                buffers_of(module)[name] = None

    def _restore(self, place: int) -> None:
        entry = self._entries[place]
        now = buffers_of(entry.module).get(entry.name)
        if now is None or now.shape != entry.tensor.shape or now.dtype != entry.tensor.dtype:
            return  # a cache that has grown: its module has noted that it did
        if now is not entry.tensor:
            buffers_of(entry.module)[entry.name] = entry.tensor
        with torch.no_grad():
            _here(entry.tensor).copy_(entry.before)
        self._marks[place] = mark(entry.tensor)


def _moved(entry: _Entry) -> bool:
    now = buffers_of(entry.module).get(entry.name)
    return now is not None and not same_numbers(_here(now), entry.before)


def _now(entry: _Entry) -> tuple[int, int] | None:
    now = buffers_of(entry.module).get(entry.name)
    return None if now is None else mark(now)


def _here(value: Tensor) -> Tensor:
    """Return this worker's part of a buffer that is sharded."""
    return local_part(value).detach()
