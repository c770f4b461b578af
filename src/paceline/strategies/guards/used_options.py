"""Finds workers that update their parts of the weights with different options: another learning rate, another weight decay.

Where each worker updates some rows or some parameters, nobody has the same weight twice, so workers that part cannot be
found by comparing weights. A loop that steps ReduceLROnPlateau by the loss of its own batch does just that.
"""

from __future__ import annotations

import zlib
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import InputError
from paceline.state.optimizer_state import HOW
from paceline.world import World


class UsedOptions:
    """What the options of an optimizer's groups were in each update so far, as one number."""

    def __init__(self) -> None:
        self._updates = 0
        self._last = ""
        self._number = 0

    def note(self, optimizer: Optimizer) -> None:
        """Note what the update that comes now is made with; some microseconds."""
        self._updates += 1
        used = repr([_told(group) for group in optimizer.param_groups])
        if used != self._last:
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


def _told(group: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the options of a group that can be told without waiting for a GPU."""
    return [
        (key, value.tolist() if isinstance(value, Tensor) else value)
        for key, value in sorted(group.items(), key=itemgetter(0))
        if key != "params"
        and key not in HOW
        and not (callable(value) or (isinstance(value, Tensor) and value.device.type != "cpu"))
    ]
