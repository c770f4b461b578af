"""What one machine's launcher tells another's about its workers, as plain values that go into a message and come out again.

Whatever comes out is checked: what another launcher says must not end this one.
"""

from __future__ import annotations

import functools
import json
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, ParamSpec, TypeVar

from paceline.errors import PacelineError
from paceline.launch.failures import WorkerFailure
from paceline.observe.verdict import Collective, Frame, WorkerEvidence
from paceline.recovery.membership import Standing
from paceline.world.status_page import OperationKind, Phase, Reading

LARGEST_RESULT = 1 << 20
"""What a worker returned travels only where it is small and plain: whoever wants more reads it from a file."""
_KINDS = {"began", "met", "ready", "broken", "leaving", "raised", "failure", "result"}
_FAILURES = {"few", "hang", "input", "disk", "code", "signal", "exit", "peer"}
Record = TypeVar("Record")
Given = ParamSpec("Given")


class MalformedError(PacelineError):
    """A message that no launcher of this version sends."""


def _reads(function: Callable[Given, Record]) -> Callable[Given, Record]:
    """Have a function that only reads raise one kind of error."""

    @functools.wraps(function)
    def read(*args: Given.args, **kwargs: Given.kwargs) -> Record:
        try:
            return function(*args, **kwargs)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise MalformedError(f"{type(error).__name__}: {error}") from error

    return read


@_reads
def made(kind: type[Record], fields: Any) -> Record:
    """Make a record of fields that came from elsewhere; MalformedError where they are not its own."""
    return _checked(kind(**fields))


def pack_reading(reading: Reading, now: float) -> dict[str, Any]:
    """Write a reading down with ages in place of moments: clocks of two machines do not compare."""
    return asdict(reading) | {"since": now - reading.since, "touched": now - reading.touched}


@_reads
def unpack_reading(packed: dict[str, Any], now: float) -> Reading:
    """Read it back as of now, however long ago it was sent: nobody is silent only because the network is."""
    ages = {name: now - packed[name] for name in ("since", "touched")}
    return _checked(
        Reading(**packed | ages | {"phase": Phase(packed["phase"]), "kind": OperationKind(packed["kind"])})
    )


def pack_evidence(evidence: WorkerEvidence) -> dict[str, Any]:
    """Write down what was seen of a worker."""
    seen = asdict(replace(evidence, threads=(), pending=()))
    seen["reading"] = pack_reading(evidence.reading, 0.0)
    seen["threads"] = [[asdict(frame) for frame in thread] for thread in evidence.threads]
    seen["pending"] = [asdict(one) for one in evidence.pending]
    return seen


@_reads
def unpack_evidence(packed: dict[str, Any]) -> WorkerEvidence:
    """Read it back."""
    threads = tuple(tuple(made(Frame, frame) for frame in thread) for thread in packed["threads"])
    pending = tuple(made(Collective, one) for one in packed["pending"])
    reading = unpack_reading(packed["reading"], 0.0)
    return _checked(WorkerEvidence(**packed | {"reading": reading, "threads": threads, "pending": pending}))


def pack_said(kind: str, value: Any) -> Any:
    """Write down what a worker said."""
    if isinstance(value, WorkerFailure):
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
    if kind not in _KINDS:
        raise MalformedError(f"a worker says {kind!r}")
    if kind == "broken":
        made(Standing, value)
    if kind not in ("failure", "raised"):
        return value
    if isinstance(value, dict) and isinstance(value.get("shards"), list):
        value = value | {"shards": tuple(value["shards"])}  # JSON has no tuples
    failure = made(WorkerFailure, value)
    if failure.kind not in _FAILURES:
        raise MalformedError(f"a worker failed by {failure.kind!r}")
    return failure


@functools.cache
def _types(kind: Any) -> dict[str, tuple[type, ...]]:
    """Return what each field of a record may be; looked up once, since readings of thousands of workers come every second."""
    return {name: tuple(_plain(hint)) for name, hint in typing.get_type_hints(kind).items()}


def _plain(hint: Any) -> Iterator[type]:
    if isinstance(hint, types.UnionType):
        for one in typing.get_args(hint):
            yield from _plain(one)
    elif hint is float:
        yield from (int, float)
    else:
        yield typing.get_origin(hint) or hint


def _checked(record: Record) -> Record:
    """Return a record whose fields are of their types, as far as plain types go."""
    kind: Any = type(record)
    for name, allowed in _types(kind).items():
        value = getattr(record, name)
        # A bool is an int to Python, and to nobody else.
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise TypeError(f"{name} of a {kind.__name__} is {value!r}"[:200])
    return record
