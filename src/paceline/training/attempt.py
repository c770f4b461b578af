"""A step that is given once more begins as it began the first time, whatever the loop's body did in the attempt that broke.

A loop may move its learning rate, a registered score or average, buffers or weights in the body of a step. Where a worker was
lost in that step the body runs twice, and what it does would be done twice; or a worker that missed the end of a step takes over
a state to which another one's body has done more already. Rates and small registered states are noted before each body and put
back. Weights and buffers are not kept twice: it is known whether a body writes to them (torch counts writes; what it does not
count, through `.data`, is seen by checksums in the first, second, fourth, eighth ... step), and then no worker goes on from a
state that holds half a body: the run goes back to its last checkpoint.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.compat.tensors import local_part, write_count
from paceline.state.chunks import LocalState
from paceline.strategies.absent import is_absent
from paceline.strategies.replica import Replica
from paceline.strategies.writes import checksum
from paceline.training.loop_state import SMALL, LoopState, Values

Options = list[dict[str, Any]]
LARGE = 1 << 20
"""Bytes from which torch's own sums are faster than one pass of Python's checksum."""


class Body:
    """What is known of the body of a loop of the user's own, from step to step."""

    def __init__(self, replica: Callable[[], Replica], loop_state: LoopState) -> None:
        """`replica` returns the one of the present group."""
        self.replica, self.loop_state = replica, loop_state
        self.writes_before = self.writes_behind = False
        """Whether a body writes to weights or buffers, before its batches or behind `apply`, where torch does not count it."""
        self.attempt: Attempt | None = None
        """The one at the step that was given last, until the step is done."""
        self._done: Attempt | None = None
        """The last one in which the step was applied."""
        self._steps = 0
        self._tensors: list[Tensor] = []
        self._made: list[Any] | None = None
        self.beginning_changed = False
        """Whether the loop changed what was prepared before its first step: making it again does not give the beginning."""

    def begin(self) -> Attempt:
        """Note what a step begins with, when it is given to the loop."""
        self._steps += 1
        looks = self._steps & (self._steps - 1) == 0
        if looks or not self._tensors:
            self._tensors = _counted(self.replica())
        self.attempt = Attempt(self, looks=looks)
        return self.attempt

    def applied(self, attempt: Attempt) -> None:
        """Note what the step has come to, before the rest of its body."""
        attempt.note_applied()
        self.attempt, self._done = None, attempt

    def enter_group(self) -> None:
        """Know that all workers have one state again, in tensors that may be others."""
        self._done, self._tensors = None, _counted(self.replica())

    @property
    def moved(self) -> bool:
        """Whether the body has written to weights or buffers since the last step was applied, up to where the next began."""
        if self._done is None:
            return False
        begun = self.writes() if self.attempt is None else self.attempt.begun
        return self.writes_behind or begun != self._done.then

    @property
    def options_then(self) -> Options | None:
        """The optimizer's options right behind the last step that was applied."""
        return None if self._done is None else self._done.options_then

    def writes(self) -> list[int]:
        """Return how often each tensor of the model was written to."""
        return [write_count(one) for one in self._tensors]

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Count nothing of what is written meanwhile: an evaluation may fetch weights from elsewhere."""
        before = self.writes()
        unchanged = self.attempt is not None and self.attempt.is_unchanged()
        done_unchanged = self._done is not None and self._done.is_unchanged()
        yield
        more = [now - then for now, then in zip(self.writes(), before, strict=False)]
        for one, same in ((self.attempt, unchanged), (self._done, done_unchanged)):
            if one is not None:
                one.leave_out(more, unchanged=same)

    def note_made(self) -> None:
        """Note what was prepared."""
        self._made = self._all()

    def note_beginning(self) -> None:
        """Find out whether the loop has changed that before its first step."""
        made, self._made = self._made, None
        self.beginning_changed = self.beginning_changed or (made is not None and made != self._all())

    def _all(self) -> list[Any]:
        replica = self.replica()
        trained = [one.requires_grad for one in replica.model.parameters()]
        return [checksums(replica), trained, _plain(options_of(replica.optimizer))]


class Attempt:
    """One attempt at one step."""

    def __init__(self, body: Body, *, looks: bool) -> None:
        self._body, self._looks = body, looks
        replica = body.replica()
        self._options = options_of(replica.optimizer)
        self._small = body.loop_state.small_known()
        self.begun = body.writes()
        self._values = self._look()
        self._wrote = self._in_batches = False
        self._done_before: Values = {}
        self.then: list[int] = []
        self.options_then: Options = []
        self._held: tuple[Options, Values, list[int], LocalState | None] | None = None

    def _look(self) -> list[Any] | None:
        if not self._looks:
            return None
        return [checksums(self._body.replica(), slots=False), self._body.loop_state.large_digests()]

    def is_unchanged(self) -> bool:
        """Return whether the model is as it was when it was looked at last."""
        if self._held is not None:
            return checksums(self._body.replica()) == self._held[2]
        return self._values is not None and checksums(self._body.replica(), slots=False) == self._values[0]

    def leave_out(self, more: list[int], *, unchanged: bool) -> None:
        """Take so many writes to each tensor for none; look at an `unchanged` model once more."""
        self.begun = [then + one for then, one in zip(self.begun, more, strict=False)]
        self.then = [then + one for then, one in zip(self.then, more, strict=False)]
        if unchanged and self._held is not None:
            self._held = (*self._held[:2], checksums(self._body.replica()), self._held[3])
        elif unchanged and self._values is not None:
            self._values[0] = checksums(self._body.replica(), slots=False)

    def begin_batches(self) -> None:
        """Note whether the body has written to the model by now; from here on a strategy may."""
        if not self._in_batches:
            self._in_batches = True
            self._wrote = self._body.writes() != self.begun
            self._body.writes_before |= self._values is not None and self._look() != self._values

    @property
    def dirty(self) -> bool:
        """Whether the body has written to the model, so that the step cannot be given once more."""
        if not self._in_batches:
            self.begin_batches()
        return self._wrote or self._body.writes_before

    def put_back(self) -> None:
        """Put rates and small states back to what they were when the step was given."""
        self._done_before = self._body.loop_state.small_known()
        put_options(self._body.replica().optimizer, self._options)
        self._body.loop_state.give_known(self._small)

    def put_forward(self) -> None:
        """Undo that: others have finished the step, and the body goes on."""
        self._body.loop_state.give_known(self._done_before)

    def note_applied(self) -> None:
        """Note what the step has come to."""
        self.then, self.options_then = self._body.writes(), options_of(self._body.replica().optimizer)
        self._values = self._look()

    def end(self) -> None:
        """Look whether the rest of the body wrote to the model where torch does not count it."""
        if self._values is not None:
            values = checksums(self._body.replica(), slots=False)
            self._body.writes_behind |= values != self._values[0]

    def hold(self) -> None:
        """Keep everything as it is: the step is to be given once more, and what the rest of its body does counts for nothing."""
        replica = self._body.replica()
        self._held = (
            options_of(replica.optimizer),
            self._body.loop_state.snapshot(),
            checksums(replica),
            # What lies here, without asking anybody: workers that come, or that missed a step, hold nothing.
            copy.deepcopy(replica.held()) if replica.whole else None,
        )

    def release(self) -> bool:
        """Put everything back to that; return False where it cannot be."""
        if self._held is None:
            return True
        options, states, values, state = self._held
        replica = self._body.replica()
        self._held = self._body.attempt = None
        changed = checksums(replica) != values
        if changed and state is not None:
            pieces = state.pieces
            forms = {key: piece.form for key, piece in pieces.items()}
            replica.take(forms, lambda key, box: box.of(pieces[key].values), state.rest)
        put_options(replica.optimizer, options)
        self._body.loop_state.load(states)
        return state is not None or not changed


def options_of(optimizer: Optimizer) -> Options:
    """Return the options of each group, tensors copied."""
    return [
        {
            key: value.detach().clone() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params" and (not isinstance(value, Tensor) or value.numel() <= SMALL)
        }
        for group in optimizer.param_groups
    ]


def put_options(optimizer: Optimizer, then: Options) -> None:
    """Set the groups to what `options_of` returned for them."""
    for group, options in zip(optimizer.param_groups, then, strict=False):
        for key, value in options.items():
            here = group.get(key)
            if isinstance(here, Tensor) and isinstance(value, Tensor) and here.shape == value.shape:
                with torch.no_grad():
                    here.copy_(value)
            else:
                group[key] = value


def checksums(replica: Replica, *, slots: bool = True) -> list[int]:
    """Return one number for each tensor of the model that lies here, and of the optimizer's `slots`."""
    kept = [
        value
        for entry in (replica.optimizer.state.values() if slots else ())
        for value in (entry.values() if isinstance(entry, dict) else ())
        if isinstance(value, Tensor)
    ]
    return [_checksum(one) for one in [*_tensors(replica), *kept]]


def _checksum(tensor: Tensor) -> int:
    local = local_part(tensor).detach()
    if local.layout is not torch.strided or local.is_quantized or local.device.type == "meta":
        return 0
    if local.device.type != "cpu" or local.nbytes > LARGE:
        return checksum(local)
    # In memory of its own: what has one element, or one for all, is contiguous with a stride of 0.
    raw = torch.empty(local.numel(), dtype=local.dtype).copy_(local.reshape(-1)).view(torch.uint8)
    return zlib.crc32(raw.numpy().data)  # a tenth of the time for small ones


def _tensors(replica: Replica) -> list[Tensor]:
    return [one for one in (*replica.model.parameters(), *replica.model.buffers()) if not is_absent(one)]


def _counted(replica: Replica) -> list[Tensor]:
    """Return those whose writes torch counts."""
    return [one for one in _tensors(replica) if not one.is_inference()]


def _plain(options: Options) -> Options:
    return [
        {key: value.tolist() if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in options
    ]
