"""Passes that all workers must go through together, where some have fewer batches than others.

A sharded model is gathered by all its workers for every pass. How many batches each worker has in a step of so many
samples never changes, so it is asked once for each size. In a round in which a worker has no batch left, it follows one
that has: before each of its messages the leader says which one it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.errors import InputError
from paceline.strategies.base import StepWork
from paceline.world import World

END = -1


@dataclass(frozen=True)
class Rounds:
    """How many batches each worker has in one step."""

    rank: int
    batches: tuple[int, ...]

    @property
    def count(self) -> int:
        """Return how many rounds it takes."""
        return max(self.batches)

    def leader(self, number: int) -> int:
        """Return the first worker that has a batch in this round."""
        return next(rank for rank, batches in enumerate(self.batches) if batches > number)

    def followers(self, number: int) -> list[int]:
        """Return those that this worker must lead through this round."""
        if number >= self.count or self.leader(number) != self.rank:
            return []
        return [rank for rank, batches in enumerate(self.batches) if batches <= number]


class Schedule:
    """The rounds of steps of every size, as far as they have come up."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: dict[int, Rounds] = {}

    def rounds(self, work: StepWork) -> Rounds:
        """Return the rounds of a step; a size that is new is asked for, by all workers together."""
        mine = sum(len(shard.batches) for shard in work.shards)
        if work.size not in self._known:
            told = self._world.comm.all_gather(torch.tensor([mine]))
            self._known[work.size] = Rounds(self._world.rank, tuple(int(one) for one in told))
        rounds = self._known[work.size]
        if rounds.batches[self._world.rank] != mine:
            raise InputError(
                f"step {work.number} has {mine} batches on rank {self._world.rank}, but a step of {work.size} samples had "
                f"{rounds.batches[self._world.rank]} before: workers that gather a model together must know when. "
                "Use one --micro-batch for all data."
            )
        return rounds


class RoundProgress:
    """One worker's way through the rounds of a step: it leads, it goes along, or it follows."""

    def __init__(self, world: World, rounds: Rounds) -> None:
        self._world, self._rounds = world, rounds
        self.number = 0
        self._followers = rounds.followers(0)

    @property
    def last(self) -> bool:
        """Whether this is the round that ends the step."""
        return self.number == self._rounds.count - 1

    @property
    def over(self) -> bool:
        """Whether all rounds are done."""
        return self.number >= self._rounds.count

    def announce(self, message: int) -> None:
        """Announce which message comes next to those who follow."""
        for rank in self._followers:
            self._world.comm.send(torch.tensor([message]), rank)

    def listen(self) -> int:
        """Hear which message comes next."""
        leader = self._rounds.leader(self.number)
        return int(self._world.comm.recv(like=torch.tensor([0]), source=leader))

    def next(self) -> None:
        """Go on to the next round."""
        self.number += 1
        self._followers = self._rounds.followers(self.number)
