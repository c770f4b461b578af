"""What may be unpickled when a call arrives: plain values, tensors, references, and what was registered.

torch's RPC unpickles whatever it is sent, which lets a sender run anything. Here every class and function that a message
names is looked up in a short list first; one that is not there is refused, and the refusal is logged.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.rpc import internal

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
    "torch.serialization": {"_get_layout"},
    "torch._utils": {"_rebuild_parameter"},
    "torch.nn.parameter": {"Parameter"},
    "torch.distributed.rpc.internal": {"PythonUDF", "RemoteException", "_InternalRPCPickler"},
    "numpy": {"ndarray", "dtype"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "numpy.core.numeric": {"_frombuffer"},
    # torch's own messages when workers meet and part.
    "torch.distributed.rpc.api": {
        "_gather_to_leader",
        "_broadcast_to_followers",
        "_delete_all_user_and_unforked_owner_rrefs",
    },
    "torch._C._distributed_rpc": {"WorkerInfo"},
    "torch.distributed.rpc": {"WorkerInfo"},
}
_RECEIVERS = ("_tensor_receiver", "_py_rref_receiver")
_own: dict[tuple[str, str], Any] = {}


def own(thing: Any) -> Any:
    """Let one of our own functions or classes be named in a message."""
    _own[thing.__module__, thing.__qualname__] = thing
    return thing


def install() -> None:
    """Have torch read messages through this list, in this process, from now on."""
    internal._unpickler = _Guard  # noqa: SLF001  (the one place where torch lets a reader be chosen)


class _Guard(pickle.Unpickler):
    """An unpickler that knows only what it may."""

    def find_class(self, module: str, name: str) -> Any:
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
        text = f"{module}.{name} is not registered, so no call may name it here"
        print(f"paceline: refused: {text}", file=sys.stderr)  # noqa: T201  (the worker's log)
        # Of this type, so that torch answers the caller instead of dropping the message.
        raise AttributeError(f"{text}. Register it with @remote.service, @remote.function or @remote.allow.")


def _receiver(owner: Any, name: str) -> Callable[..., Any]:
    """Stand in for `getattr`, which torch's pickler uses for tensors and references, and for nothing else."""
    if owner is not internal._InternalRPCPickler or name not in _RECEIVERS:  # noqa: SLF001
        raise AttributeError(f"no call may name {name} of {owner!r} here.")
    found: Callable[..., Any] = getattr(owner, name)
    return found


def _is_exception(name: str) -> bool:
    found = getattr(__import__("builtins"), name, None)
    return isinstance(found, type) and issubclass(found, Exception)
