"""This worker's rows of a sharded model; its optimizer works on them as plain tensors (`sharded`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from paceline.state.chunks import OPTIMIZER, Catalogue, ChunkBounds, LocalState, Read
from paceline.state.redistribution import own_bounds
from paceline.strategies.base import Leaves, StrategyInputs
from paceline.strategies.fsdp.asked_rows import AskedRows
from paceline.strategies.fsdp.model import make_sharded, unwrap_model
from paceline.strategies.fsdp.own_use import OwnUse
from paceline.strategies.fsdp.reduction import FsdpReduction
from paceline.strategies.guards.guarded_state import guard_state
from paceline.strategies.guards.partial_update import check_half
from paceline.strategies.guards.places import Places
from paceline.strategies.guards.refusals import refuse_hooks
from paceline.strategies.guards.trained import check_equal, check_held
from paceline.strategies.in_turns.optimizers import each_of
from paceline.strategies.placement import Placement
from paceline.strategies.sharded import ShardedTensors
from paceline.strategies.step_state import StepState
from paceline.world import World

_ROWS = (
    "under fsdp the optimizer holds this worker's rows, and what is done under the name of the whole weight would be lost. Go "
    "through optimizer.param_groups, or optimizer.state.values(); to find the state of one weight use --strategy ddp."
)


class RowsPlacement(Placement):
    """Some rows of every parameter."""

    ignores_hooks = "fsdp"
    compares_options = True

    def __init__(
        self, inputs: StrategyInputs, data: World, place: World, reduction: FsdpReduction, *, exact: bool
    ) -> None:
        """`data` is everybody that data is dealt to, `place` those who share the model."""
        self._data, self._exact, self._reduction = data, exact, reduction
        self._made = make_sharded(inputs, data, place, reduction)
        self.model = self._made.model
        self.notes = self._made.notes
        self._own_use, self._asked_rows = OwnUse(self.model, data, reduction.meets), AskedRows(self.model)

    def adopt(self, optimizer: Optimizer) -> None:
        """Have the optimizer work on this worker's rows."""
        refuse_hooks(self.model, "fsdp")  # which the optimizer's maker may have put there
        if self._exact:
            check_half(optimizer, self._data.device)
        order = {id(one): place for place, one in enumerate(super().parameters())}
        self.optimizer, self.local = optimizer, ShardedTensors(self.model)
        self.local.rewire(optimizer, self._made.originals)
        check_held(cast(nn.Module, self.local), optimizer)
        param_groups = self._made.param_groups
        places = [
            [order[id(member.sharded)] for member in param_group.trained] for param_group in param_groups
        ]
        self._reduction.attach(param_groups, places, self.parameters())
        for param_group in param_groups:
            param_group.watch(self.local)
        self.wired = Places(self.model, swapped=True)
        held = dict(self.model.named_parameters())
        self._whole = {
            id(held[name]): name for name, rows in self.local.named_parameters() if held[name] is not rows
        }
        self.refresh()

    def refresh(self) -> None:
        """Have the optimizer refuse whole weights in its state, which loading replaces."""
        guard_state(each_of(self.optimizer), self._whole, _ROWS, strict=True)

    def parameters(self) -> list[nn.Parameter]:
        """Return the rows of those that train."""
        return [value for value in self.local.parameters() if value.requires_grad]

    @property
    def names(self) -> list[str]:
        """The names of those that train."""
        return [name for name, value in self.local.named_parameters() if value.requires_grad]

    def gathered_leaves(self) -> list[nn.Parameter]:
        """Return the whole parameters of passes, as far as there have been any."""
        found = [member.gathered for member in self._reduction.trained]
        return [one for one in found if one is not None]

    def leaves(self, step: StepState) -> Leaves:
        """Return the whole parameters of passes; the rows of them that the model and the optimizer hold are hidden."""
        return Leaves(self.gathered_leaves(), [*step.trained.parameters, *step.parameters])

    def synchronize(self) -> None:
        """Refuse to save or report buffers in which the workers have parted; of weights each has its own rows.

        What a loop has written to those is compared by what it was."""
        self._reduction.gather.begin()
        if self._exact:
            check_equal(self.model.named_buffers(), self._data)
            self._own_use.check_written()

    def local_state(self) -> LocalState:
        """Return this worker's rows; nobody is asked."""
        self._reduction.check_slots()
        self.local.renew_buffers()
        return self.local.local_state(self.optimizer, {})

    def wanted(self, catalogue: Catalogue) -> dict[str, ChunkBounds]:
        """Return the bounds of this worker's rows."""
        return own_bounds(self.local_state().chunks, catalogue)

    def load_local_state(self, catalogue: Catalogue, read: Read, extra_state: Mapping[str, Any]) -> None:
        """Take over this worker's rows of a state."""
        self.local.renew_buffers()
        self.local.check_known(catalogue)
        self.local.load_local_state(self.optimizer, catalogue, read, extra_state[OPTIMIZER])
        self._own_use.forget_written()

    def abandon(self) -> None:
        """See no more of what a loop does with weights: the group is left."""
        self._own_use.stop()
        self._asked_rows.stop()

    def restore(self) -> None:
        """Put whole parameters back into the model, without values."""
        if self.local.host is not None:
            self.local.host.release()
        unwrap_model(self.model, self.optimizer, self.local)
