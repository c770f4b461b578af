"""`paceline export`: the weights of a run as safetensors."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import AsJson
from paceline.cli.outcome import print_json


def export(
    folder: Annotated[Path, typer.Argument(help="A run folder, or one checkpoint in it.")],
    target: Annotated[
        Path | None, typer.Option("--to", help="The file to write. Default: FOLDER/model.safetensors.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file that is there already.")
    ] = False,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            "--max-shard-size",
            metavar="SIZE",
            help="Write several files of at most so much (2GB, say), and an index of them.",
        ),
    ] = None,
    json_: AsJson = False,
) -> None:
    """Write the newest weights of a run as one safetensors file, or as a set of them with its index."""
    from paceline.checkpoint import export as write

    made = write(
        folder,
        target or folder / "model.safetensors",
        overwrite=overwrite,
        max_shard_size=max_shard_size,
    )
    if json_:
        skipped = [(str(path), reason) for path, reason in made.skipped]
        print_json(asdict(made) | {"path": str(made.path), "source": str(made.source), "skipped": skipped})
        return
    for path, reason in made.skipped:
        print(f"passed over {path}: {reason}")  # noqa: T201
    print(  # noqa: T201
        f"{made.path}: {made.tensors} tensors of step {made.step}, {made.size:,} bytes"
        f"{f' in {len(made.files)} files' if made.files[1:] else ''}, sha256 {made.sha256[:16]}"
    )
