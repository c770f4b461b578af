"""Which part of which tensor lives on a worker: the model it computes with, what its optimizer updates, what it saves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import InputError
from paceline.state.chunks import (
    MODEL,
    OPTIMIZER,
    Catalogue,
    ChunkBounds,
    LocalState,
    Read,
    assemble,
    check_type,
    collect,
    split,
    survey,
)
from paceline.state.optimizer_state import load_optimizer_state, optimizer_state, plain
from paceline.strategies.base import Leaves, StrategyInputs
from paceline.strategies.buffers.buffers import Buffers, Rule
from paceline.strategies.buffers.unsaved import moved_unsaved, note_unsaved, put_unsaved
from paceline.strategies.guards.partial_update import Scope
from paceline.strategies.guards.places import AnyPlace, refuse_made_later
from paceline.strategies.guards.trained import HasParameters, check_equal, check_held
from paceline.strategies.guards.writes import checksum
from paceline.strategies.result import StepResult
from paceline.strategies.step_state import StepState
from paceline.world import World

_COMPARED = 1 << 20
"""How many numbers of a tensor are compared where a run begins."""


class Optimize(Protocol):
    """Steps this worker's optimizer and its schedule."""

    def __call__(self, *, steps: bool = True, schedules: bool = True) -> None:
        """Do so, or one of the two."""


class Placement(ABC):
    """A worker's part of the state; what a placement has no use for does nothing."""

    model: nn.Module
    """The user's own module, bare, as it is saved."""
    whole = False
    """Whether this worker holds all of the state; else it is sharded among the workers."""
    adapts = False
    """Whether it goes on where other parameters begin to train."""
    holds_unsaved = False
    """Whether its state has the buffers that `state_dict` leaves out, where they change."""
    cut_first = False
    """Whether the model was cut before its optimizer and its schedule were made."""
    computes = True
    """Whether this worker computes gradients; one that does not is a server to those that do."""
    scope = Scope.ROWS
    """How much of the model this worker's optimizer updates in one step."""
    compares_options = False
    """Whether only the options of the optimizer tell that workers have parted: each updates a part of the weights."""
    notes: Sequence[str] = ()
    """What a user should know of how the model was placed."""
    substitutes: bool = True
    """Whether what the optimizer keeps of a parameter can stand in its place on every worker that computes with it."""
    ignores_hooks = ""
    """The strategy whose passes never call hooks on the model's parameters, because they compute with other tensors."""
    wired: AnyPlace = AnyPlace()
    """Where it found the parameters, of one that goes on with those: looked at before each step and each save."""
    carried: Mapping[str, Any] = {}
    """What a group that forms anew may want to know of this one, by name."""

    def adopt(self, optimizer: Optimizer) -> None:
        """Take over the optimizer, which was made over the model."""
        self.optimizer = optimizer
        check_held(self.model, optimizer)

    def parameters(self) -> list[nn.Parameter]:
        """Return those that train, as the optimizer sees them, in the model's order."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def part(self) -> HasParameters:
        """The part of the model whose parameters are here."""
        return self.model

    def make_buffers(self, rules: Mapping[str, Rule], shards: int) -> Buffers:
        """Return what takes the buffers that are here through a step."""
        made = Buffers(self.model, rules, shards)
        made.refuses_unsaved = not self.holds_unsaved
        return made

    def leaves(self, step: StepState) -> Leaves:
        """Return the tensors that a backward pass of a loop's own would leave gradients in."""
        known = step.trained.parameters
        return Leaves([*known, *step.others] if step.others else known)

    @abstractmethod
    def local_state(self) -> LocalState:
        """Return what this worker holds of model and optimizer, without asking anybody."""

    @abstractmethod
    def load_local_state(self, catalogue: Catalogue, read: Read, extra_state: Mapping[str, Any]) -> None:
        """Load this worker's part of a state of which all tensors are known and can be read in parts."""

    def wanted(self, catalogue: Catalogue) -> dict[str, ChunkBounds]:
        """Return which part of each tensor `load_local_state` will read, by key: it is sent what it lacks of that."""
        return {key: ChunkBounds.whole(meta.shape) for key, meta in catalogue.items()}

    def gathered(self, held: LocalState, world: World) -> dict[str, Any]:
        """Put a whole state together of what everybody holds; all workers ask together."""
        return assemble(dict(collect(world, held.chunks, survey(world, held.chunks))), held.extra_state)

    def refresh(self) -> None:  # noqa: B027
        """Fetch the values that a step begins with."""

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Put in place the values that an evaluation begins with, for the duration of the context."""
        yield

    @contextmanager
    def substituted(self, swap: Callable[[], None]) -> Iterator[None]:
        """Compute with other values than the weights for the duration of the context, on all workers.

        `swap` exchanges them for the weights where the optimizer keeps them, and back. No message is needed at the end, where the
        group may be broken.
        """
        swap()
        try:
            yield
        finally:
            swap()

    def update(self, optimize: Optimize, result: StepResult) -> None:  # noqa: ARG002
        """Update the weights; every gradient sum of the step has arrived."""
        optimize()

    def align(self) -> None:  # noqa: B027
        """Average weights that have diverged (local-sgd) before the state is put together; all workers call it."""

    def synchronize(self) -> None:  # noqa: B027
        """Bring all workers to one state, or refuse where they have parted; all call it together."""

    def explained(self, error: BaseException) -> InputError | None:  # noqa: ARG002
        """Return what ended a run in words that name this placement as the cause; None for any other error."""
        return None

    def abandon(self) -> None:  # noqa: B027
        """Release the group: it is broken. What this worker holds stays."""

    def check_reusable(self) -> None:  # noqa: B027
        """Raise where the user's own module has lost what another group would need of it."""

    def restore(self) -> None:  # noqa: B027
        """Make the user's own module of the model again, for another placement to begin with."""


