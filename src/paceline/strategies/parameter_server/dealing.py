"""Which server holds what of a model: the largest parameters first, each to the server that has least so far."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from paceline.strategies.data_parallel.zero import deal


class Dealing:
    """The part of each server, the same on all workers."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], servers: int) -> None:
        owners = deal([one.numel() * one.element_size() for one in parameters], servers)
        self.places = [
            [place for place, owner in enumerate(owners) if owner == server] for server in range(servers)
        ]
        """For each server, where its parameters are in the list of all that are trained."""
        of = {id(one): owner for one, owner in zip(parameters, owners, strict=True)}
        # Under every name that a shared parameter has; what is not trained, buffers first of all, is with the first server.
        named = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        self.owners = {name: of.get(id(value), 0) for name, value in named.items()}
        """The server of everything that the model holds, by name."""
