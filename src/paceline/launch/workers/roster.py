"""The workers of a launch, one entry each, and workers.json, which tells everybody who runs where."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.launch.failures import WorkerFailure
from paceline.launch.file_writer import FileWriter

NAME = "workers.json"


@dataclass
class RosterEntry:
    """One worker as its launcher knows it."""

    number: int
    """Which worker it is, for all its life; ranks change."""
    node: int
    """Which machine it runs on."""
    rank: int
    """In its group; -1 as long as it is in none."""
    slot: int
    """Names its log; the next worker in its place goes on with it."""
    local_rank: int = 0
    """Which of its machine's places it has, and so which GPU: for all its life."""
    trains: bool = False
    running: bool = True
    result: Any = None
    returned: bool = False
    reported: WorkerFailure | None = None


class Roster:
    """All workers since the launch, or since all of them were started over."""

    def __init__(self) -> None:
        self._entries: dict[int, RosterEntry] = {}
        self._by_node: defaultdict[int, list[RosterEntry]] = defaultdict(list)
        self._numbers = 0

    def __iter__(self) -> Iterator[RosterEntry]:
        return iter(self._entries.values())

    def __getitem__(self, number: int) -> RosterEntry:
        return self._entries[number]

    def __contains__(self, number: object) -> bool:
        return number in self._entries

    def add(self, node: int, rank: int | None, slot: int | None = None) -> RosterEntry:
        """Enter a worker that is being started; without a slot it gets the first that is free, as of its machine's places."""
        if slot is None:
            slot = _first_free({one.slot for one in self.running()})
        local_rank = _first_free({one.local_rank for one in self.on(node)})
        entry = RosterEntry(self._numbers, node, -1 if rank is None else rank, slot, local_rank)
        self._entries[entry.number] = entry
        self._by_node[node].append(entry)
        self._numbers += 1
        return entry

    def clear(self) -> None:
        """Forget them; their numbers are never used again."""
        self._entries.clear()
        self._by_node.clear()

    def running(self) -> list[RosterEntry]:
        """Return those that run."""
        return [one for one in self if one.running]

    def on(self, node: int) -> list[RosterEntry]:
        """Return those that run on one machine."""
        return [one for one in self._by_node[node] if one.running]

    def counts(self) -> Counter[int]:
        """Count those that run, by machine."""
        return Counter(one.node for one in self.running())

    def results(self) -> tuple[Any, ...]:
        """Return what those that ended well returned, by rank."""
        returned = sorted((one.rank, one.number) for one in self if one.returned)
        return tuple(self[number].result for _, number in returned)

    def write(
        self,
        folder: Path,
        files: FileWriter,
        generation: int,
        where: Callable[[RosterEntry], tuple[int | None, str] | None],
    ) -> None:
        """Rewrite workers.json; `where` gives a worker's process id and host, None for one that is not in the group."""
        rows = []
        for entry in sorted(self.running(), key=lambda one: one.rank):
            found = where(entry)
            if found is not None and found[0] is not None:
                pid, host = found
                rows.append({"rank": entry.rank, "pid": pid, "host": host, "generation": generation})
        lines = ",\n ".join(map(json.dumps, rows))
        files.replace(folder / NAME, f"[\n {lines}\n]\n".encode())


def _first_free(taken: set[int]) -> int:
    return next(free for free in range(len(taken) + 1) if free not in taken)
