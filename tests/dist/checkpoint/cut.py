"""A state that is sharded among workers by hand, and what it is when whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.contents import CheckpointMetadata
from paceline.state.chunks import ChunkBounds, LocalState, TensorChunk, TensorMeta

WHOLE: dict[str, Tensor] = {
    "model/table": torch.arange(70, dtype=torch.float32).reshape(7, 10),
    "model/bias": torch.arange(3, dtype=torch.bfloat16),
    "model/count": torch.tensor(5),
    "model/nothing": torch.empty(0, 4),
    "optimizer/table/exp_avg": torch.arange(70, dtype=torch.float64).reshape(7, 10) / 3,
    "optimizer/table/step": torch.tensor(9.0),
}
REST: dict[str, Any] = {
    "optimizer": {"state": {"table": {"plain": 1}}, "groups": [{"lr": 0.1, "params": ["table"]}]},
    "scheduler": None,
    "scaler": None,
}


def moment(step: int) -> CheckpointMetadata:
    return CheckpointMetadata(
        step=step,
        position={"epoch": 0, "step": step, "number": step},
        meta={"shards": 4, "strategy": "by hand"},
    )


def rows(meta: TensorMeta, rank: int, size: int) -> ChunkBounds:
    """Give a worker's rows, as torch's own chunks are laid out: the last workers may have none."""
    each = -(-meta.shape[0] // size)
    start = min(rank * each, meta.shape[0])
    length = min(each, meta.shape[0] - start)
    return ChunkBounds((start, *(0 for _ in meta.shape[1:])), (length, *meta.shape[1:]))


def held(rank: int, size: int, *, cut: bool, add: float = 0.0) -> LocalState:
    """Give what one of so many workers holds: its rows of each matrix, and all of everything else."""
    chunks = {}
    for key, whole in WHOLE.items():
        values = whole + int(add) if whole.numel() else whole
        meta = TensorMeta(tuple(whole.shape), whole.dtype)
        bounds = rows(meta, rank, size) if cut and whole.dim() == 2 else ChunkBounds.whole(meta.shape)
        chunks[key] = TensorChunk(bounds.of(values).clone(), bounds, meta)
    # As in a pipeline: what the optimizer keeps that is no tensor is known where its parameter is, here to the last.
    known = {**REST["optimizer"], "state": REST["optimizer"]["state"] if not cut or rank == size - 1 else {}}
    return LocalState(chunks, {**REST, "optimizer": known})


def whole(add: float = 0.0) -> dict[str, Tensor]:
    return {key: value + int(add) if value.numel() else value for key, value in WHOLE.items()}
