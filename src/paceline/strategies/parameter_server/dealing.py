"""Which server holds what of the model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from paceline.strategies.sharded import deal


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model, those that are shared under every name that they have."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


class Dealing:
    """The part of each server, the same on all workers: the largest parameters first, each to whoever has least so far."""

    def __init__(self, parameters: Sequence[nn.Parameter], servers: int) -> None:
        owners = deal([one.numel() * one.element_size() for one in parameters], servers)
        self.places = [
            [place for place, owner in enumerate(owners) if owner == server] for server in range(servers)
        ]
        """For each server, where its parameters are in the list of all that are trained."""
        self._owners = {id(one): owner for one, owner in zip(parameters, owners, strict=True)}

    def named_at(self, server: int, model: nn.Module) -> dict[str, Tensor]:
        """Return what a server has of all that the model holds now: a loop may give a name to something else."""
        # What is not trained, buffers first of all, is with the first server.
        named = named_tensors(model).items()
        return {name: value for name, value in named if self._owners.get(id(value), 0) == server}
