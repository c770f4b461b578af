"""`paceline stop`: end a run in progress after its step, with a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import AsJson
from paceline.cli.outcome import print_json


def stop(
    run: Annotated[Path, typer.Argument(help="The run folder (--out) of a run in progress on this machine.")],
    json_: AsJson = False,
) -> int:
    """End a run in progress after its step, with a checkpoint, as SIGTERM does; --resume goes on from there."""
    from paceline.launch.control import order

    said = order(run, {"do": "stop"})
    if json_:
        print_json({"run": str(run), "said": said})
    else:
        print(said)  # noqa: T201
    return 0
