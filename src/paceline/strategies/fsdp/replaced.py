"""Refuses other tensors in the place of a sharded model's weights: gathering puts its own there, and what was given is lost.

`torch.func.functional_call`, an assignment, a hook that swaps weights, `load_state_dict(assign=True)` give a module another
object. `p.data = ...`, `torch.utils.swap_tensors` and `model.double()` give a parameter other memory, which a DTensor does not
even compute with. Nothing of that reaches the rows that are gathered and updated.
"""

from __future__ import annotations

from typing import NoReturn

from paceline.compat.fsdp import GroupedParam
from paceline.compat.modules import parameters_of
from paceline.compat.tensors import local_part, storage_key
from paceline.errors import InputError
from paceline.strategies.sharded import LocalPart


class Slot:
    """The places of one parameter in its modules; torch writes to them when it gathers and when it frees."""

    def __init__(self, member: GroupedParam, part: LocalPart) -> None:
        """`part` is the rows of it that the optimizer updates."""
        self._member, self._part = member, part
        self._places = member.places()
        # Kept, so that its address is given to nothing else. A DTensor has no numbers in memory of its own.
        self._memory = member.sharded.untyped_storage()
        self._rows = local_part(member.sharded).data_ptr()
        member.before_replacing(self.check)

    def check(self) -> None:
        """Raise where something else stands in its place."""
        held = self._member.in_use
        for module, name in self._places:
            if parameters_of(module).get(name) is not held:
                self._refuse()

    def check_memory(self) -> None:
        """Raise where it has other memory than the rows that are gathered and updated."""
        rows = self._member.sharded
        if (
            storage_key(rows.untyped_storage()) != storage_key(self._memory)
            or local_part(rows).data_ptr() != self._rows
            or (self._part.home is None and self._part.values.data_ptr() != self._rows)
        ):
            self._refuse()

    def _refuse(self) -> NoReturn:
        raise InputError(
            f"{self._member.name} was given another tensor (torch.func.functional_call, an assignment to it or to its "
            ".data, model.to or load_state_dict(assign=True)), and fsdp would go on with the rows that it gathers. For one call "
            "let block_modules() return [], which gathers the whole model at once; change weights in place "
            "(p.copy_() under torch.no_grad()), or use --strategy ddp."
        )
