"""The repeated blocks of a model: the modules that are gathered, recomputed or compiled as one."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from paceline.errors import InputError
from paceline.strategies.structure import Structure


def find_blocks(model: nn.Module, structure: Structure) -> dict[str, nn.Module]:
    """Return the blocks by name: those the task names, else those that repeat."""
    return repeated_blocks(model) if structure.blocks is None else named_blocks(model, structure.blocks)


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Find the outermost modules that stand at least twice, of one class and with parameters, in a list or sequence."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def walk(path: str, module: nn.Module) -> None:
        children = dict(module.named_children())
        kinds = [type(child) for child in children.values() if _has_parameters(child)]
        for name, child in children.items():
            here = f"{path}.{name}".lstrip(".")
            repeats = isinstance(module, nn.ModuleList | nn.Sequential) and kinds.count(type(child)) > 1
            if repeats and _has_parameters(child):
                if id(child) not in seen:
                    seen.add(id(child))
                    found[here] = child
            else:
                walk(here, child)

    walk("", model)
    return found


def named_blocks(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Find the modules that names or patterns such as "blocks.*" stand for."""
    modules = dict(model.named_modules())
    del modules[""]
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        # "blocks.*" means the blocks, not what is inside them: a star does not reach over a dot.
        matching = {
            name: module
            for name, module in modules.items()
            if name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)
        }
        if not matching:
            known = ", ".join(list(modules)[:8]) or "none, it is a single layer"
            raise InputError(
                f"block_modules() names {pattern!r}, but no module of the model is called so. Its modules: {known}"
                f"{', ...' if len(modules) > 8 else ''}."
            )
        found |= {name: module for name, module in matching.items() if _has_parameters(module)}
    return found


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
