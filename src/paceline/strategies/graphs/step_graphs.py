"""Decides which steps are replayed from a CUDA graph, and computes all others as ever.

A graph is captured once a few steps have had batches of the same form, and, where nobody asked for it, once the time of a step
has been seen to go into launching kernels. What a graph could not follow is looked for before: numbers drawn on the
host, Python values that change from step to step. Whatever cannot be captured is computed as ever, and said once.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.errors import InputError
from paceline.strategies.base import Exactness, LossFunction, StepWork, StrategyInputs
from paceline.strategies.buffers.buffers import Buffers
from paceline.strategies.compiled import Compiler, Region
from paceline.strategies.fused_update import FusedUpdate
from paceline.strategies.graphs.generators import drew_on_the_host, last_seed
from paceline.strategies.graphs.inputs import UnfitBatchError, form_of
from paceline.strategies.graphs.python_state import PythonState
from paceline.strategies.graphs.step_graph import Computing, StepGraph
from paceline.strategies.result import StepResult
from paceline.world.fault_points import BACKWARD, FORWARD, hit

_ALIKE = 3
"""So many steps of one form, one after the other, come before one is captured."""
_TRIES = 8
"""How often Python values may be found changed, or forms others than before, until graphs are given up."""
_PAYS = 100
"""After so many replays of one graph it is worth while to capture another."""
_BUSY = 1.5
"""Where a step keeps the GPU busy for so many times as long as the CPU, launching is not what takes the time."""
_SLOW = 3
"""So many steps one after the other must have waited for launches."""
_ROOM = 4
"""A step that needs more than this part of the GPU's memory is not captured unasked: a graph keeps it for itself."""


class _Replica(Computing, Protocol):
    model: nn.Module
    buffers: Buffers
    compiler: Compiler | None
    fused: FusedUpdate
    scaler: torch.amp.GradScaler | None

    def look(self, work: StepWork) -> bool: ...


