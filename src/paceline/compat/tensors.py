"""What a tensor tells of itself only under private names."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class WeakStorage(Protocol):
    """A reference that does not keep a storage's memory."""

    def expired(self) -> bool:
        """Return whether that is gone."""


BOOKKEEPING = ("_version", "_backward_hooks", "_post_accumulate_grad_hooks")
"""Properties of a tensor that are known without its values, beside the public ones."""

write_count: Callable[[Tensor], int] = attrgetter("_version")
"""Return how often a tensor was written to in place (`Tensor._version`); an inference tensor has no such count."""
hooks_of: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
"""Return the hooks of `register_hook` by their numbers, None where there never was one (`Tensor._backward_hooks`)."""
post_accumulate_hooks_of: Callable[[Tensor], dict[int, Any] | None] = attrgetter(
    "_post_accumulate_grad_hooks"
)
"""Return the hooks of `register_post_accumulate_grad_hook`, None where there never was one."""
storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Return the address of a storage's own record, which one without memory has too (`UntypedStorage._cdata`)."""
weak_storage: Callable[[torch.UntypedStorage], WeakStorage] = StorageWeakRef
"""Return a reference to a storage that keeps its record, and so its address, but not its memory."""
make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
"""Return a tensor of a subclass that has no memory."""
no_torch_function = torch._C.DisableTorchFunctionSubclass
"""A context in which tensors of a subclass are taken for plain ones."""


def share_hooks(master: Tensor, other: Tensor) -> None:
    """Make another tensor run the hooks of `master`, including those that are registered later."""
    other._backward_hooks = master._backward_hooks


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices and values of a sparse tensor that may not be coalesced; the public names refuse that."""
    return tensor._indices(), tensor._values()


def local_part(tensor: Tensor) -> Tensor:
    """Return this worker's part of a DTensor, outside of autograd (`DTensor._local_tensor`); of another tensor itself."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def has_local_part(tensor: Tensor) -> bool:
    """Return whether this is a DTensor, without importing its class."""
    return hasattr(tensor, "_local_tensor")


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors begin at the same place of one memory, also where there is none behind it."""
    return (
        storage_key(one.untyped_storage()) == storage_key(other.untyped_storage())
        and one.storage_offset() == other.storage_offset()
    )


has_compatible_memory: Callable[[Tensor, Tensor], bool] = torch._has_compatible_shallow_copy_type
"""Return whether `.data` of one tensor can become that of another."""
