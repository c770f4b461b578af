"""Refuses what a strategy cannot do to a model as one process would, by name and before anything is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NoReturn

from torch import Tensor, nn

from paceline.compat.modules import MEMBERS
from paceline.compat.pytree import tree_leaves
from paceline.errors import InputError
from paceline.strategies import sparse
from paceline.strategies.guards.before_first_step import check_hooks, has_hooks


def refuse_sparse(model: nn.Module, strategy: str) -> None:
    """Raise for embeddings with sparse=True, where gradients travel as whole tensors."""
    name = next(iter(sparse.tables(model)), None)
    if name is not None:
        raise InputError(
            f"{name} is an embedding with sparse=True, whose gradient is a few rows, but --strategy {strategy} adds up whole "
            "gradients. Use --strategy hybrid or ddp, or leave sparse=True out."
        )


def refuse_hooks(model: nn.Module, strategy: str) -> None:
    """Raise for hooks on parameters, where the tensors that passes compute with are others."""
    check_hooks(model.named_parameters())
    refuse_gradient_hooks(model.named_parameters(), strategy)


def refuse_gradient_hooks(named: Iterable[tuple[str, nn.Parameter]], strategy: str) -> None:
    """Raise for hooks on gradients of these parameters, which no pass of this strategy computes."""
    for name, parameter in named:
        if has_hooks(parameter):
            raise InputError(
                f"{name} has a hook (register_hook), which --strategy {strategy} would never call: passes compute with other "
                "tensors than the model was made of. Leave the hook out, change the loss instead, or use --strategy single."
            )


def refuse_references(model: nn.Module, strategy: str) -> None:
    """Raise for parameters that a module holds a second time in a plain attribute, where they are replaced by others."""
    known = {id(value): name for name, value in model.named_parameters()}
    for where, value in plain_tensors(model):
        if id(value) in known:
            raise InputError(
                f"{where} holds the parameter {known[id(value)]} a second time, outside of what torch knows of, and would go on "
                f"with its first values when --strategy {strategy} cuts it up. Read it from its module instead, or use "
                "--strategy ddp."
            )


def refuse_copies(module: nn.Module, strategy: str) -> None:
    """Make deepcopy of a sharded module raise: torch would copy this worker's part, or compute with the original."""

    def refuse(_: object) -> NoReturn:
        raise InputError(
            f"the model is copied (deepcopy, torch.optim.swa_utils.AveragedModel), and under {strategy} each worker has a part "
            "of it, so a copy could neither be used nor saved. Use --strategy ddp to average weights."
        )

    vars(module)["__deepcopy__"] = refuse


def plain_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that modules hold in plain attributes, where torch knows nothing of them."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            # torch's recurrent layers list their parameters a second time, and keep that list up to date themselves.
            if name in MEMBERS or isinstance(module, nn.RNNBase):
                continue
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor):
                    yield f"{path}.{name}".lstrip("."), leaf
