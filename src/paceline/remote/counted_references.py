"""References to values that stay on their worker, counted by torch: the last one that goes frees the value."""

from __future__ import annotations

import re
import threading
import weakref
from typing import Any, Generic, TypeVar, cast

from torch.distributed import rpc

from paceline.errors import InputError, WorkerGoneError
from paceline.remote.failures import Failure, translate
from paceline.remote.guard import own, refusal
from paceline.remote.session import current

Value = TypeVar("Value")
_here: weakref.WeakSet[Reference[Any]] = weakref.WeakSet()
_lock = threading.Lock()
"""References are made on every thread that serves a call, also while one of them counts."""


class Reference(Generic[Value]):
    """A value on the worker that owns it."""

    def __init__(self, held: Any, what: str, holds: object = None) -> None:
        """`holds` is what must live on until the call that makes the value has begun."""
        self._held, self._what, self._holds = held, what, holds
        self.owner: str = held.owner_name()
        """The worker that has the value."""
        with _lock:
            _here.add(self)

    @property
    def identity(self) -> str:
        """What tells this value apart from all others, on every worker."""
        found = re.search(r"created_on=(\d+), local_id=(\d+)", repr(self._held))
        return f"{found[1]}.{found[2]}" if found else repr(self._held)

    @property
    def what(self) -> str:
        """What made it, in words."""
        return self._what

    @property
    def raw(self) -> Any:
        """Give torch's own reference."""
        return self._held

    def fetch(self, timeout: float | None = None) -> Value:
        """Bring the value here, or raise what the call that was to make it came to."""
        session = current()
        session.check(self.owner, f"fetching {self._what}")
        timeout_s = session.timeout_s if timeout is None else timeout
        try:
            value = self._held.to_here(timeout_s)
        except RuntimeError as error:
            found = translate(error, self.owner, f"fetching {self._what}", timeout_s)
            if isinstance(found, WorkerGoneError):
                session.note_lost(self.owner)
            raise found from None
        return cast("Value", _value(value))

    def local(self) -> Value:
        """Give the value itself, on the worker that owns it."""
        if not self._held.is_owner():
            raise InputError(
                f"{self._what} is on {self.owner}, not here. Bring a copy with fetch(), or work with it there."
            )
        return cast("Value", _value(self._held.local_value()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as a reference: the worker that gets it counts as one more holder."""
        return (rebuild, (self._held, self._what))

    def __repr__(self) -> str:
        return f"<reference {self.identity} to {self._what} on {self.owner}>"


@own
def rebuild(held: Any, what: str) -> Reference[Any]:
    """Make a reference of what arrived."""
    return Reference(held, what)


def reference(value: Value) -> Reference[Value]:
    """Give a reference to a value of this worker, for others to hold."""
    current()
    return Reference(rpc.RRef(value), type(value).__name__)


def held_here() -> list[tuple[str, str, str]]:
    """Give identity, description and owner of all that this worker holds."""
    with _lock:
        held = list(_here)
    return sorted({(one.identity, one.what, one.owner) for one in held})


def _value(value: Any) -> Any:
    if type(value) is Failure:
        raise value.exception()
    if (refused := refusal(value)) is not None:
        raise refused
    return value
