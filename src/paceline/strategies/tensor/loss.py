"""A loss over scores of which each worker has a part: torch's `loss_parallel`, and the proof that it fits the loss.

It computes cross-entropies without gathering the scores. torch's version takes for granted that log-softmax is followed
by the negative log-likelihood and nothing else; with label smoothing, say, its gradient would be wrong without a word.
So the first batch is computed both ways.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel

from paceline.errors import InputError
from paceline.strategies.base import LossFunction
from paceline.strategies.guards.loss_checks import check_loss
from paceline.task import Loss
from paceline.world import seeds

CLOSE = 1e-3
ADVICE = "It takes F.cross_entropy with class indices, without label smoothing. Leave out --loss-parallel."


class SplitScores:
    """The layer whose results stay split while a task's loss is computed, and are gathered everywhere else."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._kept = False
        self._proven = False
        layer.register_forward_hook(self._hand_on)

    def _hand_on(self, _: nn.Module, __: Any, output: DTensor) -> Tensor:
        if self._kept:
            return output
        return output.redistribute(placements=[Replicate()]).to_local()

    def around(self, loss: LossFunction) -> LossFunction:
        """Return the loss function with split scores; what it gives is plain."""

        def computed(model: nn.Module, batch: Any) -> Loss:
            if self._proven:
                return self._split(loss, model, batch)
            self._proven = True
            return self._prove(loss, model, batch)

        return computed

    def _split(self, loss: LossFunction, model: nn.Module, batch: Any) -> Loss:
        self._kept = True
        try:
            with loss_parallel():
                value = loss(model, batch)
                check_loss(value)
                return _gathered(value)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            if "DTensor" in str(error) or "loss_parallel" in str(error):
                said = str(error).partition("\n")[0][:160]
                raise InputError(f"--loss-parallel does not fit this loss ({said}). {ADVICE}") from error
            raise
        finally:
            self._kept = False

    def _prove(self, loss: LossFunction, model: nn.Module, batch: Any) -> Loss:
        with seeds.preserved():
            whole = loss(model, batch)
            check_loss(whole)
        value = self._split(loss, model, batch)
        weight = dict(self._layer.named_parameters(recurse=False))["weight"]
        wanted = torch.autograd.grad(whole.total, weight)[0]
        with loss_parallel():
            got = torch.autograd.grad(value.total, weight, retain_graph=True)[0]
        apart = max(_apart(got, wanted), _apart(value.total, whole.total))
        if not apart <= CLOSE:
            raise InputError(
                f"--loss-parallel does not fit this loss: its gradient would be {apart:.1e} from the true one. {ADVICE}"
            )
        return value


def _gathered(loss: Loss) -> Loss:
    total = loss.total.full_tensor() if isinstance(loss.total, DTensor) else loss.total
    weight = loss.weight.full_tensor() if isinstance(loss.weight, DTensor) else loss.weight
    return Loss(total, weight, {name: _gathered(term) for name, term in loss.auxiliary.items()})


def _apart(one: Tensor, other: Tensor) -> float:
    both = [value.full_tensor() if isinstance(value, DTensor) else value for value in (one, other)]
    difference = (both[0] - both[1]).detach().float().norm()
    return float(difference / both[1].detach().float().norm().clamp(min=1e-12))
