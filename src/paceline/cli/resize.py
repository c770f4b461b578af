"""`paceline resize`: change the number of workers of a run in progress."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import AsJson
from paceline.cli.outcome import print_json


def resize(
    run: Annotated[Path, typer.Argument(help="The run folder (--out) of a run in progress.")],
    workers: Annotated[
        int, typer.Option(min=1, help="The number of workers from now on, at most the run's shards.")
    ],
    json_: AsJson = False,
) -> int:
    """Add workers to a run in progress, or release some; the answer stays the same."""
    from paceline.launch.control import order

    said = order(run, {"do": "resize", "workers": workers})
    if json_:
        print_json({"run": str(run), "workers": workers, "said": said})
    else:
        print(said)  # noqa: T201
    return 0
