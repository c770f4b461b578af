"""Whose output is shown while a script runs, and behind which name, as torchrun's --redirects and --tee say it. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.errors import InputError

STREAMS = ("out", "err")
LONGEST_LINE = 1 << 16
"""A line that does not end is shown in pieces of this many bytes."""


@dataclass(frozen=True, kw_only=True)
class WorkerOutput:
    """What of each worker is shown: everything but what is redirected, line by line; what is teed, behind a name."""

    role: str
    redirects: Callable[[int], int]
    """The streams of a local rank that are in its log alone: 1 standard output, 2 standard error, 3 both."""
    tee: Callable[[int], int]
    only: frozenset[int] | None = None
    """The local ranks that are shown at all."""
    _unfinished: dict[tuple[int, str], bytes] = field(default_factory=dict)

    @classmethod
    def read(cls, role: str, redirects: str, tee: str, only: str | None) -> WorkerOutput:
        """Read the three options."""
        ranks = None
        if only is not None:
            if re.fullmatch(r"\s*[0-9]{1,4}\s*(,\s*[0-9]{1,4}\s*)*", only) is None:
                raise InputError(f"--local-ranks-filter {only!r} is no list of local ranks, such as 0,1.")
            ranks = frozenset(map(int, only.split(",")))
        return cls(
            role=role, redirects=_streams("--redirects", redirects), tee=_streams("--tee", tee), only=ranks
        )

    def shown(self, local_rank: int, stream: str, chunk: bytes) -> bytes:
        """Return what is to be shown once a worker has written some bytes: whole lines."""
        prefix = self._prefix(local_rank, stream)
        if prefix is None:
            return b""
        *lines, rest = (self._unfinished.get((local_rank, stream), b"") + chunk).split(b"\n")
        if len(rest) > LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        self._unfinished[local_rank, stream] = rest
        return b"".join(prefix + line + b"\n" for line in lines)

    def rest(self, local_rank: int, stream: str) -> bytes:
        """Return the end of what a worker wrote, where it ends without a line end."""
        left = self._unfinished.pop((local_rank, stream), b"")
        return (self._prefix(local_rank, stream) or b"") + left + b"\n" if left else b""

    def _prefix(self, local_rank: int, stream: str) -> bytes | None:
        """Return what is in front of each line; None where a stream is not shown."""
        bit = 1 << STREAMS.index(stream)
        if self.only is not None and local_rank not in self.only:
            return None
        if self.tee(local_rank) & bit:
            return f"[{self.role}{local_rank}]:".encode()
        return None if self.redirects(local_rank) & bit else b""


def _streams(name: str, text: str) -> Callable[[int], int]:
    """Read 3, or 0:1,1:2, as the streams of each local rank."""
    if re.fullmatch(r"\s*[0-3]\s*", text):
        every = int(text)
        return lambda _: every
    if re.fullmatch(r"\s*[0-9]{1,4}:[0-3]\s*(,\s*[0-9]{1,4}:[0-3]\s*)*", text) is None:
        raise InputError(
            f"{name} {text!r} names no streams. Give 0, 1 (standard output), 2 (standard error) or 3 (both), or RANK:STREAMS,..."
        )
    pairs = (part.split(":") for part in text.split(","))
    named: Mapping[int, int] = {int(rank): int(streams) for rank, streams in pairs}
    return lambda local_rank: named.get(local_rank, 0)
