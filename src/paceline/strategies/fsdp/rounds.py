"""Passes that all workers must go through together, where some have fewer batches than others.

A sharded model is gathered by all its workers for every pass. How many batches each worker has in a step of so many
samples never changes, so it is asked once for each size. In a round in which a worker has no batch left, it follows one
that has: before each of its messages the leader says which one it is.
"""

from __future__ import annotations

import torch

from paceline.errors import InputError
from paceline.strategies.base import StepWork
from paceline.world import World

END = -1


class Rounds:
    """The rounds of one step, by how many batches each worker has in it."""

    def __init__(self, rank: int, batches: list[int]) -> None:
        self.batches = batches
        numbers = range(max(batches))
        self.leaders = [
            next(place for place, one in enumerate(batches) if one > number) for number in numbers
        ]
        """The first worker that has a batch, in each round."""
        self.followers = [
            [place for place, one in enumerate(batches) if one <= number and leader == rank]
            for number, leader in enumerate(self.leaders)
        ]
        """Those that this worker must lead, in each round."""


class KnownRounds:
    """The rounds of steps of every size, as far as they have come up."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: dict[int, Rounds] = {}

    def rounds(self, work: StepWork) -> Rounds:
        """Return the rounds of a step; a size that is new is asked for, by all workers together."""
        mine = sum(len(shard.batches) for shard in work.shards)
        if work.size not in self._known:
            told = self._world.comm.all_gather(torch.tensor([mine]))
            self._known[work.size] = Rounds(self._world.rank, [int(one) for one in told])
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
        self._number = 0
        self.left = len(rounds.leaders)
        """How many rounds are to be done, this one included."""

    def announce(self, message: int) -> None:
        """Announce which message comes next to those who follow."""
        for rank in self._rounds.followers[self._number] if self.left > 0 else ():
            self._world.comm.send(torch.tensor([message]), rank)

    def listen(self) -> int:
        """Hear which message comes next."""
        leader = self._rounds.leaders[self._number]
        return int(self._world.comm.recv(like=torch.tensor([0]), source=leader))

    def next(self) -> None:
        """Go on to the next round."""
        self._number += 1
        self.left -= 1
