"""Where torch's RPC lets a reader and a writer of messages be chosen, and what it counts without a reset."""

from __future__ import annotations

from collections.abc import Callable
from pickle import Unpickler
from typing import Any

from torch.distributed import autograd, rpc
from torch.distributed.rpc import api, internal

Pickler: Any = internal._InternalRPCPickler
"""Writes and reads messages."""
TENSOR_RECEIVER = "_tensor_receiver"
"""The method of `Pickler` that a message names, through `getattr`, for each tensor in it."""
MESSAGE_NAMES = {
    "torch.serialization": {"_get_layout"},
    "torch._utils": {"_rebuild_parameter"},
    "torch.distributed.rpc.internal": {"PythonUDF", "RemoteException", "_InternalRPCPickler"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "numpy.core.numeric": {"_frombuffer"},
    "torch.distributed.rpc.api": {
        "_gather_to_leader",
        "_broadcast_to_followers",
        "_delete_all_user_and_unforked_owner_rrefs",
    },
    "torch._C._distributed_rpc": {"WorkerInfo"},
}
"""What messages of torch's own, and of plain tensors and arrays, name: by module."""


def install(unpickler: type[Unpickler], pickler: Any, run_function: Callable[[Any], Any]) -> None:
    """Make RPC write messages with `pickler`, read them with `unpickler` and run calls with `run_function`."""
    internal._unpickler = unpickler
    internal._internal_rpc_pickler = api._default_pickler = pickler
    internal._run_function = run_function  # looked up whenever an agent starts


def begin_session(number: int) -> None:
    """Prepare this process for an agent as `init_rpc` does, which cannot be given a store; `number` is the worker's own.

    torch counts what workers of the same names do together; one that is new among them begins at 0.
    """
    autograd._init(number)  # type: ignore[attr-defined]
    rpc.api._all_gather_sequence_id.clear()


def options(
    *, threads: int, timeout_s: float, device_maps: dict[str, dict[Any, Any]], transports: list[str] | None
) -> rpc.TensorPipeRpcBackendOptions:
    """Return the options of an agent; `transports` names those it may use, in the order of choice."""
    return rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=threads, rpc_timeout=timeout_s, device_maps=device_maps, _transports=transports
    )
