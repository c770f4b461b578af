"""The number under which torch's distributed autograd knows this process: given once in its life, where a rank may change."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_number: int | None = None


def number(store: Store, rank: int, size: int) -> int:
    """Return a number that no other process of the session has; all of them ask together."""
    global _number  # noqa: PLW0603  (torch keeps it for the process, too)
    store.set(f"number/{rank}", "none" if _number is None else str(_number))
    kept = [bytes(store.get(f"number/{one}")).decode() for one in range(size)]
    free = (one for one in itertools.count() if str(one) not in kept)
    found = {one: next(free) for one in range(size) if kept[one] == "none"}
    if _number is None:
        _number = found[rank]
    return _number
