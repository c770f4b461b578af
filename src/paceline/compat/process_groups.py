"""What torch names or does differently between 2.11 and 2.13, under one name each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

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
    world = distributed_c10d._world  # noqa: SLF001
    default = distributed_c10d._get_default_group()  # noqa: SLF001
    backend, store = world.pg_map[default]
    members = list(ranks)
    group: dist.ProcessGroup
    group, _ = distributed_c10d._new_process_group_helper(  # noqa: SLF001
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
    distributed_c10d._set_pg_timeout(timeout, group)  # noqa: SLF001


def abort(group: dist.ProcessGroup) -> None:
    """End what is under way on NCCL's communicators; gloo does not listen to this."""
    distributed_c10d._abort_process_group(group)  # noqa: SLF001


def count_groups_anew() -> None:
    """Have the next group of all workers named as the first one of a process is.

    torch names groups by a count. A group that could not be formed, because a worker was lost in the middle, leaves it
    one ahead, and then this worker and one that has just started wait for each other under two names.
    """
    distributed_c10d._world.group_count = 0  # noqa: SLF001
