"""Names a run folder that nobody has yet."""

from __future__ import annotations

import re
import time
from pathlib import Path

from paceline.world import env


def new_folder(name: str) -> Path:
    """Return runs/NAME-TIME, with a number behind it when that is taken."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")
    identity = env.identity()
    if identity is not None:
        # Every rank of a world that somebody else started must come to the same name, whatever its clock says.
        return Path("runs") / f"{plain}-{env.read('TORCHELASTIC_RUN_ID') or 'world'}-{identity.master_port}"
    first = Path("runs") / f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}"
    chosen, number = first, 1
    while chosen.exists():
        number += 1
        chosen = first.with_name(f"{first.name}-{number}")
    return chosen
