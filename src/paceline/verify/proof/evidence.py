"""Everything that probes may look at, gathered before the first of them is asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.verify.proof.differences import Difference
from paceline.verify.proof.lab.notes import Notes, ShardAttempt
from paceline.verify.proof.record import Record


@dataclass(frozen=True, kw_only=True)
class ProofEvidence:
    """What the runs recorded and what the laboratory noted."""

    reference: Record
    broken: dict[str, list[Record]]
    """The records of the candidates that are not what they promise, by name."""
    failed: dict[str, str]
    """The candidates that could not be run, with their error."""
    notes: list[Notes]
    """One a worker of a real group, all doing the same work."""
    again: Notes | None
    """The same work in a group of one: another process, the first rank."""
    hashed: Difference | None
    """Where the reference itself changes under another hash seed."""

    @property
    def wrong(self) -> bool:
        """Whether there is anything to explain."""
        return bool(self.broken or self.failed)

    @property
    def first(self) -> Notes:
        """The first rank's notes."""
        return self.notes[0]

    def ranks_beside_first(self) -> Iterator[tuple[Notes, int, ShardAttempt, ShardAttempt]]:
        """Yield the notes of every other rank, and of each shard the first rank's attempt and its own."""
        for notes in self.notes[1:]:
            for shard, mine in self.first.attempts.items():
                if shard in notes.attempts:
                    yield notes, shard, mine, notes.attempts[shard]

    @property
    def reproducible(self) -> bool:
        """Whether another process of the first rank saw the same, so that a difference between ranks is due to the rank."""
        if self.again is None:
            return True
        here, there = self.first, self.again
        return (
            here.made == there.made
            and here.data == there.data
            and {shard: one.totals for shard, one in here.attempts.items()}
            == {shard: one.totals for shard, one in there.attempts.items()}
        )

    @property
    def repeatable(self) -> bool:
        """Whether one process, asked twice, answers twice the same."""
        return all(
            notes.data == notes.data_again
            and all(one.same_answer(notes.repeated[shard]) for shard, one in notes.attempts.items())
            for notes in self.notes
        )
