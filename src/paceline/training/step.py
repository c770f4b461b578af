"""One optimizer step over one exact global batch, as a loop sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline.compat import python
from paceline.errors import InputError, NonFiniteLossError
from paceline.recovery.agreement import OpenBody
from paceline.recovery.membership import STEP
from paceline.recovery.recovery import Recovery
from paceline.strategies.base import LossFunction, StepWork
from paceline.strategies.in_turns.outside import of_own
from paceline.strategies.replica import Replica
from paceline.strategies.result import StepResult
from paceline.task import Loss, Weight
from paceline.training.checks.before_first_step import check_clip
from paceline.training.checks.hidden_state import HiddenState
from paceline.training.checks.nonfinite import explain, note_options
from paceline.training.user_loop.attempt import StepAttempt
from paceline.training.user_loop.batch_changes import BatchChanges
from paceline.training.user_loop.loop_guard import LoopGuard
from paceline.training.user_loop.loop_state import LoopState
from paceline.world import World, determinism

_NO_BATCH = (
    "this loop gives steps, and one was used as a batch. A step has this worker's batches: write `for step in loader:`, in it "
    "`for x, y in step:` with `step.backward(losses)`, and behind that `step.apply()` or `optimizer.step()`."
)


class Step:
    """This worker's share of a step: iterate over its batches, call `backward` for each, then `apply` once."""

    def __init__(
        self,
        work: StepWork,
        epoch: int,
        replica: Replica,
        world: World,
        max_grad_norm: float | None,
        applied: Callable[[Step], None],
        recovery: Recovery,
        guard: LoopGuard,
        seed_loop: Callable[..., None] | None,
        hidden: HiddenState,
        attempt: StepAttempt | None = None,
        *,
        broken: OpenBody | None = None,
        registered: LoopState | None = None,
    ) -> None:
        """`broken`: the body that others are in already; the group broke in it, so nothing comes of it.

        `registered` is what the loop has registered.

        `seed_loop` seeds what a loop of the user's own draws outside of its batches; None for a Task.
        """
        self.work = work
        self.number = work.number
        """How many steps came before, from the beginning of the run."""
        self.epoch = epoch
        self.turn: str | None = None
        """Which of several optimizers this step is for; None: all of them."""
        self.result: StepResult | None = None
        self._replica = replica
        self._world = world
        world.interruption.absent = recovery.check_loop
        self._max_grad_norm = max_grad_norm
        self._applied = applied
        self._recovery = recovery
        self._guard = guard
        self._seed_loop = seed_loop
        self._hidden = hidden
        self._registered = registered
        self.attempt = attempt
        """What the loop's body has done to the state in this step; None where nobody needs to know."""
        self._generation = world.generation if broken is None else -1
        self.body = OpenBody(work.number, recovery.group.finished) if broken is None else broken
        """Which attempt at the step this is, alike on all workers."""
        self._lost = False
        """Whether a worker was lost in this step where the loop has its turn."""
        self.again = False
        """Whether the group broke in the middle: the run gives this step once more, over another share."""
        self.learning_rate: float | Tensor = 0.0
        """Of the optimizer's first group when it was applied: a schedule that the run steps has moved on behind it."""
        self._totals: list[tuple[int, Tensor]] = []
        self._read = False
        self._ended = False
        """Whether the loop has done with it."""
        self._passes = 0
        """How often the loop has gone through the batches."""
        self._out = False
        """Whether the loop has a batch in hand."""
        self._added = 0
        """How many batches have gone backward."""
        self._begun = False
        """Whether one of the shard at hand has: only then are there gradients that clearing would lose."""

    @property
    def _broken(self) -> bool:
        """Whether nothing comes of this attempt: the group broke in it, or in an evaluation or a save of its body."""
        return self._lost or self._recovery.group.world.generation != self._generation

    @property
    def left_open(self) -> bool:
        """Whether batches have gone through the model and the step was not applied."""
        return self.result is None and (self._out or self._read or self._added > 0)

    @property
    def closing(self) -> bool:
        """Whether the step is applied and the loop has not done with it."""
        return self.result is not None and not self._ended

    @property
    def is_whole(self) -> bool:
        """Whether everybody is there who has had a part in it."""
        return bool(self._recovery.group.world.generation == self._generation)

    @property
    def open_body(self) -> OpenBody | None:
        """This attempt, while the body of a user's loop is open and the step is not applied, or never will be."""
        pending = self.result is None or self.again
        return self.body if pending and not self._ended and self.attempt is not None else None

    def __iter__(self) -> Iterator[Any]:
        """Return this worker's batches, shard by shard, each on the device and with its own random streams."""
        if python.unpacks(python.frame(1)):
            raise InputError(_NO_BATCH)
        return self._pass()

    def __getitem__(self, key: Any) -> NoReturn:
        """Refuse what is done with a batch."""
        raise InputError(_NO_BATCH)

    def _pass(self) -> Iterator[Any]:
        if self._added:
            raise InputError(
                f"step {self.number}: the loop goes through the batches a second time, and the gradients of the first are lost. "
                "Call step.backward in one of them only, the last."
            )
        interruption = self._world.interruption
        interruption.discards = self._discards
        self._guard.apply, self._guard.turn = self.apply, self.turn
        if self.attempt is not None:
            self.attempt.begin_batches()
        try:
            if not self._broken:
                self._surviving(self._replica.begin, self.work)
            if self._hidden.watches:
                # Given the loop, whose variables passes may be computed with.
                with self._hidden.passes(python.frame(1)):
                    yield from self._batches()
            else:
                yield from self._batches()
            interruption.discards = None
            self._read = True
            if not self._broken:
                self._surviving(self._replica.combine)
                self._guard.hand_sums_over()
        finally:
            interruption.discards = None
            self._passes += 1
            # The generators stand where this worker's last shard has left them: others had another one.
            if self._seed_loop is not None:
                self._seed_loop("batches", self.number, self._passes)

    def _batches(self) -> Iterator[Any]:
        changes = BatchChanges(
            self.work, self._hidden, self._replica.optimizer, self._guard.options, self._registered
        )
        with changes.watching():
            for shard in () if self._broken else self.work.shards:
                self._begun = False
                for batch in self._replica.shard(shard):
                    if self._broken:
                        return
                    self._guard.hand_over()
                    self._out = True
                    if self._hidden.watches:
                        self._hidden.show_batch(batch)
                    changes.begin_batch()
                    yield batch
                    self._out = False
                    if self._broken:
                        return
                    self._guard.take_back(nothing_added=not self._begun)
                    changes.end_batch()
        self._hidden.remarks |= changes.end()

    def _discards(self, error: Exception) -> bool:
        """Return whether the group broke, and note it: the loop goes on to `apply`, and is given the step once more."""
        if not self._broken and self._recovery.survives(error):
            self._lost = True
            self._world.interruption.interrupt()  # whatever else the loop waits for in this step
        return self._broken

    def backward(self, loss: Tensor | Loss, weight: Weight | None = None) -> None:
        """Add one batch: one loss for each item, or a `Loss`, or the SUM of its losses and the WEIGHT of that sum."""
        total = loss if isinstance(loss, Loss) else _loss_of(loss, weight)
        if self._broken:
            return
        if not self._out:
            raise InputError(
                f"step {self.number}: step.backward was called outside of `for batch in step`. Call it inside, once a batch."
            )
        self._check_in_turn()
        self._guard.take_back(nothing_added=not self._begun)
        if self._hidden.watches:
            self._hidden.show_loss(total)
        self._added += 1
        self._begun = True
        self._surviving(self._replica.backward, total)
        self._guard.hand_over()

    def _check_in_turn(self) -> None:
        """Raise where the loop has begun with the batches of another step: they have taken the place of this one's."""
        if self._guard.apply != self.apply:
            raise InputError(
                f"step {self.number}: the loop went through the batches of another step before this one was applied (a zip of "
                "two loaders, or of two steps), and a run takes one step at a time. Go through one loader behind the other; for "
                "two data sets at once give one of pairs."
            )

    def _surviving(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do something that the loss of another worker may break: then the step is given once more."""
        try:
            action(*arguments)
        except Exception as error:
            if not self._discards(error):
                raise

    def apply(self, max_grad_norm: float | None = None) -> StepResult:
        """Combine over all workers, normalise by the true weight, clip by the true norm, update.

        Where a worker was lost in the middle of the step, nothing is updated: the workers regroup, and `run.steps` gives the
        same step once more. The result then says `again`.
        """
        if self.result is not None:
            raise InputError(
                f"step {self.number}: step.apply() was called before (step.compute and optimizer.step() apply, too). Call it "
                "once a step."
            )
        if not self._read:
            raise InputError(
                f"step {self.number}: step.apply() came before the loop had gone through all its batches, and the rest "
                "would be lost. Call it after `for batch in step`; to leave a batch out, do not call backward for it."
            )
        self._check_in_turn()
        check_clip(max_grad_norm)
        if self.attempt is not None:
            self.attempt.end_batches()
        self._guard.take_sums_back()
        return self._guarded(
            self._replica.apply, max_grad_norm if max_grad_norm is not None else self._max_grad_norm
        )

    def compute(self, loss: LossFunction) -> StepResult:
        """Do the whole step with a loss function, in whatever way the strategy does it best."""
        if self.attempt is not None:
            self.attempt.begin_batches()
        taken = self._watched if self._hidden.watches else self._replica.step
        if self._replica.compiler is not None:
            loss = self._replica.compiled(loss)
        loss = of_own(self._replica.model, loss)
        return self._guarded(taken, self.work, loss, self._max_grad_norm)

    def _watched(self, work: StepWork, loss: LossFunction, max_grad_norm: float | None) -> StepResult:
        with self._hidden.passes():
            return self._replica.step(work, self._hidden.around(loss), max_grad_norm)

    def check(self) -> None:
        """Stop the run when the loss of this finished step is no number; for a device whose numbers come later."""
        if self.result is not None:
            try:
                self.result.check()
            except NonFiniteLossError as error:
                raise explain(
                    error, self.work, self._totals, self._world, self._replica, untouched=False
                ) from None

    def _guarded(self, action: Callable[..., StepResult], *arguments: Any) -> StepResult:
        rate = self._replica.optimizer.param_groups[0]["lr"]
        self.learning_rate = rate.clone() if isinstance(rate, Tensor) else rate
        note_options(self._replica, self.number)
        result = self._recover() if self._broken else self._applied_or_again(action, *arguments)
        if self._seed_loop is not None:  # also where others finished the step, and nothing was updated here
            self._seed_loop("applied", self.number)
            self._guard.hand_past_over()
        return result

    def _applied_or_again(self, action: Callable[..., StepResult], *arguments: Any) -> StepResult:
        interruption = self._world.interruption
        interruption.forsaken = partial(self._recovery.check_present, self.number)
        try:
            with self._guard:  # as `updating` returns it
                self.result = action(*arguments)
        except NonFiniteLossError as error:
            raise explain(
                error, self.work, self._replica.step_state.totals, self._world, self._replica, untouched=True
            ) from None
        except Exception as error:  # noqa: BLE001  (raised again unless it is a broken group)
            if self._recovery.survives(error):
                return self._recover()
            raise (determinism.named(error) if isinstance(error, RuntimeError) else None) or error from None
        finally:
            interruption.forsaken = None
        self._totals = self._replica.step_state.totals
        self._recovery.finish(self.result)
        self._applied(self)
        return self.result

    def end(self) -> None:
        """Note that the loop has done with this step, or with an attempt at it."""
        self._ended = True
        self._guard.apply = None
        self._guard.take_past_back()
        if self.attempt is None:
            return
        if not self.again:
            self.attempt.end()
            return
        with self._guard.updating():
            whole = self.attempt.release()
        if not whole:
            # The body has written to a part of the model after an attempt that broke, and would do so once more.
            self._recovery.start_over()

    def _recover(self) -> StepResult:
        """Regroup; the step was finished by others, who tell what it came to, or it is to be done again."""
        if self._recovery.group.world.generation == self._generation:
            missed, outcome = self._recovery.regroup(STEP)
            if missed:
                self.result = StepResult.of(outcome)
                if self.attempt is not None:
                    self.attempt.put_forward()
                self._applied(self)
                return self.result
        elif self.attempt is not None:
            # The group broke where the body did something else, or others were in it.
            self.attempt.note_writes()
            self.attempt.put_back()
            if self.attempt.dirty:
                self._recovery.start_over()
        self.again = True
        if self.attempt is not None:
            self.attempt.hold()
        totals = [total.detach().double().cpu().reshape(()) for _, total in self._replica.step_state.totals]
        share = sum(len(shard.samples) for shard in self.work.shards)
        # A worker may have had no sample.
        entry = torch.tensor([float(sum(totals)), float(max(share, 1))], dtype=torch.float64)
        self.result = StepResult(self.number, self.work.size, entry, {}, again=True)
        return self.result


def _loss_of(loss: Tensor, weight: Weight | None) -> Loss:
    """Return what a loop of its own gave as a `Loss`: a vector is summed and counted, a number needs its weight."""
    if weight is not None:
        return Loss(loss, weight)
    if isinstance(loss, Tensor) and loss.dim():
        return Loss.mean(loss)
    raise InputError(
        "step.backward needs one loss for each item (reduction='none'), a sum and its weight: "
        "step.backward(losses.sum(), len(losses)), or a paceline.Loss; a mean with its weight is Loss.from_mean(mean, weight)."
    )
