"""What one rank is about to do, as bytes of a fixed size; and the table that shows where ranks differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.compat import python
from paceline.errors import CollectiveMismatchError

_PACKAGE = str(Path(__file__).parent)
_WIDTHS = (24, 24, 240, 224)
"""Bytes for operation, number, arguments and call site."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One operation as one rank calls it."""

    operation: str
    number: int
    arguments: str
    site: str

    def encode(self) -> Tensor:
        """Pack into bytes whose number does not depend on what is said."""
        fields = (self.operation, str(self.number), self.arguments, self.site)
        packed = bytearray()
        for field, width in zip(fields, _WIDTHS, strict=True):
            packed += field.encode("ascii", "replace")[:width].ljust(width, b"\0")
        return torch.frombuffer(packed, dtype=torch.uint8)

    @classmethod
    def decode(cls, data: Tensor) -> CollectiveCall:
        """Unpack what another rank sent."""
        packed, fields, start = data.numpy().tobytes(), [], 0
        for width in _WIDTHS:
            fields.append(packed[start : start + width].rstrip(b"\0").decode("ascii"))
            start += width
        return cls(fields[0], int(fields[1]), fields[2], fields[3])


def describe(*tensors: Tensor, free_rows: bool = False) -> str:
    """Name shape and type; with `free_rows` the first dimension may be anything."""
    names = []
    for tensor in tensors:
        sizes = [str(size) for size in tensor.shape]
        if free_rows and sizes:
            sizes[0] = "*"
        names.append(f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(sizes)}]")
    return "; ".join(names)


def call_site() -> str:
    """Return file and line of the nearest caller outside this package."""
    frame = python.frame(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    where = Path(frame.f_code.co_filename)
    return f"{'/'.join(where.parts[-3:])}:{frame.f_lineno}"[-_WIDTHS[-1] :]


def compare(calls: Mapping[int, CollectiveCall]) -> None:
    """Raise when the ranks of a group are not all in the same collective."""
    kinds = {(call.operation, call.number, call.arguments) for call in calls.values()}
    if len(kinds) > 1:
        number = min(call.number for call in calls.values())
        raise CollectiveMismatchError(_report(f"the ranks disagree about collective {number}", calls))


def compare_pair(sender: int, offer: CollectiveCall, receiver: int, want: CollectiveCall) -> None:
    """Raise when what one rank sends is not what the other expects."""
    if (offer.number, offer.arguments) != (want.number, want.arguments):
        fact = f"rank {sender} sends what rank {receiver} does not expect"
        raise CollectiveMismatchError(_report(fact, {sender: offer, receiver: want}))


def _report(fact: str, calls: Mapping[int, CollectiveCall]) -> str:
    rows = [("rank", "operation", "arguments", "called at")]
    rows += [
        (str(rank), call.operation, call.arguments or "-", call.site) for rank, call in sorted(calls.items())
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    advice = "Make every rank take the same branch up to here, with the same arguments."
    return "\n  ".join([f"{fact}. {advice}", *lines])
