"""How an epoch is cut: into steps, a step's global batch into shards, the shards among workers.

Everything here is integer arithmetic on half-open ranges. Nothing is padded and nothing is dropped: the last
batch of an epoch may be short, and where it has fewer samples than there are shards some shards are empty.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import InputError


def steps_per_epoch(samples: int, batch_size: int) -> int:
    """Count the global batches of an epoch, a short last one included."""
    return -(-samples // batch_size)


def batch_bounds(step: int, batch_size: int, samples: int) -> tuple[int, int]:
    """Return the positions of an epoch that make up the global batch of a step."""
    return min(step * batch_size, samples), min((step + 1) * batch_size, samples)


def shard_bounds(shard: int, shards: int, size: int) -> tuple[int, int]:
    """Return the part of a global batch of `size` samples that a shard holds."""
    return shard * size // shards, (shard + 1) * size // shards


def owned_shards(rank: int, workers: int, shards: int, shares: Sequence[int] | None = None) -> range:
    """Return the contiguous shards that a worker carries; every worker carries at least one.

    `shares` says how many each carries, where they are not dealt out evenly. One after the last, a server, carries none.
    """
    if rank >= workers:
        return range(shards, shards)
    if shares is not None:
        start = sum(shares[:rank])
        return range(start, start + shares[rank])
    if workers > shards:
        raise InputError(
            f"{workers} workers cannot share {shards} shards: a worker would have nothing to do. "
            f"Use --workers {shards} or fewer, or start the run with --shards {workers} or more."
        )
    return range(rank * shards // workers, (rank + 1) * shards // workers)
