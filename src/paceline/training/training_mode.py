"""Puts the model that a task makes into training mode, as every textbook loop does before its first step."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from paceline.training.mode_dependence import NORMALISING, depends_on_mode

WHOLE = (
    "the model came in evaluation mode, as from_pretrained leaves it, and was put into training mode: dropout and BatchNorm "
    "train. A part that is to stay as it is says so in a train() of its own."
)


class TrainingMode:
    """Puts a model into training mode, but for what its task has frozen, and notes what may be frozen by accident."""

    def __init__(self) -> None:
        self._changed = False
        self._left: list[str] = []

    def enter(self, model: nn.Module) -> None:
        """Call `train()` on a model in evaluation mode, else on the modules with a `train` of their own.

        What a task has frozen by `model.bn.eval()` in a model that trains stays frozen.
        """
        came, self._left = model.training, []
        if not came:
            model.train()
        self._changed = not came and any(one.training and depends_on_mode(one) for one in model.modules())
        if came:
            frozen = {module for module in model.modules() if not module.training}
            kept = _train_own(model, frozen)
            self._left = [name for name, one in model.named_modules() if one in frozen - kept]

    def note(self, model: nn.Module, optimizer: Optimizer) -> str:
        """Return what to tell of a model whose optimizer is made: it says which weights train."""
        if self._changed:
            return WHOLE
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        if held.isdisjoint(map(id, model.parameters())):  # it was made over weights that others have replaced
            held = {id(one) for one in model.parameters()}
        modules = dict(model.named_modules())
        for name in self._left:
            if name in modules and (kinds := _by_accident(modules[name], held)):
                return (
                    f"{name} came in evaluation mode, as from_pretrained leaves it, and stays so, though it has weights that "
                    f"train; that matters to {', '.join(kinds)}. Call train() on the model in model() where they should train."
                )
        return ""


def _train_own(module: nn.Module, frozen: set[nn.Module]) -> set[nn.Module]:
    """Call the outermost `train` of a module's own, but leave alone what came `frozen`; return what it keeps frozen itself."""
    if not module.training or type(module).train is nn.Module.train:
        return {one for child in module.children() for one in _train_own(child, frozen)}
    module.train()
    inner = frozen.intersection(module.modules())
    switched = {one for one in inner if one.training}
    for one in switched:
        one.training = False
    return inner - switched


def _by_accident(module: nn.Module, held: set[int]) -> list[str]:
    """Return the kinds of layers that do not train in a body whose weights do.

    A layer alone, and a block that has no weights but those of its normalisation, are frozen on purpose.
    """
    inner = list(module.modules())
    weighty = [one for one in inner if next(one.parameters(recurse=False), None) is not None]
    trains = any(one.requires_grad and id(one) in held for one in module.parameters())
    if len(inner) == 1 or not trains or all(isinstance(one, NORMALISING) for one in weighty):
        return []
    kinds = (type(one).__name__ for one in inner if not one.training and depends_on_mode(one))
    return list(dict.fromkeys(kinds))[:3]
