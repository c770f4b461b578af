"""Turns a sharded model back into the user's own module, for a group that has formed anew."""
# ruff: noqa: SLF001  (torch has no way back)

from __future__ import annotations

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer

from paceline.strategies.fsdp.param_groups import groups_of
from paceline.strategies.sharded import ShardedTensors


def unwrap_model(model: nn.Module, optimizer: Optimizer, local: ShardedTensors) -> None:
    """Put whole parameters back into a model, without values: the state is handed over to it afterwards."""
    owners = {
        name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
        for name, _ in model.named_parameters(remove_duplicate=False)
    }
    shared = {name: first for name, first in local.saved.items() if first is not None}
    for module in list(model.modules()):
        if isinstance(module, FSDPModule):
            _strip(module)
    made: dict[str, nn.Parameter] = {}
    for name, (module, attribute) in owners.items():
        first = shared.get(name, name)
        part = local.by_name[first]
        if first not in made:
            whole = torch.zeros(part.form.shape, dtype=part.form.dtype, device=part.values.device)
            made[first] = nn.Parameter(whole, requires_grad=part.values.requires_grad)
        setattr(module, attribute, made[first])
    back = {id(part.values): made[name] for name, part in local.by_name.items()}
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = [back.get(id(value), value) for value in group["params"]]


def _strip(module: nn.Module) -> None:
    """Take torch's hooks, records and class off a module."""
    for group in groups_of(module):
        for member in group.fsdp_params:
            member._post_load_hook_handle.remove()
        for handle in (
            *group._module_to_pre_save_state_dict_hook_handle.values(),
            *group._module_to_pre_load_state_dict_hook_handle.values(),
        ):
            handle.remove()
    state = fully_shard.state(module)  # type: ignore[attr-defined]
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for key in (REGISTRY_KEY, STATE_KEY):
        vars(module).pop(key, None)
    _module_state_mapping.pop(module, None)
    module.__class__ = type(module).__mro__[2]
