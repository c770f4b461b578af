"""`paceline export`: the weights of a run as one safetensors file."""

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
    json_: AsJson = False,
) -> None:
    """Write the newest weights of a run as one safetensors file."""
    from paceline.checkpoint import export as write

    made = write(folder, target or folder / "model.safetensors", overwrite=overwrite)
    if json_:
        print_json(
            {key: str(value) if isinstance(value, Path) else value for key, value in asdict(made).items()}
        )
        return
    for path, reason in made.skipped:
        print(f"passed over {path}: {reason}")  # noqa: T201
    print(  # noqa: T201
        f"{made.path}: {made.tensors} tensors of step {made.step}, {made.size:,} bytes, sha256 {made.sha256[:16]}"
    )
