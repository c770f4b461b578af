"""What trainers and servers have of the model by name: a loop may change that between two steps, alike on all of them."""

from __future__ import annotations

import hashlib

from torch import nn

from paceline.errors import InputError
from paceline.strategies.guards.places import AnyPlace, Members
from paceline.strategies.guards.writes import checksum
from paceline.strategies.parameter_server.dealing import named_tensors


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
