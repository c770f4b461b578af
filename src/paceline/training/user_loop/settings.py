"""What a loop's body may set and what can be put back exactly: the optimizer's groups, their options, and what trains."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor

from paceline.state.optimizer_state import options_of, set_options
from paceline.strategies.replica import Replica
from paceline.training.user_loop.marks import are_same

_TRAINS = attrgetter("requires_grad")


class Settings:
    """All of it, as it is now."""

    def __init__(self, replica: Replica, tensors: Sequence[Tensor]) -> None:
        """`tensors` are those of the model."""
        optimizer = replica.optimizer
        self._of_whole = replica.whole
        self.options = options_of(optimizer)
        self.groups = [(group, list(group["params"])) for group in optimizer.param_groups]
        self._tensors, self._trained = tensors, list(map(_TRAINS, tensors))

    def has_groups_of(self, other: Settings) -> bool:
        """Return whether the optimizer had the same groups then, of the same parameters."""
        mine, others = ([one for _, one in these] for these in (self.groups, other.groups))
        return len(mine) == len(others) and all(map(are_same, mine, others))

    def put_back(self, replica: Replica) -> None:
        """Restore the settings."""
        optimizer = replica.optimizer
        # Else the parameters are others, here or there, and nothing is added to their groups.
        if replica.whole and self._of_whole:
            known = {id(one) for _, parameters in self.groups for one in parameters}
            for parameter in [one for group in optimizer.param_groups for one in group["params"]]:
                if id(parameter) not in known:
                    optimizer.state.pop(parameter, None)
            optimizer.param_groups[:] = [group for group, _ in self.groups]
            for group, parameters in self.groups:
                group["params"][:] = parameters
        set_options(optimizer, self.options, removes=True)
        self.put_training_back()

    def put_training_back(self) -> None:
        """Restore which parameters require gradients."""
        for tensor, trains in zip(self._tensors, self._trained, strict=True):
            if tensor.requires_grad != trains:
                tensor.requires_grad_(trains)