class StepGraphs:
    """The captured step of one replica, and the way to it."""

    def __init__(self, replica: _Replica, inputs: StrategyInputs) -> None:
        self._replica, self._note = replica, inputs.note
        self._asked = inputs.cuda_graph == "on"
        self._compares = inputs.exactness is Exactness.BITWISE
        self.replaying = False
        """Whether the gradients of this step come from a replay, and lie where those of the replay before lay."""
        self.replayed = 0
        """How many steps were replayed."""
        self._over = self._told = False
        self._tries = self._replays = 0
        self._tensors: list[Tensor] = []
        self._tensors_of: nn.Module | None = None
        self.drop()
        self._refuse_what_cannot_be()

    def drop(self) -> None:
        """Forget the captured step: what trains, or where it lies, is no longer what it was."""
        self._graph: StepGraph | None = None
        self._state: PythonState | None = None
        self._loss: LossFunction | None = None
        self._form: Hashable = None
        self._places: list[int] = []
        self._alike = 0
        self._timed: tuple[torch.cuda.Event, torch.cuda.Event, float] | None = None
        self._ended: torch.cuda.Event | None = None
        self._launching, self._slow = self._asked, 0
        self._tensors_of = None
        self._replica.fused.forget()  # the captured update takes the gradients of the captured step

    def _refuse_what_cannot_be(self) -> None:
        replica = self._replica
        why = ""
        if replica.scaler is not None:
            why = "the loss scaler of fp16 looks at each step's gradients"
        elif replica.step_state.sparse:
            why = "gradients of some rows have another size in each step"
        elif replica.buffers.active:
            why = "the buffers of several shards are combined on the CPU"
        if why:
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        """Compute all steps as ever from now on."""
        expected = self._asked or self._launching
        self.drop()
        self._over = True
        if expected:
            self._note(f"steps are not captured as a CUDA graph: {why}.")

    # One step.

    def step(self, work: StepWork, loss: LossFunction, max_grad_norm: float | None) -> StepResult:
        """Return what a step came to before its update, replayed or computed."""
        replica = self._replica
        self.replaying = False
        if self._over:
            return replica.computed(work, loss, max_grad_norm)
        plain: LossFunction = getattr(loss, "watched_loss", loss)
        try:
            form, tensors = form_of(work)
        except UnfitBatchError as error:
            self._give_up(str(error))
            return replica.computed(work, loss, max_grad_norm)
        form = form, max_grad_norm
        fits = self._graph is not None and form == self._form and plain == self._loss and self._is_unchanged()
        if self._graph is not None and fits:
            if plain is not loss:  # the passes of this step are watched, so they are made
                return self._compared(work, loss, max_grad_norm, tensors)
            if not replica.look(work):
                return self._replayed(work, tensors)
        elif self._graph is not None and form == self._form:
            self.drop()  # Python values are others than when it was captured
        if self._graph is None and plain is loss and self._is_ready(form, plain):
            captured = self._captured(work, loss, max_grad_norm, tensors)
            if captured is not None:
                return captured
        result = self._timed_step(work, loss, max_grad_norm)
        if self._graph is None and not self._over:
            self._observe(work, form, plain)
        return result

    def _replayed(self, work: StepWork, tensors: list[Tensor]) -> StepResult:
        if self._graph is None:
            raise RuntimeError("no step was captured")
        hit(FORWARD)
        hit(BACKWARD)
        self._replica.world.status_page.batch()
        self.replaying = True
        self._replays += 1
        self.replayed += 1
        if self._replays == _PAYS:
            self._tries = 0
        return self._graph.replay(work, tensors)

    def _timed_step(self, work: StepWork, loss: LossFunction, max_grad_norm: float | None) -> StepResult:
        """Compute a step, and find out from an earlier one whether launching its kernels is what takes the time."""
        if self._launching or self._graph is not None:
            return self._replica.computed(work, loss, max_grad_norm)
        # A CPU ahead of its GPU waits for room in the queue of launches, so only a step that finds the GPU idle tells the two
        # apart; not the first one, in which libraries are loaded.
        idle = self._ended is not None and self._ended.query()  # type: ignore[no-untyped-call]
        if self._timed is not None and self._timed[1].query():  # type: ignore[no-untyped-call]
            begin, end, seconds = self._timed
            self._timed = None
            on_gpu = begin.elapsed_time(end) / 1e3
            # Once may be chance: another thread, or the garbage collector.
            self._slow = self._slow + 1 if on_gpu < _BUSY * seconds else 0
            self._launching = self._slow >= _SLOW and self._has_room()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        compiled = self._compilations()
        started = time.perf_counter()
        begin.record()
        result = self._replica.computed(work, loss, max_grad_norm)
        end.record()
        self._ended = end
        # While something is compiled the GPU waits, which says nothing about other steps.
        if self._timed is None and idle and self._compilations() == compiled:
            self._timed = begin, end, time.perf_counter() - started
        return result

    def _compilations(self) -> int:
        compiler = self._replica.compiler
        return 0 if compiler is None else compiler.compilations

    def _has_room(self) -> bool:
        device = self._replica.world.device
        total: int = torch.cuda.get_device_properties(device).total_memory
        return torch.cuda.max_memory_allocated(device) < total // _ROOM

    # Before a capture.

    def _observe(self, work: StepWork, form: Hashable, loss: LossFunction) -> None:
        """Look at a step that was computed: whether the next one like it may be captured."""
        if form != self._form or loss != self._loss:
            self._form, self._loss, self._alike = form, loss, 0
            self._tries += self._launching
        else:
            self._alike += 1
        if not self._launching:
            return
        seed = last_seed(work)
        if seed is not None and drew_on_the_host(seed):
            self._give_up("the passes draw random numbers on the CPU")
            return
        changed = "the form of the batches"
        if self._state is None or not self._is_unchanged():
            if self._state is not None:
                changed = self._state.changed()
                self._tries += 1
            self._look_at_python(loss)
        if self._tries > _TRIES:
            self._give_up(f"{changed} changes from step to step")

    def _look_at_python(self, loss: LossFunction) -> None:
        try:
            self._state = PythonState(
                self._replica.model, loss.function if isinstance(loss, Region) else loss
            )
        except Exception as error:  # noqa: BLE001 - whatever an object of the user's raises when it is looked at
            self._give_up(f"what the loss reads cannot be compared ({type(error).__name__}: {error})")
            return
        self._places, self._alike = self._addresses(), 0
        if self._state.reads_steps:
            self._give_up("the loss reads task.steps_done")

    def _is_ready(self, form: Hashable, loss: LossFunction) -> bool:
        return (
            self._launching
            and self._alike >= _ALIKE
            and form == self._form
            and loss == self._loss
            and not self._replica.buffers.looks_next
            and self._is_unchanged()
        )

    def _is_unchanged(self) -> bool:
        return self._state is not None and self._state.is_unchanged() and self._addresses() == self._places

    def _addresses(self) -> list[int]:
        """Return where the tensors lie that kernels of a captured step would go on using."""
        model = self._replica.model
        held = self._tensors if self._tensors_of is model else [*model.parameters(), *model.buffers()]
        self._tensors, self._tensors_of = held, model
        return list(map(Tensor.data_ptr, held))

    def _captured(
        self, work: StepWork, loss: LossFunction, max_grad_norm: float | None, tensors: list[Tensor]
    ) -> StepResult | None:
        """Capture this step and replay it; None where that does not work, and nothing was computed."""
        if self._replica.look(work):
            return None
        try:
            graph = StepGraph(self._replica, work, loss, max_grad_norm)
        except Exception as error:  # noqa: BLE001 - whatever an operation raises that cannot be captured; it is computed then
            self._give_up(_reason(error))
            return None
        if not self._is_unchanged():
            changed = self._state.changed() if self._state is not None else ""
            self._give_up(f"{changed} is changed by the passes")
            return None
        self._graph, self._replays = graph, 0
        if not self._told:
            self._told = True
            self._note(
                f"step {work.number}: from here on steps like this one are replayed as one CUDA graph. What the loss does in "
                "Python is done in some steps only; --cuda-graph off computes all as before."
            )
        return self._replayed(work, tensors)

    # Now and then.

    def _compared(
        self, work: StepWork, loss: LossFunction, max_grad_norm: float | None, tensors: list[Tensor]
    ) -> StepResult:
        """Compute a step as ever, and raise where its replay comes to something else: then earlier replays were wrong."""
        graph, replica = self._graph, self._replica
        if graph is None or not self._compares:
            return replica.computed(work, loss, max_grad_norm)
        buffers = list(replica.model.buffers())
        before = [one.clone() for one in buffers]
        result = replica.computed(work, loss, max_grad_norm)
        after = [one.clone() for one in buffers]
        _put(buffers, before)
        graph.run(work, tensors)
        _put(buffers, after)
        made = [parameter.grad for parameter in replica.step_state.tracked]
        if not all(map(_equal, made, graph.gradients)):
            raise InputError(
                f"step {work.number}: the loss computes something else now than when its step was captured as a CUDA graph, and "
                "nothing that Python holds has told so (a file, the clock, a library's own state). The steps before this one are "
                "in doubt. Use --cuda-graph off."
            )
        return result


@torch.no_grad()
def _put(buffers: list[Tensor], values: list[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _reason(error: Exception) -> str:
    """Return the first line of what kept a step from being captured; the first error is the cause of the others."""
    first: BaseException = error
    while first.__context__ is not None:
        first = first.__context__
    return f"an operation cannot be captured ({str(first).strip().partition(chr(10))[0] or type(first).__name__})"
