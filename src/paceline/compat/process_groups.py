"""Process groups beyond what `torch.distributed` says in public, and what 2.11 and 2.13 name differently."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from paceline.compat.python_process_group import PythonProcessGroup

# 2.13 renamed these two and warns about the old names; 2.11 has only the old ones.
all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def new_group(name: str, ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    """Form a group of the given global ranks, in the given order; only its members call this.

    `dist.new_group` names a group after a count of the groups this process holds. Once ranks have made or
    closed different numbers of groups (a nested split is enough) the names differ and the members wait for
    each other until the timeout; and 2.11 always sorts the ranks. Here the caller, who agreed with the
    others, gives the name.
    """
    world = distributed_c10d._world
    default = distributed_c10d._get_default_group()
    backend, store = world.pg_map[default]
    members = list(ranks)
    group: dist.ProcessGroup
    group, _ = distributed_c10d._new_process_group_helper(
        len(members),
        members.index(default.rank()),
        members,
        dist.Backend(backend),
        store,
        distributed_c10d.GroupName(name),
        timeout=timeout,
    )
    world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(members)}
    return group


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Change how long the operations of a group may take; on gloo not those between two ranks, which are given it each time."""
    if isinstance(group, PythonProcessGroup):
        group.set_timeout(timeout)
        return
    distributed_c10d._set_pg_timeout(timeout, group)


def abort(group: dist.ProcessGroup) -> None:
    """End what is in flight on NCCL's communicators; gloo does not listen to this."""
    distributed_c10d._abort_process_group(group)


def count_groups_anew() -> None:
    """Reset torch's group counter, so that the next group of all workers is named like a process's first.

    torch names groups by a count. A group that could not be formed, because a worker was lost in the middle, leaves it
    one ahead, and then this worker and one that has just started wait for each other under two names.
    """
    distributed_c10d._world.group_count = 0


def is_formed(group: dist.ProcessGroup) -> bool:
    """Return whether torch knows this group, which was not destroyed then."""
    return dist.is_initialized() and group in distributed_c10d._world.pg_map


def flight_record() -> list[dict[str, Any]]:
    """Return what torch's flight recorder holds of the last collectives; nothing where a build has no recorder."""
    try:
        from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]
    except ImportError:
        return []
    # torch's own bytes, from this process. Stack traces would take seconds to look up.
    record: dict[str, Any] = pickle.loads(_dump_fr_trace(includeStackTraces=False))  # noqa: S301
    return list(record.get("entries", ()))
