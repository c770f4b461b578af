"""The side of a call that does the work: finds what was asked for, runs it, and answers with its value or its failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from paceline.errors import CallRefusedError, RemoteError
from paceline.remote import registry
from paceline.remote.batching import Batcher
from paceline.remote.exchange import BACKWARD, BATCHED, CREATE, END_PASS, FUNCTION, METHOD
from paceline.remote.failures import CallFailure
from paceline.remote.gradients import inside
from paceline.remote.incoming import IncomingCall, handles
from paceline.remote.object_store import Number
from paceline.remote.session import Session


class Instance:
    """One service that lives here, as long as any worker holds it."""

    def __init__(self, description: registry.Description, made: Any) -> None:
        self.description, self.made = description, made
        self._batchers: dict[str, Batcher] = {}
        self._lock = threading.Lock()

    def method(self, name: str) -> Callable[..., Any]:
        """Return a public method, bound."""
        if name not in self.description.methods:
            kind = self.description.made_by.__qualname__
            raise CallRefusedError(f"{kind} offers no method {name!r} to other workers.")
        return getattr(self.made, name)  # type: ignore[no-any-return]

    def batcher(self, name: str) -> Batcher:
        """Return what collects the calls of a batched method."""
        with self._lock:
            if name not in self._batchers:
                found = self.method(name)
                self._batchers[name] = Batcher(found, getattr(found, registry.BATCHED))
            return self._batchers[name]

    def __del__(self) -> None:
        """End the threads that collect."""
        for one in self._batchers.values():
            one.close()


def _find(session: Session, number: Number) -> Instance:
    found = session.objects.made(number)
    if not isinstance(found, Instance):
        raise RemoteError(
            f"the service {number} is not on {session.name} any more: the last reference to it was dropped."
        )
    return found


def _run(request: IncomingCall, find: Callable[..., Callable[..., Any]]) -> None:
    """Run what `find` gives for the message, and answer; what is computed belongs to the pass of the call."""
    context = request.context()
    *target, args, kwargs = request.read(context)
    try:
        called = find(*target)
        if context is None:
            value = called(*args, **kwargs)
        else:
            with inside(context):
                value = called(*args, **kwargs)
    except CallRefusedError as error:
        request.refuse(error, read=True)
    except BaseException as error:  # noqa: BLE001  (the caller gets it; this worker's thread goes on)
        request.answer(CallFailure.of(error, request.session.name))
    else:
        request.answer(value, context)


@handles(CREATE)
def _create(request: IncomingCall) -> None:
    """Create a service here; it lives as long as somebody holds it."""

    def make(address: str) -> Callable[..., Instance]:
        description = registry.find_service(address)
        return lambda *args, **kwargs: Instance(description, description.made_by(*args, **kwargs))

    _run(request, make)


@handles(METHOD)
def _method(request: IncomingCall) -> None:
    """Call a method of a service that lives here."""
    _run(request, lambda rank, count, name: _find(request.session, (rank, count)).method(name))


@handles(FUNCTION)
def _function(request: IncomingCall) -> None:
    """Call a registered function here."""
    _run(request, registry.find_function)


@handles(BATCHED)
def _batched(request: IncomingCall) -> None:
    """Let a call wait for others like it; no thread waits with it."""
    rank, count, name, args, kwargs = request.read()
    try:
        if kwargs or len(args) != 1:
            raise TypeError(
                f"{name} is batched: it takes one item a call, not {len(args) + len(kwargs)} arguments."
            )
        _find(request.session, (rank, count)).batcher(name).add(args[0], request)
    except CallRefusedError as error:
        request.refuse(error, read=True)
    except BaseException as error:  # noqa: BLE001  (the caller gets it)
        request.answer(CallFailure.of(error, request.session.name))


@handles(BACKWARD)
def _backward(request: IncomingCall) -> None:
    """Go back from tensors of an earlier call."""
    identity, side, rank, count, gradients = request.read()
    try:
        answer: Any = request.session.passes.go_back(identity, side, (rank, count), gradients)
    except BaseException as error:  # noqa: BLE001  (the caller gets it)
        answer = CallFailure.of(error, request.session.name)
    request.answer(answer)


@handles(END_PASS, in_order=True)
def _end_pass(request: IncomingCall) -> None:
    """Forget a pass."""
    request.session.passes.end(request.read())
