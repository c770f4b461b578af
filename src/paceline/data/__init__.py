"""Exact order, shards, and what each worker reads. Names load on first use: a launcher asks for shards without torch."""

from typing import TYPE_CHECKING

from paceline import lazy

if TYPE_CHECKING:
    from paceline.data.device import copied, to_device
    from paceline.data.permutation import EpochPermutation
    from paceline.data.sharded_loader import ShardedLoader
    from paceline.data.shards import batch_bounds, owned_shards, shard_bounds, steps_per_epoch
    from paceline.data.step_data import ShardData, StepData

__all__ = [
    "EpochPermutation",
    "ShardData",
    "ShardedLoader",
    "StepData",
    "batch_bounds",
    "copied",
    "owned_shards",
    "shard_bounds",
    "steps_per_epoch",
    "to_device",
]

__getattr__, __dir__ = lazy.names(
    __name__,
    {
        "ShardedLoader": "paceline.data.sharded_loader",
        "EpochPermutation": "paceline.data.permutation",
        "ShardData": "paceline.data.step_data",
        "StepData": "paceline.data.step_data",
        "batch_bounds": "paceline.data.shards",
        "copied": "paceline.data.device",
        "owned_shards": "paceline.data.shards",
        "shard_bounds": "paceline.data.shards",
        "steps_per_epoch": "paceline.data.shards",
        "to_device": "paceline.data.device",
    },
)
