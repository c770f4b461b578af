"""Options that several commands share, each said once."""

from __future__ import annotations

from typing import Annotated

import typer

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
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, the last line of standard output.")
]
