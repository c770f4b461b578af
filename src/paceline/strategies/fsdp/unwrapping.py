"""Turns a sharded model back into the user's own module, for a group that has formed anew."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from paceline.compat import fsdp
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
            fsdp.strip(module)
    made: dict[str, nn.Parameter] = {}
    for name, (module, attribute) in owners.items():
        first = shared.get(name, name)
        part = local.by_name[first]
        if first not in made:
            whole = torch.zeros(part.meta.shape, dtype=part.meta.dtype, device=part.values.device)
            made[first] = nn.Parameter(whole, requires_grad=part.values.requires_grad)
        setattr(module, attribute, made[first])
    back = {id(part.values): made[name] for name, part in local.by_name.items()}
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = [back.get(id(value), value) for value in group["params"]]
