"""The side of a call that does the work: finds what was asked for, runs it, and gives its value or its failure.

These few functions are all that a message may name.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.rpc import functions
from torch.futures import Future

from paceline.errors import CallRefusedError, RemoteError
from paceline.remote import object_store, registry
from paceline.remote.batching import Batcher
from paceline.remote.failures import Failure
from paceline.remote.guard import own
from paceline.remote.message_recipient import NOTHING, begin, end
from paceline.remote.object_store import Number, Token
from paceline.remote.session import Session, at_open, current


class _Instance:
    """One service that lives here."""

    def __init__(self, description: registry.Description, made: Any) -> None:
        self.description, self.made = description, made
        self.batchers: dict[str, Batcher] = {}
        self.lock = threading.Lock()

    def method(self, name: str) -> Callable[..., Any]:
        """Return a public method, bound."""
        if name not in self.description.methods:
            kind = self.description.made_by.__qualname__
            raise CallRefusedError(f"{kind} offers no method {name!r} to other workers.")
        return getattr(self.made, name)  # type: ignore[no-any-return]

    def batcher(self, name: str) -> Batcher:
        """Return what collects the calls of a batched method."""
        with self.lock:
            if name not in self.batchers:
                found = self.method(name)
                self.batchers[name] = Batcher(found, getattr(found, registry.BATCHED))
            return self.batchers[name]

    def close(self) -> None:
        """End the threads that collect."""
        for one in list(self.batchers.values()):
            one.close()


_instances: dict[Number, _Instance] = {}


class Lease:
    """Lives as long as any worker holds a reference to it; with it goes the service it stands for."""

    def __init__(self, number: Number, instance: _Instance) -> None:
        self._number, self._instance = number, instance

    def __del__(self) -> None:
        # A session that ended late may leave one whose number is another's by now.
        if _instances.get(self._number) is self._instance:
            del _instances[self._number]
        self._instance.close()


def instance(number: Number) -> Any:
    """Return a service that lives on this worker."""
    return _find(number).made


def clear() -> None:
    """Forget every service of a session that has ended."""
    for one in list(_instances.values()):
        one.close()
    _instances.clear()


@at_open
def _begin(session: Session) -> None:
    """Begin with nothing: word of a session before may have come after its end."""
    object_store.clear()
    session.at_close(clear)
    session.at_close(object_store.clear)
    session.at_loss(object_store.forget)


def _find(number: Number) -> _Instance:
    found = _instances.get(number)
    if found is None:
        raise RemoteError(
            f"the service {number} is not on {current().name} any more: the last reference to it was dropped."
        )
    return found


def _guarded(caller: int, action: Callable[[], Any]) -> Any:
    session = current()
    end(NOTHING)
    torch.get_num_threads()  # a thread that never asked computes on all cores, whatever this worker was given
    try:
        return action()
    except CallRefusedError as error:
        print(f"paceline: refused: {error}", file=sys.stderr)  # noqa: T201  (the worker's log)
        return Failure.of(error, session.name)
    except BaseException as error:  # noqa: BLE001  (the caller gets it; this worker's thread goes on)
        return Failure.of(error, session.name)
    finally:
        begin(session.roles.names[caller])  # the answer is written next, on this thread


@own
def make(
    caller: int, number: Number, token: Token, address: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Create a service here; it lives as long as somebody holds its lease."""

    def action() -> None:
        description = registry.find_service(address)
        made = _Instance(description, description.made_by(*args, **kwargs))
        _instances[number] = made
        object_store.hold(number, token, current().roles.names[caller])
        object_store.put(number, Lease(number, made))

    return _guarded(caller, action)


@own
def keep(caller: int, number: Number, token: Token, run: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Call something here, and keep what it gives: a failure too, for whoever fetches it."""
    if run not in (run_method, run_function):
        raise CallRefusedError(f"{run!r} gives nothing that could be kept.")
    object_store.hold(number, token, current().roles.names[caller])
    object_store.put(number, run(caller, *args))


@own
def run_method(
    caller: int, number: Number, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call a method of a service that lives here."""
    return _guarded(caller, lambda: _find(number).method(name)(*args, **kwargs))


@own
@functions.async_execution  # type: ignore[untyped-decorator]
def run_batched(
    caller: int, number: Number, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Future[Any]:
    """Let a call wait for others like it; no thread waits with it."""
    answer: Future[Any] = Future()

    def action() -> None:
        if kwargs or len(args) != 1:
            raise TypeError(
                f"{name} is batched: it takes one item a call, not {len(args) + len(kwargs)} arguments."
            )
        _find(number).batcher(name).add(args[0], answer, current().roles.names[caller])

    problem = _guarded(caller, action)
    if problem is not None:
        answer.set_result(problem)
    return answer


@own
def run_function(caller: int, address: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a registered function here."""
    return _guarded(caller, lambda: registry.find_function(address)(*args, **kwargs))
