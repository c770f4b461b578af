"""The keywords of `paceline.launch` and `paceline.train` for whoever reads types before anything runs: editors, type checkers.

`python -m tests.unit.launch.keywords` writes the fields from the classes of options: no type checker reads them there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from paceline.strategies.tuning import Tuning


class LaunchOptions(TypedDict, total=False):
    """Every option of a run."""

    strategy: str
    workers: int
    shards: int | None
    exact: str | None
    seed: int
    device: str
    out: str | Path | None
    resume: bool
    num_workers: int
    micro_batch: int | None
    precision: str
    compile: bool
    cuda_graph: str
    sync_batchnorm: bool
    transport: str
    backend: str
    find_unused_parameters: bool
    check_collectives: bool
    profile: bool
    save_every: int | str | None
    keep: int
    keep_best: int
    save_async: bool
    peer_snapshots: int
    snapshot_every: int
    sink: str | type | Sequence[str | type] | None
    elastic: bool
    min_workers: int
    max_restarts: int
    hang_timeout: float
    grace: float
    rebalance: bool
    nodes: int | str
    rendezvous: str | None
    lead: bool | None
    secret_file: str | None
    join_timeout: float
    machine_timeout: int
    servers: int | None
    tuning: Mapping[str, Any] | Tuning
    activation_checkpointing: str
    activation_checkpointing_every: int
    shard_optimizer: bool
    compress: str
    bucket_mb: float | None
    reshard: bool
    fsdp_dtype: str
    offload: bool
    schedule: str
    stages_per_worker: int | None
    sequence_parallel: bool
    loss_parallel: bool
    local_steps: int
    local_warmup: int
    outer_optimizer: str
    outer_lr: float
    outer_momentum: float
    staleness: int


class TrainOptions(LaunchOptions, total=False):
    """Those that a Task has beside them."""

    epochs: int | None
    steps: int | None
    horizon: int | None
    batch_size: int | None
    max_grad_norm: float | None
    eval_every: int | str | None
    predict: Path | None
