"""Exact order, shards, and what each worker reads: map-style data sets and streams."""

from paceline.data.feed import Feed
from paceline.data.moving import to_device
from paceline.data.order import Order
from paceline.data.shards import batch_bounds, owned_shards, shard_bounds, steps_per_epoch
from paceline.data.step_data import ShardData, StepData

__all__ = [
    "Feed",
    "Order",
    "ShardData",
    "StepData",
    "batch_bounds",
    "owned_shards",
    "shard_bounds",
    "steps_per_epoch",
    "to_device",
]
