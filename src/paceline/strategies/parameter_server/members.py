"""What each server has of the model, and what all have of it by name: a loop may change that between two steps, alike on all."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor, nn

from paceline.errors import InputError
from paceline.strategies.guards.places import AnyPlace, Members
from paceline.strategies.guards.writes import checksum
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


class ToldMembers(AnyPlace):
    """Takes up what was replaced, renamed or added, and has the other side compare it."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._members = model, Members(model)
        held = named_tensors(model)
        self._parameters = [one for one in held.values() if isinstance(one, nn.Parameter)]
        self._places = {id(one): place for place, one in enumerate(self._parameters)}
        self._buffers = {name for name, one in held.items() if id(one) not in self._places}
        self.told = self._tell()
        """The names and what they stand for, of what is new its values too."""

    def check(self) -> None:
        """Look at them anew where they have changed."""
        if self._members.have_changed():
            self.told = self._tell()

    def _tell(self) -> str:
        told = hashlib.sha256()
        for name, value in named_tensors(self._model).items():
            place = self._places.get(id(value))
            # Of buffers that were there the trainers bring the values.
            is_new = place is None and name not in self._buffers
            told.update(f"{name} {tuple(value.shape)} {place} {checksum(value) if is_new else ''}\n".encode())
        return told.hexdigest()

    def compare(self, number: int, trainer: int, told: str) -> None:
        """Raise where a trainer has others in this step."""
        if told != self.told:
            raise InputError(
                f"step {number}: a module, parameter or buffer of the model was replaced or added on rank {trainer}, but not on "
                "the servers, or with other values. Their loops have no batches, and one of several servers has a part of the "
                "weights: change the model between two steps, not inside of `for batch in step`, and alike on every worker."
            )