class WholePlacement(Placement):
    """All of the state on this worker."""

    whole = True
    scope = Scope.ALL

    def __init__(
        self, inputs: StrategyInputs, world: World, *, equal: bool = False, holds_all: bool = True
    ) -> None:
        """`equal` promises the same bits on all workers of `world`; `holds_all` allows what grows or is not saved by torch."""
        self.model = inputs.model.to(world.device)
        self.adapts = self.holds_unsaved = holds_all
        self._equal = world if equal else None
        if holds_all:
            note_unsaved(self.model)

    def local_state(self) -> LocalState:
        """Return everything."""
        return split(whole_state(self.model, self.optimizer))

    def gathered(self, held: LocalState, world: World) -> dict[str, Any]:  # noqa: ARG002
        """Return what this worker has: it is everything."""
        return assemble({key: chunk.values for key, chunk in held.chunks.items()}, held.extra_state)

    def load_local_state(self, catalogue: Catalogue, read: Read, extra_state: Mapping[str, Any]) -> None:
        """Load a whole state."""
        tensors = {key: read(key, ChunkBounds.whole(meta.shape)) for key, meta in catalogue.items()}
        load_whole_state(self.model, self.optimizer, assemble(tensors, extra_state), grows=self.adapts)

    def synchronize(self) -> None:
        """Refuse to save or report weights in which the workers have parted, however that came about."""
        if self._equal is not None:
            check_equal([*self.model.named_parameters(), *self.model.named_buffers()], self._equal)


def whole_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return model and optimizer by name, independent of the strategy."""
    moved = moved_unsaved(model)
    return {
        **({"buffers": moved} if moved else {}),
        MODEL: model.state_dict(),
        OPTIMIZER: plain(optimizer_state(model, optimizer)),
    }


def load_weights(model: nn.Module, values: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load weights and buffers into a model whose own are of the same types."""
    known = model.state_dict()
    for name, value in values.items():
        if isinstance(value, Tensor) and isinstance(known.get(name), Tensor):
            check_type(name, value.dtype, known[name].dtype)
    model.load_state_dict(values, strict=strict)


def load_whole_state(
    model: nn.Module, optimizer: Optimizer, state: dict[str, Any], *, grows: bool = False
) -> None:
    """Load what `whole_state` returned; where it `grows`, with the groups that were added to the optimizer since."""
    known = model.state_dict()
    refuse_made_later((f"{MODEL}/{name}" for name in state[MODEL]), known)
    load_weights(model, state[MODEL])
    put_unsaved(model, state.get("buffers", {}))
    load_optimizer_state(model, optimizer, state[OPTIMIZER], grows=grows)


def spread_weights(held: nn.Module | Iterable[Tensor], world: World, source: int = 0) -> None:
    """Send one worker's values to all others: the weights and buffers of a model, or some tensors."""
    if world.size == 1:
        return
    tensors = (*held.parameters(), *held.buffers()) if isinstance(held, nn.Module) else held
    for tensor in tensors:
        tensor.data.copy_(world.comm.broadcast(tensor.data.to(world.device), source))


def sum_of_start(value: Tensor) -> int:
    """Return a number that tells the values apart which a tensor begins with; of a large one those of some spread over it."""
    if value.numel() > _COMPARED:
        value = value.detach().reshape(-1)[:: -(-value.numel() // _COMPARED)]
    return checksum(value)


def check_same_start(sums: Mapping[str, int], world: World) -> None:
    """Raise on all workers where a model begins with other values on one of them; for who keeps a part of what it has made."""
    if world.size == 1 or not sums:
        return
    names = sorted(sums)
    rows = world.comm.all_gather(torch.tensor([sums[name] for name in names]).to(world.device))
    for rank, row in enumerate(rows):
        if not torch.equal(row, rows[0]):
            name = names[int((row != rows[0]).nonzero()[0])]
            raise InputError(
                f"{name} begins with other values on rank {rank} than on rank 0, and each worker keeps a part of the model that "
                "it has made: the model draws from a generator without a seed (np.random.default_rng()), or reads its rank. Give "
                "the generator a seed; torch, numpy and random have the run's on all workers."
            )
