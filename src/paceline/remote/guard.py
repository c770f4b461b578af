"""What may be unpickled when a call arrives: plain values, tensors, references, and what was registered.

torch's RPC unpickles whatever it is sent, which lets a sender run anything. Here a message is read only if its seal shows that
the sender knows the session's key, and every class and function that it names is looked up in a short list first; what is
refused is logged.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.rpc import internal

from paceline.compat import rpc
from paceline.errors import CallRefusedError
from paceline.remote import registry

_CLASSES = {
    "builtins": {"set", "frozenset", "complex", "slice", "range", "bytearray", "object"},
    "collections": {"OrderedDict", "deque"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "uuid": {"UUID"},
    "torch": {"Size", "device"},
    "torch.nn.parameter": {"Parameter"},
    "numpy": {"ndarray", "dtype"},
    "torch.distributed.rpc": {"WorkerInfo"},
    **rpc.MESSAGE_NAMES,
}
UNREGISTERED = "is not registered, so no call may name it here"
UNSEALED = "a message does not carry this run's secret"
_SEAL_BYTES = 16
_own: dict[tuple[str, str], Any] = {}
_known: dict[tuple[str, str], Any] = {}
"""What was found before: a message names the same few things again and again."""


def own(thing: Any) -> Any:
    """Let one of our own functions or classes be named in a message."""
    _own[thing.__module__, thing.__qualname__] = thing
    return thing


def install(key: bytes) -> None:
    """Have torch seal messages with this key and read them through this list, in this process, from now on."""
    rpc.install(Guard, Sealed(key), _run_function)


def _run_function(called: Any) -> Any:
    """Do as torch's own does, but leave it to the caller to show what went wrong."""
    try:
        if isinstance(called, AttributeError):
            raise called.__cause__ or called
        return called.func(*called.args, **called.kwargs)
    except Exception as error:  # noqa: BLE001  (the caller gets it)
        # The caller makes an exception of this type again, which it must know.
        kind = AttributeError if isinstance(error, UnregisteredError) else type(error)
        return internal.RemoteException(f"{error}\n{traceback.format_exc()}", kind)


class Sealed(rpc.Pickler):  # type: ignore[misc]
    """Writes messages with a seal made of the session's key, and reads no other: nothing of a stranger's is unpickled."""

    def __init__(self, key: bytes) -> None:
        super().__init__()
        self._key = key

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Write a message."""
        content, tensors = super().serialize(obj)
        return self._seal(content) + content, tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        """Read a message, or give what is wrong with it, as torch does."""
        seal, content = binary_data[:_SEAL_BYTES], binary_data[_SEAL_BYTES:]
        if hmac.compare_digest(seal, self._seal(content)):
            return super().deserialize(content, tensor_table)
        print(f"paceline: refused: {UNSEALED}", file=sys.stderr)  # noqa: T201  (the worker's log)
        problem = AttributeError(UNSEALED)
        problem.__cause__ = UnregisteredError(UNSEALED)
        return problem

    def _seal(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, key=self._key, digest_size=_SEAL_BYTES).digest()


class UnregisteredError(AttributeError):
    """A message names what it may not; of this kind, so that torch answers the caller instead of dropping the message."""


def refusal(value: Any) -> CallRefusedError | None:
    """Return what is wrong with an answer that torch could not read, which it hands on as if it were the value."""
    if type(value) is AttributeError and isinstance(value.__cause__, UnregisteredError):
        return CallRefusedError(str(value.__cause__))
    return None


class Guard(pickle.Unpickler):
    """An unpickler that knows only what it may."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a message names, if it may."""
        found = _known.get((module, name))
        if found is None:
            found = _known[module, name] = self._look_up(module, name)
        return found

    def _look_up(self, module: str, name: str) -> Any:
        found = _own.get((module, name)) or registry.value_type(module, name)
        if found is not None:
            return found
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _receiver
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "builtins" and _is_exception(name):
            return super().find_class(module, name)
        text = f"{module}.{name} {UNREGISTERED}"
        print(f"paceline: refused: {text}", file=sys.stderr)  # noqa: T201  (the worker's log)
        raise UnregisteredError(
            f"{text}. Register it with @remote.service, @remote.function or @remote.allow."
        )


def _receiver(owner: Any, name: str) -> Callable[..., Any]:
    """Stand in for `getattr`, which torch's pickler uses for tensors, and for nothing else here."""
    if owner is not rpc.Pickler or name != rpc.TENSOR_RECEIVER:
        raise AttributeError(f"no call may name {name} of {owner!r} here.")
    found: Callable[..., Any] = getattr(owner, name)
    return found


def _is_exception(name: str) -> bool:
    found = getattr(__import__("builtins"), name, None)
    return isinstance(found, type) and issubclass(found, Exception)
