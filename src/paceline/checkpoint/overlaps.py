"""Finds the stored chunks that a part of a tensor comes from, with the planner of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from paceline.checkpoint.dtypes import dtype_named
from paceline.checkpoint.stored import Stored
from paceline.state.chunks import ChunkBounds


def overlaps(stored: Stored, bounds: ChunkBounds) -> Iterator[tuple[int, ChunkBounds, ChunkBounds]]:
    """Yield, for a part of a tensor, the stored chunks it comes from: which one, its part of it, and where that goes."""
    wanted = ChunkStorageMetadata(offsets=torch.Size(bounds.offset), sizes=torch.Size(bounds.shape))
    for item in create_read_items_for_chunk_list("", metadata_of(stored), [wanted]):
        if item.storage_index.index is None:
            raise RuntimeError("a chunk without its number")
        lengths = tuple(item.lengths)
        yield (
            item.storage_index.index,
            ChunkBounds(tuple(item.storage_offsets), lengths),
            ChunkBounds(tuple(item.dest_offsets), lengths),
        )


def metadata_of(stored: Stored) -> TensorStorageMetadata:
    """Return a stored tensor as torch.distributed.checkpoint describes it."""
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype_named(stored.dtype)),
        size=torch.Size(stored.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(bounds.offset), sizes=torch.Size(bounds.shape))
            for bounds in stored.chunks
        ],
    )
