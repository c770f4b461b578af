"""What one machine's launcher tells another's about its workers, as plain values that go into a message and come out again."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from paceline.launch.failures import Failure
from paceline.observe.verdict import Collective, Evidence, Frame
from paceline.world.status_page import Kind, Phase, Reading

LARGEST_RESULT = 1 << 20
"""What a worker returned travels only where it is small and plain: whoever wants more reads it from a file."""


def pack_reading(reading: Reading, now: float) -> dict[str, Any]:
    """Write a reading down with ages in place of moments: clocks of two machines do not compare."""
    return asdict(reading) | {"since": now - reading.since, "touched": now - reading.touched}


def unpack_reading(packed: dict[str, Any], now: float) -> Reading:
    """Read it back as of now, however long ago it was sent: nobody is silent only because the network is."""
    ages = {name: now - packed[name] for name in ("since", "touched")}
    return Reading(**packed | ages | {"phase": Phase(packed["phase"]), "kind": Kind(packed["kind"])})


def pack_evidence(evidence: Evidence) -> dict[str, Any]:
    """Write down what was seen of a worker."""
    seen = asdict(replace(evidence, threads=(), pending=()))
    seen["reading"] = pack_reading(evidence.reading, 0.0)
    seen["threads"] = [[asdict(frame) for frame in thread] for thread in evidence.threads]
    seen["pending"] = [asdict(one) for one in evidence.pending]
    return seen


def unpack_evidence(packed: dict[str, Any]) -> Evidence:
    """Read it back."""
    return Evidence(
        **packed
        | {
            "reading": unpack_reading(packed["reading"], 0.0),
            "threads": tuple(tuple(Frame(**frame) for frame in thread) for thread in packed["threads"]),
            "pending": tuple(Collective(**one) for one in packed["pending"]),
        }
    )


def pack_said(kind: str, value: Any) -> Any:
    """Write down what a worker said."""
    if isinstance(value, Failure):
        return asdict(value)
    if kind != "result":
        return value
    try:
        plain = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return None
    return value if len(plain) <= LARGEST_RESULT else None


def unpack_said(kind: str, value: Any) -> Any:
    """Read it back."""
    return Failure(**value) if kind in ("failure", "raised") else value
