"""Exact order, shards, and what each worker reads. Names load on first use: a launcher asks for shards without torch."""

from typing import TYPE_CHECKING

from paceline import lazy

if TYPE_CHECKING:
    from paceline.data.copying import copied
    from paceline.data.device import to_device
    from paceline.data.orders import Batches, Bucketed, Computed, Curriculum, Order, Weighted
    from paceline.data.parts import Parts
    from paceline.data.permutation import EpochPermutation
    from paceline.data.sharded_loader import ShardedLoader
    from paceline.data.shards import batch_bounds, owned_shards, shard_bounds, steps_per_epoch
    from paceline.data.step_data import ShardData, StepData
    from paceline.data.tar_files import TarFiles
    from paceline.data.wrapped import TextFiles, packed, shuffled

__all__ = [
    "Batches",
    "Bucketed",
    "Computed",
    "Curriculum",
    "EpochPermutation",
    "Order",
    "Parts",
    "ShardData",
    "ShardedLoader",
    "StepData",
    "TarFiles",
    "TextFiles",
    "Weighted",
    "batch_bounds",
    "copied",
    "owned_shards",
    "packed",
    "shard_bounds",
    "shuffled",
    "steps_per_epoch",
    "to_device",
]

__getattr__, __dir__ = lazy.names(
    __name__,
    {
        "ShardedLoader": "paceline.data.sharded_loader",
        **dict.fromkeys(
            ("Batches", "Bucketed", "Computed", "Curriculum", "Order", "Weighted"), "paceline.data.orders"
        ),
        "EpochPermutation": "paceline.data.permutation",
        "Parts": "paceline.data.parts",
        **dict.fromkeys(("TextFiles", "packed", "shuffled"), "paceline.data.wrapped"),
        "TarFiles": "paceline.data.tar_files",
        "ShardData": "paceline.data.step_data",
        "StepData": "paceline.data.step_data",
        "batch_bounds": "paceline.data.shards",
        "copied": "paceline.data.copying",
        "owned_shards": "paceline.data.shards",
        "shard_bounds": "paceline.data.shards",
        "steps_per_epoch": "paceline.data.shards",
        "to_device": "paceline.data.device",
    },
)
