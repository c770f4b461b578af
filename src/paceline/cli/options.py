"""Options that several commands share, each said once."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paceline import ranges


def folder_option(words: str) -> Any:
    """Return the option --out: a folder that a file system can have."""
    return typer.Option("--out", parser=lambda text: ranges.folder("--out", text), metavar="PATH", help=words)


Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="An argument of the task's constructor; may be repeated."
    ),
]
BatchSize = Annotated[int | None, typer.Option(help="Samples of the GLOBAL batch. Default: the task's.")]
Seed = Annotated[int | None, typer.Option(help="Where all randomness comes from. Default: the task's.")]
Threads = Annotated[int | None, typer.Option(help="Threads of each worker. Default: cores / shards.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Nodes = Annotated[str, typer.Option(help="Machines: how many, or from how many to how many (1:4).")]
Rendezvous = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="Where machines meet: an address of the one that leads. See --nodes."
    ),
]
JoinTimeout = Annotated[float, typer.Option(help="Seconds to wait for the machines to come together.")]
MachineTimeout = Annotated[
    int, typer.Option(help="Seconds without a sign of life after which a machine is given up.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, the last line of standard output.")
]
Servers = Annotated[
    int | None, typer.Option(help="Processes beside them that hold parameters, for ps. Default: 1.")
]
Epochs = Annotated[int | None, typer.Option(help="Passes over the data. Default: the task's.")]
Horizon = Annotated[
    int | None,
    typer.Option(
        help="Steps that the learning-rate schedule is laid out for. Default: the whole run's; a resumed run keeps its own."
    ),
]
Precision = Annotated[str | None, typer.Option(help="fp32, bf16 or fp16 (CUDA only). Default: the task's.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the model with torch.compile.")]
SyncBatchnorm = Annotated[
    bool,
    typer.Option("--sync-batchnorm", help="Batch statistics of the whole global batch; level numeric."),
]
MicroBatch = Annotated[
    int | None, typer.Option(help="Most samples in one forward pass; the rest is accumulated.")
]
Clip = Annotated[float | None, typer.Option(help="Largest norm of the global gradient. Default: the task's.")]
LoaderWorkers = Annotated[
    int | None, typer.Option(help="Processes that load data for each worker. Default: the task's.")
]
Backend = Annotated[str, typer.Option(help="auto, gloo or nccl.")]
SharedMemoryChannel = Annotated[
    str | None,
    typer.Option(help="How workers of one host exchange gradients: auto, memory (shared) or gloo (sockets)."),
]
