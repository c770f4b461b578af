"""Finds what a habitual loop leaves in: its own `optimizer.step()`, `zero_grad()`, `scheduler.step()` or `loss.backward()`.

`step.apply` does all of that, so each would be done twice, or to gradients of this worker alone, and nothing would fail.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any, Self
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer

from paceline.compat.optim import mark_stepped, step_pre_hooks
from paceline.compat.tensors import write_count
from paceline.errors import InputError
from paceline.strategies.fused_update import only_guards
from paceline.strategies.guards.no_gradient import NoGradient
from paceline.strategies.guards.option_texts import OptionTexts
from paceline.strategies.in_turns.optimizers import Optimizers, each_of
from paceline.strategies.replica import Replica
from paceline.training.user_loop.stand_in import EarlySum, PastSum, StandIn, in_parts

_GRADIENT = attrgetter("grad")
_MARK = "stands_for_apply"


class LoopGuard:
    """Watches the optimizer, the schedule and the gradients while the user's code has the turn."""

    def __init__(self, seed_update: Callable[[], None] = lambda: None) -> None:
        """`seed_update` is called before each update: an optimizer, a hook on its step or a schedule may draw."""
        self._seed_update = seed_update
        self._watched: WeakSet[Optimizer] = WeakSet()
        self._thread = threading.get_ident()
        self.apply: Callable[[], object] | None = None
        """What `optimizer.step()` in the loop stands for: `apply` of the step that the loop is in."""
        self.turn: str | None = None
        """Which of several optimizers that step is for."""
        self._updating = False
        self._in_step = False
        self._replica: Replica | None = None
        self.options = OptionTexts()
        """The optimizer's, as they were last looked at."""
        self._scheduler: object = None
        self._ticks: int | None = None
        self._leaves: Sequence[Tensor] = ()
        self._gradients: list[Tensor | None] = []
        """What the leaves had when the loop got its turn; a look at a hundred of them takes some twenty microseconds."""
        self._versions: list[int] = []
        self._hidden: list[tuple[Tensor, Tensor | None, NoGradient]] = []
        """Leaves whose gradient a stand-in hides: a part of the sums or none, so that work would be lost, or sums too early."""
        self._stand_ins: dict[tuple[int, type[NoGradient]], tuple[Tensor, NoGradient]] = {}

    def watch(self, replica: Replica) -> None:
        """Watch this replica from now on."""
        self._replica, self._scheduler = replica, replica.scheduler
        self._stand_ins = {}
        self._ticks = self._count_ticks()
        for optimizer in dict.fromkeys((replica.optimizer, *each_of(replica.optimizer))):
            self._watch(optimizer)

    def _watch(self, optimizer: Optimizer) -> None:
        # Where the state was sharded, the loop's optimizer has other contents in another group, without this guard.
        if optimizer not in self._watched or "zero_grad" not in vars(optimizer):
            self._watched.add(optimizer)
            hooks = step_pre_hooks(optimizer)  # torch has no public way to be the first
            users = dict(hooks)  # may draw
            hooks.clear()
            optimizer.register_step_pre_hook(self._before_step)
            hooks.update(users)
            self._guard_zero_grad(optimizer)
        if not hasattr(optimizer.step, _MARK):
            self._lead_step(optimizer)

    def updating(self) -> Self:
        """Return a context that permits the updates which paceline itself makes, in a step or before a checkpoint."""
        return self  # a generator of its own takes several times as long, in every step

    def __enter__(self) -> None:
        """Permit optimizer and scheduler steps."""
        if self._scheduler is not None:
            self._check_schedule()
        self._updating = True

    def __exit__(self, kind: object, *_: object) -> None:
        """Permit them no longer."""
        self._updating = False
        if kind is None:
            self._in_step = False  # the gradients of a step have served
        if self._scheduler is not None:
            self._ticks = self._count_ticks()

    def hand_over(self, *, behind: bool = False) -> None:
        """Return control to the loop: from here to `take_back`, changes of gradients are the loop's.

        `behind` its batches it may see sums.
        """
        self._in_step = True
        if self._replica is not None:
            if self._hidden:
                self._unhide()
            self._leaves, hidden = self._replica.placement.leaves(self._replica.step_state)
            if self._replica.reducer.sent and not behind:
                self._hide(self._leaves, EarlySum)
                self._leaves = ()
            self._gradients = list(map(_GRADIENT, self._leaves))
            self._versions = _versions(self._gradients)
            if hidden:
                self._hide(hidden)

    def take_back(self, *, nothing_added: bool = False) -> None:
        """Raise if the loop changed gradients that the batches of a step have added, or will.

        With `nothing_added` no batch has added any yet, and clearing them loses none.
        """
        before, now = self._take(may_clear=nothing_added)
        if any(one is not None and other is None for one, other in zip(before, now, strict=True)):
            raise InputError(
                "the loop cleared gradients inside `for batch in step`, and what earlier batches of this step had added is "
                "lost. Leave zero_grad() out: every step begins without gradients."
            )
        if self._differs(before, now):
            raise InputError(
                "the loop called backward() itself, or changed gradients: they are this worker's alone, divided by no weight. "
                "Call step.backward(losses) once for each batch; a further term goes into the loss, or is an auxiliary Loss; "
                "for the gradient of an input (FGSM) call torch.autograd.grad(loss, x), which leaves none behind."
            )

    def hand_sums_over(self) -> None:
        """Do the same after the last batch, when gradients are the sums of a step, or are elsewhere."""
        self.hand_over(behind=True)
        if self._gradients and not any(one is not None for one in self._gradients):
            self._hide(self._leaves)

    def take_sums_back(self) -> None:
        """Raise if the loop changed gradients between its batches and `step.apply`."""
        before, now = self._take()
        if self._differs(before, now):
            raise InputError(
                "the loop changed gradients before step.apply() (clip_grad_norm_, a factor, a backward() of its own), and not on "
                "every strategy are they the sums there. Clip with step.apply(max_grad_norm=1.0); for other work use "
                "optimizer.register_step_pre_hook under single, dp or ddp, where it sees the gradient that the update takes."
            )

    def hand_past_over(self) -> None:
        """Have the loop see none of the gradients of a step that is applied, where this worker has a part of them."""
        if self._replica is not None:
            self._hide(in_parts(self._replica.placement), PastSum)

    def take_past_back(self) -> None:
        """Put them back, other than those that the loop has cleared or replaced: the next step begins, or none does."""
        hidden, self._hidden = self._hidden, []
        for leaf, gradient, stand_in in hidden:
            if leaf.grad is stand_in:
                leaf.grad = gradient

    def leave_group(self) -> None:
        """Know that the gradients of a step count for nothing, and have the loop see none of them."""
        self._unhide()
        self._leaves, self._gradients = (), []

    def _hide(self, leaves: Sequence[Tensor], kind: type[NoGradient] = StandIn) -> None:
        for leaf in leaves:
            if leaf.requires_grad:
                key = (id(leaf), kind)
                if key not in self._stand_ins:
                    self._stand_ins[key] = (leaf, kind.of(leaf))
                stand_in = self._stand_ins[key][1]
                self._hidden.append((leaf, leaf.grad, stand_in))
                leaf.grad = stand_in

    def _unhide(self, *, may_clear: bool = False) -> type[NoGradient] | None:
        """Put the gradients back, and return what hid them where the loop had put others in their place, or cleared them."""
        hidden, self._hidden = self._hidden, []
        replaced = None
        for leaf, gradient, stand_in in hidden:
            found = leaf.grad
            if found is not stand_in and not (may_clear and found is None):
                replaced = type(stand_in)
            leaf.grad = gradient
        return replaced

    def _take(self, *, may_clear: bool = False) -> tuple[list[Tensor | None], list[Tensor | None]]:
        if self._hidden and (replaced := self._unhide(may_clear=may_clear)) is not None:
            replaced.refuse_use()
        leaves, self._leaves = self._leaves, ()
        before, self._gradients = self._gradients, []
        return before, list(map(_GRADIENT, leaves))  # nothing where the loop had no turn

    def _differs(self, before: list[Tensor | None], now: list[Tensor | None]) -> bool:
        return bool(before) and (not all(map(is_, before, now)) or _versions(now) != self._versions)

    def end_step(self) -> None:
        """Note that the loop has done with a step."""
        if self._scheduler is not None:
            self._check_schedule()
        self._in_step = False

    def _check_schedule(self) -> None:
        """Raise if somebody else moved the schedule."""
        if self._ticks is not None and self._count_ticks() != self._ticks:
            raise InputError(
                "the loop called scheduler.step() itself, so the schedule runs twice as fast: the one that run.prepare was given "
                "as scheduler= is stepped with each update. Leave scheduler.step() out, or give the schedule without its name: "
                "run.prepare(model, optimizer, scheduler)."
            )

    def _count_ticks(self) -> int | None:
        ticks = getattr(self._scheduler, "last_epoch", None)
        return ticks if isinstance(ticks, int) else None

    @only_guards
    def _before_step(self, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return  # another thread, a server's say, is no loop of the user's
        if self._updating:
            self._seed_update()
        else:
            raise InputError(
                "the loop called optimizer.step() outside of a step, where there are no gradients of a global batch. Call it, or "
                "step.apply(), after `for batch in step`, once a step."
            )

    def _lead_step(self, optimizer: Optimizer) -> None:
        """Have `optimizer.step()` in the loop be `step.apply()`; what paceline itself calls stays the update alone."""
        update: Callable[..., Any] = optimizer.step

        @functools.wraps(update)
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._updating or self.apply is None or threading.get_ident() != self._thread:
                return update(*args, **kwargs)
            if args or kwargs:
                raise InputError(
                    "optimizer.step() was given an argument in the loop, where it stands for step.apply(). Leave it out."
                )
            self._check_turn(optimizer)
            self.apply()
            mark_stepped(optimizer)
            return None

        vars(step)[_MARK] = True
        # A bound method, as a schedule that is made later expects.
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def _check_turn(self, optimizer: Optimizer) -> None:
        """Raise where the loop steps one of several optimizers and the step is for another one, or for all."""
        several = None if self._replica is None else self._replica.optimizer
        if not isinstance(several, Optimizers):
            return
        # Two objects with the same attributes are the same one, in the group before and in this one.
        mine = [name for name, one in several.optimizers.items() if vars(one) is vars(optimizer)]
        if mine != [self.turn]:
            called = mine[0] if mine else type(optimizer).__name__
            whose = "all optimizers" if self.turn is None else f"the turn of {self.turn!r}"
            raise InputError(
                f"the loop called step() of the optimizer {called!r} in a step for {whose}. Call step.apply(), or with "
                "run.steps(..., turns=...) optimizers[step.turn].step()."
            )

    def _guard_zero_grad(self, optimizer: Optimizer) -> None:
        clear: Callable[..., None] = optimizer.zero_grad

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            if self._in_step and not self._updating and threading.get_ident() == self._thread:
                raise InputError(
                    "the loop called optimizer.zero_grad() in the middle of a step, and gradients that its batches have added "
                    "would be lost. Leave it out: every step begins without gradients."
                )
            clear(*args, **kwargs)

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


def _versions(gradients: Sequence[Tensor | None]) -> list[int]:
    return [0 if one is None else write_count(one) for one in gradients]
