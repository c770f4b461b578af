"""Refuses other tensors in the place of a sharded model's weights: gathering puts its own there, and what was given is lost.

`torch.func.functional_call`, an assignment, a hook that swaps weights, `load_state_dict(assign=True)` give a module another
object. `p.data = ...`, `torch.utils.swap_tensors` and `model.double()` give a parameter other memory, which a DTensor does not
even compute with. Nothing of that reaches the rows that are gathered and updated.
"""
# ruff: noqa: SLF001  (torch offers nothing for the moment in which it replaces a parameter)

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from paceline.errors import InputError
from paceline.strategies.sharded import Part

_HELD = {
    ShardedState.SHARDED: "sharded_param",
    ShardedState.SHARDED_POST_FORWARD: "_sharded_post_forward_param",
    ShardedState.UNSHARDED: "_unsharded_param",
}


class Slot:
    """The places of one parameter in its modules; torch writes to them when it gathers and when it frees."""

    def __init__(self, member: Any, part: Part) -> None:
        """`member` is torch's own record of the parameter, `part` the rows of it that the optimizer updates."""
        self._member, self._part = member, part
        info = member._module_info
        modules, names = [info.module, *info.shared_modules], [info.param_name, *info.shared_param_names]
        self._places: list[tuple[nn.Module, str]] = list(zip(modules, names, strict=True))
        # Kept, so that its address is given to nothing else. A DTensor has no numbers in memory of its own.
        self._memory = member.sharded_param.untyped_storage()
        self._rows = member.sharded_param._local_tensor.data_ptr()
        self._put = member._setattr_on_modules
        member._setattr_on_modules = self._replace

    def check(self) -> None:
        """Raise where something else stands in its place."""
        held = getattr(self._member, _HELD[self._member.sharded_state])
        for module, name in self._places:
            if module._parameters.get(name) is not held:
                self._refuse()

    def check_memory(self) -> None:
        """Raise where it has other memory than the rows that are gathered and updated."""
        rows = self._member.sharded_param
        if (
            rows.untyped_storage()._cdata != self._memory._cdata
            or rows._local_tensor.data_ptr() != self._rows
            or (self._part.home is None and self._part.values.data_ptr() != self._rows)
        ):
            self._refuse()

    def _replace(self, parameter: nn.Parameter) -> None:
        self.check()
        self._put(parameter)

    def _refuse(self) -> NoReturn:
        raise InputError(
            f"{self._member._param_fqn} was given another tensor (torch.func.functional_call, an assignment to it or to its "
            ".data, model.to or load_state_dict(assign=True)), and fsdp would go on with the rows that it gathers. For one call "
            "let wrap_blocks() return [], which gathers the whole model at once; change weights in place "
            "(p.copy_() under torch.no_grad()), or use --strategy ddp."
        )
