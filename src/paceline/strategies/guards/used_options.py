"""Finds workers that update their parts of the weights with different options: another learning rate, another weight decay.

Where each worker updates some rows or some parameters, nobody has the same weight twice, so workers that part cannot be
found by comparing weights. A loop that steps ReduceLROnPlateau by the loss of its own batch does just that.
"""

from __future__ import annotations

import zlib

import torch
from torch.optim import Optimizer

from paceline.errors import InputError
from paceline.strategies.guards.option_texts import OptionTexts
from paceline.world import World


class UsedOptions:
    """What the options of an optimizer's groups were in each update so far, as one number."""

    def __init__(self) -> None:
        self._updates = 0
        self._texts = OptionTexts()
        self._last: list[str] = []
        self._number = 0

    def note(self, optimizer: Optimizer) -> None:
        """Note what the update that comes now is made with; a microsecond for each group."""
        self._updates += 1
        used = self._texts.look(optimizer)
        if used is not self._last:
            self._last = used
            self._number = zlib.crc32(f"{self._number} {self._updates} {used}".encode())

    def check(self, world: World) -> None:
        """Raise on all workers where some have updated with others; all call it together."""
        mine = torch.tensor([self._updates, self._number], device=world.device)
        rows = world.comm.all_gather(mine)
        for rank, row in enumerate(rows):
            # One that missed updates was given their outcome, and cannot say what they were made with.
            if row[0] == rows[0][0] and row[1] != rows[0][1]:
                raise InputError(
                    f"rank 0 and rank {rank} updated their parts of the weights with different options of the optimizer (lr, "
                    "weight_decay, ...): the loop has changed them by what one worker has of the batch. Change them alike on "
                    "every worker: a schedule by a metric (ReduceLROnPlateau) goes by step.result.loss or by run.evaluate, not "
                    "by the loss of a batch."
                )
