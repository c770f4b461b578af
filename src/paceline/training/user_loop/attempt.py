"""A step that is given once more begins as it began the first time, whatever the loop's body did in the attempt that broke.

A loop may change its learning rate, a registered score or average, the optimizer's momentum, buffers or weights in the body of
a step. Where a worker was lost in that step the body runs twice, and what it does would be done twice; or a worker that missed
the end of a step takes over a state to which another one's body has done more already. One rule: what can be put back exactly
is noted before each body and put back (`Settings`, and small registered states). Of everything else there are marks, which tell
whether a body wrote to it; then no worker goes on from a state that holds half a body: the run goes back to its last
checkpoint. What torch does not count (`.data`) is seen by checksums in the first, second, fourth, eighth ... step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from paceline.recovery.group_state import GroupState
from paceline.state.chunks import LocalState
from paceline.state.optimizer_state import Options, options_of
from paceline.strategies.guards.absent import is_absent
from paceline.strategies.replica import Replica
from paceline.training.user_loop.loop_state import LoopState, Values
from paceline.training.user_loop.marks import Marks, ModuleMarks, checksum, slot_marks
from paceline.training.user_loop.settings import Settings


class LoopBody:
    """What is known of the body of a loop of the user's own, from step to step."""

    def __init__(self, group: GroupState, loop_state: LoopState) -> None:
        """`group` has the replica of the moment."""
        self.group, self.loop_state = group, loop_state
        self.writes_before = self.writes_behind = False
        """Whether a body writes to weights or buffers, before its batches or after `apply`, where torch does not count it."""
        self.writes_slots = False
        """Whether a body was seen to write to what the optimizer keeps."""
        self.attempt: StepAttempt | None = None
        """The one at the step that was given last, until the step is done."""
        self.done: StepAttempt | None = None
        """The last one in which the step was applied."""
        self._steps = 0
        self._model: ModuleMarks | None = None
        self._made: list[Any] | None = None
        self.beginning_changed = False
        """Whether the loop changed what was prepared before its first step: making it again does not give the beginning."""

    def begin(self) -> StepAttempt:
        """Note what a step begins with, when it is given to the loop."""
        self._steps += 1
        self.attempt = StepAttempt(self, looks=self._steps & (self._steps - 1) == 0)
        return self.attempt

    def applied(self, attempt: StepAttempt) -> None:
        """Note what the step has come to, before the rest of its body."""
        attempt.note_applied()
        self.attempt, self.done = None, attempt

    def enter_group(self) -> None:
        """Know that all workers have one state again, in tensors that may be others."""
        self.done = self._model = None
        if self.attempt is not None:
            self.attempt.enter_group()

    @property
    def moved(self) -> bool:
        """Whether the body has written to the state since the last step was applied, up to where the next began."""
        done, attempt = self.done, self.attempt
        if done is None or done.then is None:
            return False
        if attempt is not None:
            return self.writes_behind or attempt.differs_from(done)
        settings = Settings(self.group.replica, ())
        return (
            self.writes_behind
            or (self.model_marks(), self.slot_marks()) != done.then
            or not settings.has_groups_of(done.settings_then)
        )

    @property
    def options_then(self) -> Options | None:
        """The optimizer's options right after the last step that was applied."""
        return None if self.done is None else self.done.settings_then.options

    def model_marks(self) -> Marks:
        """Return marks of the model's tensors."""
        if self._model is None:
            self._model = ModuleMarks(self.group.replica.model)
        return self._model.note()

    def slot_marks(self) -> Marks:
        """Return marks of what the optimizer keeps."""
        return slot_marks(self.group.replica.optimizer)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Count nothing of what is written meanwhile: an evaluation may fetch weights, a save may bring workers to one state."""
        attempts = [one for one in (self.attempt, self.done) if one is not None]
        before = (self.model_marks(), self.slot_marks()) if attempts else None
        unchanged = [one.is_unchanged() for one in attempts]
        try:
            yield
        finally:
            if before is not None:
                after = self.model_marks(), self.slot_marks()
                for one, same in zip(attempts, unchanged, strict=True):
                    one.leave_out(before, after, unchanged=same)

    def note_made(self) -> None:
        """Note what was prepared."""
        self._made = self._all()

    def note_beginning(self) -> None:
        """Find out whether the loop has changed that before its first step."""
        made, self._made = self._made, None
        self.beginning_changed = self.beginning_changed or (made is not None and made != self._all())

    def _all(self) -> list[Any]:
        replica = self.group.replica
        trained = [one.requires_grad for one in replica.model.parameters()]
        return [checksums(replica), trained, _plain(options_of(replica.optimizer))]


class StepAttempt:
    """One attempt at one step."""

    def __init__(self, body: LoopBody, *, looks: bool) -> None:
        self._body, self._looks = body, looks
        self._small = body.loop_state.small_now()
        self._record_step()
        self._begun_with = Settings(body.group.replica, self._begun.tensors)
        self._wrote = self._in_batches = self._slots_differ = self._left = False
        self._in_hand: tuple[Marks, Marks] | None = None
        """What model and slots were where the batches began, or where the group was entered after that."""
        self._seen: tuple[dict[int, int], dict[str, str]] | None = None
        """What the batches began with, where this attempt looks at it."""
        self._done_before: tuple[Values, Settings] | None = None
        self.then: tuple[Marks, Marks] | None = None
        self.settings_then = self._begun_with
        self._held: tuple[Settings, Values, list[int], LocalState | None] | None = None

    def _record_step(self) -> None:
        body = self._body
        self._begun = body.model_marks()
        # Where no body is known to write to the slots, they are as they were after the last step, or are found to differ
        # from that where the batches begin: two looks at them in a step, not three.
        known = body.done is not None and body.done.then is not None and not body.writes_slots
        self._slots = None if known else body.slot_marks()
        self._large = body.loop_state.large_marks()
        self._values = self._look()
        self._digests = body.loop_state.large_digests() if self._looks else None

    def _look(self) -> list[int] | None:
        return checksums(self._body.group.replica) if self._looks else None

    def is_unchanged(self) -> bool:
        """Return whether the model is as it was when it was looked at last."""
        if self._held is not None:
            return checksums(self._body.group.replica) == self._held[2]
        return self._values is not None and self._look() == self._values

    def leave_out(self, before: tuple[Marks, Marks], after: tuple[Marks, Marks], *, unchanged: bool) -> None:
        """Take what was written from one moment to another for nothing; look at an `unchanged` model once more."""
        self._begun = after[0] if self._begun == before[0] else self._begun
        self._slots = after[1] if self._slots == before[1] else self._slots
        if self._in_hand is not None:
            self._in_hand = _moved_on(self._in_hand, before, after)
        if self.then is not None:
            self.then = _moved_on(self.then, before, after)
        if unchanged and self._held is not None:
            self._held = (*self._held[:2], checksums(self._body.group.replica), self._held[3])
        elif unchanged:
            self._values = self._look()

    def differs_from(self, done: StepAttempt) -> bool:
        """Return whether the state that this attempt began with is another than `done` has left."""
        then = done.then
        if then is None:
            return False
        slots_differ = self._slots_differ if self._slots is None else self._slots != then[1]
        return (
            slots_differ or self._begun != then[0] or not self._begun_with.has_groups_of(done.settings_then)
        )

    def begin_batches(self) -> None:
        """Note whether the body has written to the state by now; from here on a strategy may."""
        if not self._in_batches:
            self.note_writes()
            self._in_batches = True
            self._seen = self._unwritten() if self._looks else None

    def note_writes(self) -> None:
        """Note whether the body has written to the state since the step began, or since the group was entered."""
        if self._left:
            return
        body = self._body
        self._wrote |= any(body.loop_state.marks_of(name) != then for name, then in self._large.items())
        if self._in_batches:
            self._wrote |= self._wrote_in_hand()
            return
        self._in_hand = model, slots = body.model_marks(), body.slot_marks()
        slots_then = self._slots or (
            body.done.then[1] if body.done is not None and body.done.then is not None else None
        )
        self._slots_differ |= slots_then is not None and slots != slots_then
        body.writes_slots |= self._slots_differ
        self._wrote |= self._slots_differ or model != self._begun
        if self._values is not None:
            same = self._look() == self._values and body.loop_state.large_digests() == self._digests
            body.writes_before |= not same

    def _wrote_in_hand(self) -> bool:
        """Return whether the body has written, since its batches began, to what giving the step up does not put back."""
        body, replica = self._body, self._body.group.replica
        if self._in_hand is None or replica.has_updated:
            return False
        model, slots = self._in_hand
        put_back = {id(one) for one in replica.buffers_put_back()}
        # A step with a closure that broke off has put the slots back itself, as other tensors.
        wrote_slots = replica.closure is None and slots != body.slot_marks()
        return wrote_slots or model.buffers_differ(body.model_marks(), but=put_back)

    def leave_group(self) -> None:
        """See what the body has written by now; what giving the step up writes is not the body's."""
        if not self._left:
            self.note_writes()
            self._left = True

    def end_batches(self) -> None:
        """Look whether the body wrote since its batches began where torch does not count it."""
        if self._seen is None:
            return
        seen, digests = self._seen
        left_out = {id(one) for one in self._body.group.replica.changing_buffers()}
        now, digests_now = self._unwritten()
        self._body.writes_before |= digests != digests_now or any(
            key in now and key not in left_out and now[key] != value for key, value in seen.items()
        )

    def _unwritten(self) -> tuple[dict[int, int], dict[str, str]]:
        """Return a number for each tensor, and state of the loop's, that batches do not write to, but for some buffers."""
        replica = self._body.group.replica
        held = [one for one in (*replica.model.buffers(), *slots_of(replica)) if not is_absent(one)]
        return {id(one): checksum(one) for one in held}, self._body.loop_state.large_digests()

    def enter_group(self) -> None:
        """Continue in another group, in which an evaluation before the batches, or after them, has ended."""
        self._left, self._seen = False, None
        if self._in_batches:
            self._large = self._body.loop_state.large_marks()
            self._in_hand = self._body.model_marks(), self._body.slot_marks()
        else:
            self._record_step()

    @property
    def dirty(self) -> bool:
        """Whether the body has written to the state, so that the step cannot be given once more."""
        return self._wrote or self._body.writes_before

    def put_back(self) -> None:
        """Put settings and small states back to what they were when the step was given."""
        replica, loop_state = self._body.group.replica, self._body.loop_state
        self._done_before = loop_state.small_now(), Settings(replica, self._begun.tensors)
        self._begun_with.put_back(replica)
        loop_state.give_known(self._small)

    def put_forward(self) -> None:
        """Undo that: others have finished the step, and the body goes on. Groups and options came with their state."""
        if self._done_before is not None:
            states, settings = self._done_before
            self._body.loop_state.give_known(states)
            settings.put_training_back()

    def note_applied(self) -> None:
        """Note what the step has come to."""
        body = self._body
        self.then = body.model_marks(), body.slot_marks()
        self.settings_then = Settings(body.group.replica, ())
        self._values = self._look()

    def end(self) -> None:
        """Look whether the rest of the body wrote to the model where torch does not count it."""
        if self._values is not None:
            self._body.writes_behind |= self._look() != self._values

    def hold(self) -> None:
        """Keep everything as it is: the step is to be given once more, and what the rest of its body does counts for nothing."""
        replica = self._body.group.replica
        self._held = (
            Settings(replica, self._body.model_marks().tensors),
            self._body.loop_state.snapshot(),
            checksums(replica),
            # What lies here, without asking anybody: workers that come, or that missed a step, hold nothing.
            copy.deepcopy(replica.local_state()) if replica.whole else None,
        )

    def release(self) -> bool:
        """Put everything back to that; return False where it cannot be."""
        if self._held is None:
            return True
        settings, states, values, state = self._held
        replica = self._body.group.replica
        self._held = self._body.attempt = None
        changed = checksums(replica) != values
        settings.put_back(replica)
        if changed and state is not None:
            chunks = state.chunks
            metas = {key: chunk.meta for key, chunk in chunks.items()}
            replica.load_local_state(
                metas, lambda key, bounds: bounds.of(chunks[key].values), state.extra_state
            )
        self._body.loop_state.load(states)
        return state is not None or not changed


def _moved_on(
    noted: tuple[Marks, Marks], before: tuple[Marks, Marks], after: tuple[Marks, Marks]
) -> tuple[Marks, Marks]:
    model, slots = (new if one == old else one for one, old, new in zip(noted, before, after, strict=True))
    return model, slots


def checksums(replica: Replica) -> list[int]:
    """Return one number for each tensor of the model that lies here, and of what the optimizer keeps."""
    model = (*replica.model.parameters(), *replica.model.buffers())
    return [checksum(one) for one in (*model, *slots_of(replica)) if not is_absent(one)]


def slots_of(replica: Replica) -> list[Tensor]:
    """Return the tensors that the optimizer keeps."""
    return [
        value
        for entry in replica.optimizer.state.values()
        for value in (entry.values() if isinstance(entry, dict) else ())
        if isinstance(value, Tensor)
    ]


def _plain(options: Options) -> Options:
    return [
        {key: value.tolist() if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in options
    ]
