"""torch's own records of a model under `fully_shard`: which message a group of parameters sends, and at which moment.

The setters of `FSDPModule` are public and used where they do; nothing public tells the moments or the layout of a message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import _common_utils, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from paceline.compat.pytree import tree_leaves

__all__ = ["AllGather", "Group", "GroupedParam", "ReduceScatter"]

_HELD = {
    ShardedState.SHARDED: "sharded_param",
    ShardedState.SHARDED_POST_FORWARD: "_sharded_post_forward_param",
    ShardedState.UNSHARDED: "_unsharded_param",
}


class GroupedParam:
    """One parameter of a group (`FSDPParam`)."""

    def __init__(self, record: Any) -> None:
        self._record = record
        self.whole_size: torch.Size = record._orig_size
        self.sharded_size: torch.Size = record.sharded_size
        self.padded_count: int = record.padded_sharded_param_size.numel()
        """Numbers it takes in a message to one worker: those of the largest shard."""

    @property
    def name(self) -> str:
        """Its full name in the model; known once the root was found."""
        return str(self._record._param_fqn)

    @property
    def sharded(self) -> nn.Parameter:
        """This worker's rows, as the module holds them between passes: a DTensor."""
        held: nn.Parameter = self._record.sharded_param
        return held

    @property
    def gathered(self) -> nn.Parameter | None:
        """The whole parameter that passes compute with; None before the first one."""
        return getattr(self._record, "_unsharded_param", None)

    @property
    def in_use(self) -> nn.Parameter:
        """Which of them torch has put into the modules."""
        held: nn.Parameter = getattr(self._record, _HELD[self._record.sharded_state])
        return held

    @property
    def message(self) -> list[Tensor]:
        """What this worker sends of it when it is gathered."""
        return list(self._record.all_gather_inputs)

    def places(self) -> list[tuple[nn.Module, str]]:
        """Return the modules that hold it, each with its name there."""
        info = self._record._module_info
        modules, names = [info.module, *info.shared_modules], [info.param_name, *info.shared_param_names]
        return list(zip(modules, names, strict=True))

    def before_replacing(self, action: Callable[[], None]) -> None:
        """Call `action` whenever torch is about to put another tensor into the modules."""
        put = self._record._setattr_on_modules

        def replace(parameter: nn.Parameter) -> None:
            action()
            put(parameter)

        self._record._setattr_on_modules = replace


class Group:
    """The parameters of one sharded module that are gathered together (`FSDPParamGroup`)."""

    def __init__(self, state: Any, record: Any) -> None:
        self._state, self._record = state, record
        self.members = [GroupedParam(one) for one in record.fsdp_params]
        self.reduce_dtype: torch.dtype | None = record.mp_policy.reduce_dtype
        self.device: torch.device = record.device

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Those who share it."""
        found: dist.ProcessGroup = self._record._all_gather_process_group
        return found

    @property
    def is_unsharded(self) -> bool:
        """Whether its weights are gathered."""
        return bool(self._record.is_unsharded)

    def replace(self, moment: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Replace what torch calls at one point of a pass by `function`, and return the original.

        The points are pre_forward, pre_backward, post_backward and reshard.
        """
        original: Callable[..., Any] = getattr(self._record, moment)
        setattr(self._record, moment, function)
        return original

    def watch_inputs(self, watch: Callable[[list[Tensor]], None]) -> None:
        """Call `watch` with the inputs of each pass that want gradients, and leave them the tensors that they are.

        torch would pass them through a node of its own, in which the gradients of this module's uses of a tensor add up
        before those of other uses: where several modules are given one tensor that is another order of additions.
        """

        def register(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            if torch.is_grad_enabled() and (inputs := _wanting_gradients((args, kwargs))):
                watch(inputs)
            return args, kwargs

        self._record._register_post_backward_hook = register

    def gather(self) -> None:
        """Gather its weights, if they are not here yet."""
        self._record.unshard()
        self._record.wait_for_unshard()

    def forget_gather(self) -> None:
        """Forget a message with weights that is in flight."""
        self._record._all_gather_result = None

    def forget_forward(self) -> None:
        """Forget a forward pass that had no way back, or did not come to its end: torch does so only behind a backward pass.

        What it keeps decides which weights the next backward pass gathers ahead, and when gradients leave.
        """
        self._record.comm_ctx.post_forward_order.clear()
        self._record._post_forward_indices.clear()
        context = self._state._state_ctx
        for record in (self._record, self._state, context.iter_forward_root or self._state):
            record._training_state = TrainingState.IDLE
        context.iter_forward_root = None


def _wanting_gradients(inputs: Any) -> list[Tensor]:
    """Return the tensors that want gradients: 2.11 looks into registered containers, 2.13 into dataclasses too."""
    collect = getattr(_common_utils, "collect_grad_tensors", None)
    found = tree_leaves(inputs) if collect is None else collect(inputs)
    return [one for one in found if isinstance(one, Tensor) and one.requires_grad]


def groups_of(module: nn.Module) -> list[Group]:
    """Return the groups of a sharded module itself: 2.13 has a list of them, 2.11 one or none."""
    return [Group(fully_shard.state(module), record) for record in _records(module)]  # type: ignore[attr-defined]


def find_root(model: nn.Module) -> None:
    """Make torch find the root of the sharded modules now, not in the first forward pass."""
    fully_shard.state(model)._lazy_init()  # type: ignore[attr-defined]


def notes_on(parameter: nn.Parameter) -> dict[str, Any]:
    """Return the attributes of a parameter but the one by which `fully_shard` numbers it."""
    return {key: value for key, value in vars(parameter).items() if key != "_fsdp_orig_uid"}


def strip(module: nn.Module) -> None:
    """Take hooks, records and class that `fully_shard` has put on a module off it; its parameters stay sharded."""
    for record in _records(module):
        for member in record.fsdp_params:
            member._post_load_hook_handle.remove()
        for handle in (
            *record._module_to_pre_save_state_dict_hook_handle.values(),
            *record._module_to_pre_load_state_dict_hook_handle.values(),
        ):
            handle.remove()
    state = fully_shard.state(module)  # type: ignore[attr-defined]
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for key in (REGISTRY_KEY, STATE_KEY):
        vars(module).pop(key, None)
    _module_state_mapping.pop(module, None)
    module.__class__ = type(module).__mro__[2]


def _records(module: nn.Module) -> list[Any]:
    state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
    found = getattr(state, "_fsdp_param_groups", None)
    if found is None:
        found = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(found)
