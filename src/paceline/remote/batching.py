"""Turns single calls into batches: callers send one item, the method gets a list and gives a list."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import InputError, RemoteError
from paceline.remote.failures import CallFailure
from paceline.remote.incoming import IncomingCall
from paceline.remote.registry import BATCHED
from paceline.remote.session import current


@dataclass(frozen=True)
class Limits:
    """When a batch is full enough."""

    max_size: int
    max_wait_s: float


def batched(*, max_size: int = 32, max_wait_ms: float = 2.0) -> Callable[[Callable[..., Any]], Any]:
    """Let a method of a service receive items of several calls as one list; callers pass and get one item each."""
    if max_size < 1 or max_wait_ms < 0:
        raise InputError(
            f"a batch of at most {max_size} items within {max_wait_ms:g} ms cannot be: give max_size of 1 or more, "
            "max_wait_ms of 0 or more."
        )

    def mark(method: Callable[..., Any]) -> Any:
        setattr(method, BATCHED, Limits(max_size, max_wait_ms / 1e3))
        return method

    return mark


@dataclass(frozen=True, slots=True)
class _Question:
    """One call that waits for others like it."""

    item: Any
    request: IncomingCall
    since: float


class Batcher:
    """Collects the calls of one method of one service, and runs them on a thread of its own."""

    def __init__(self, method: Callable[[list[Any]], list[Any]], limits: Limits) -> None:
        self._method, self._limits = method, limits
        self._worker = current().name
        self._waiting: list[_Question] = []
        self._changed = threading.Condition()
        self._open = True
        threading.Thread(target=self._serve, daemon=True, name=f"batches of {method.__name__}").start()

    def add(self, item: Any, request: IncomingCall) -> None:
        """Put an item of a request into the next batch; its result answers the request."""
        with self._changed:
            if not self._open:
                raise RemoteError(
                    f"the service of {self._method.__qualname__} is not on {self._worker} any more: "
                    "the last reference to it was dropped."
                )
            self._waiting.append(_Question(item, request, time.monotonic()))
            if len(self._waiting) in (
                1,
                self._limits.max_size,
            ):  # the thread waits for the first, then for the last
                self._changed.notify()

    def close(self) -> None:
        """End the thread when it has done what is waiting."""
        with self._changed:
            self._open = False
            self._changed.notify()

    def _serve(self) -> None:
        torch.get_num_threads()  # see thread_pool: else this thread computes on all cores
        while batch := self._take():
            results = self._results([one.item for one in batch])
            for one, result in zip(batch, results, strict=True):
                one.request.answer(result)

    def _take(self) -> list[_Question]:
        """Wait for a full batch, or for the first of a small one to have waited long enough."""
        size = self._limits.max_size
        with self._changed:
            while self._open and not self._waiting:
                self._changed.wait()
            if self._waiting:
                deadline = self._waiting[0].since + self._limits.max_wait_s
                while self._open and len(self._waiting) < size and (left := deadline - time.monotonic()) > 0:
                    self._changed.wait(left)
            batch, self._waiting = self._waiting[:size], self._waiting[size:]
            return batch

    def _results(self, items: list[Any]) -> list[Any]:
        name = self._method.__name__
        try:
            results = list(self._method(items))
            if len(results) != len(items):
                raise RemoteError(
                    f"{name} gave {len(results)} results for {len(items)} items: a batched method gives one each."
                )
        except BaseException as error:  # noqa: BLE001  (every caller of the batch gets it, and the thread goes on)
            return [CallFailure.of(error, self._worker)] * len(items)
        return results
