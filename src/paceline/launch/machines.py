"""What the machines of a run have in common: where they meet, and what must be the same on each. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from paceline.launch.rendezvous import Rendezvous
from paceline.training.options import RunOptions
from paceline.version import __version__

_EACH_HAS_ITS_OWN = ("out", "rendezvous", "join_timeout", "machine_timeout", "nodes", "tensorboard")
"""Options that may differ between machines, or that the rendezvous itself compares."""


def meeting(options: RunOptions) -> Rendezvous | None:
    """Give where this machine meets others; None where it is not to."""
    if options.rendezvous is None:
        return None
    timeout = options.machine_timeout
    every = max(1, timeout // 3)
    return Rendezvous.parse(
        options.rendezvous,
        options.nodes,
        join_s=options.join_timeout,
        keep_alive_s=every,
        keep_alive_attempts=-(-timeout // every),
    )


def agreed(
    function: Callable[..., Any] | str, options: RunOptions, record: Mapping[str, Any]
) -> dict[str, str]:
    """Give all that must be the same on every machine, by the names that the user knows."""
    facts: dict[str, Any] = {
        name: value for name, value in record.items() if name not in ("options", "overrides")
    }
    facts |= {name: value for name, value in asdict(options).items() if name not in _EACH_HAS_ITS_OWN}
    facts |= {f"--set {name}": value for name, value in facts.pop("settings", {}).items()}
    facts["program"] = facts.get("name") or getattr(function, "__qualname__", function)
    source, _, _ = str(facts.pop("task", "")).partition(":")
    if source.endswith(".py") and Path(source).is_file():
        # Its folder may be another one on each machine; what it says may not.
        facts[f"the source of {Path(source).name}"] = hashlib.sha256(Path(source).read_bytes()).hexdigest()[
            :12
        ]
    facts["paceline"], facts["torch"] = __version__, _installed("torch")
    facts.pop("name", None)
    return {name.replace("_", "-"): str(value) for name, value in facts.items() if value is not None}


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
