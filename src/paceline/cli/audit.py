"""`paceline audit`: show from a run's ledgers that every sample was used exactly once an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import AsJson
from paceline.cli.outcome import show_report


def audit(
    folder: Annotated[Path, typer.Argument(help="The folder of a run (--out).")],
    json_: AsJson = False,
) -> int:
    """Check that every sample was used exactly once an epoch, whatever happened to the workers."""
    from paceline.verify.receipts.audit import audit as check

    return show_report(check(folder), as_json=json_)
