"""What a step came to, over the whole global batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.errors import NonFiniteLossError

_ENTRY, _NORM = "the loss and its weight", "the gradient's norm"  # no module's term is named like these


class StepResult:
    """Sums that may still be on their way from a GPU: reading a number waits for it, making the result does not."""

    def __init__(
        self,
        number: int,
        size: int,
        entry: Tensor,
        terms: Mapping[str, Tensor],
        *,
        again: bool = False,
        divided: bool = False,
    ) -> None:
        self.number = number
        """How many steps came before this one."""
        self.size = size
        """Samples of the global batch."""
        self.again = again
        """Whether a worker was lost in the middle: nothing was updated, and the step is given once more."""
        self._divided = divided
        """Whether the gradients are over the true weight as they are."""
        self.entry = entry
        """The sum of the losses and the sum of the weights."""
        self.on_cpu = entry.device.type == "cpu"
        """Whether its numbers can be read without waiting for a GPU."""
        self._read: list[float] = entry.tolist() if self.on_cpu else []
        self.norm: Tensor | None = None
        self.applied_factor: Tensor | float = 1.0
        """What the summed gradients were multiplied by in the end."""
        self.scaled = False
        """Whether a loss scaler looks after gradients that overflow: it leaves such a step out."""
        self.terms = terms
        self._sent: tuple[torch.cuda.Event, dict[str, Tensor]] | None = None

    def send(self) -> None:
        """Start copying the numbers from a GPU: reading them then waits for this step, not for later kernels."""
        if not self.entry.is_cuda or self._sent is not None:
            return
        coming = {name: number.to("cpu", non_blocking=True) for name, number in self.numbers().items()}
        self._sent = torch.cuda.Event(), coming  # type: ignore[no-untyped-call]
        self._sent[0].record()

    def numbers(self) -> dict[str, Tensor]:
        """Return what a person may ask for, by name, where it was computed."""
        return {_ENTRY: self.entry, **self.terms} | ({} if self.norm is None else {_NORM: self.norm})

    def send_packed(self, packed: Tensor) -> list[Tensor]:
        """Start copying the numbers, which lie side by side in one tensor; return what comes behind them, one by one."""
        coming = packed.to("cpu", non_blocking=True)
        self._sent = torch.cuda.Event(), {}  # type: ignore[no-untyped-call]
        self._sent[0].record()
        start = 0
        for name, number in self.numbers().items():
            self._sent[1][name] = coming[start : start + number.numel()].view(number.shape)
            start += number.numel()
        return list(coming[start:].unbind())

    def _arrived(self, name: str, number: Tensor) -> Tensor:
        if self._sent is None:
            return number
        event, coming = self._sent
        event.synchronize()
        return coming.get(name, number)

    def state(self) -> dict[str, Any]:
        """Return it as tensors and numbers, for a worker that missed the end of the step."""
        return {
            "number": self.number,
            "size": self.size,
            "entry": self.entry,
            "norm": self.norm,
            "terms": self.terms,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> StepResult:
        """Make it of what `state` gave."""
        made = cls(state["number"], state["size"], state["entry"], state["terms"])
        made.norm = state["norm"]
        return made

    def _wait(self) -> list[float]:
        """Wait for the sum of the losses and the sum of the weights."""
        self._read = self._arrived(_ENTRY, self.entry).tolist()
        return self._read

    @property
    def factor(self) -> Tensor | float:
        """What turns gradients over the number of samples into gradients over the true weight."""
        if self._divided:
            return 1.0
        return self.size / (self._read[1] if self.on_cpu else self.entry[1])

    @property
    def weight(self) -> float:
        """The weight of the whole global batch."""
        return (self._read or self._wait())[1]

    @property
    def loss(self) -> float:
        """The mean loss of the global batch, its auxiliary terms included."""
        total, weight = self._read or self._wait()
        return total / weight + sum(self.auxiliary.values()) if self.terms else total / weight

    @property
    def auxiliary(self) -> dict[str, float]:
        """The mean of each auxiliary term."""
        sums = {name: self._arrived(name, entry).tolist() for name, entry in self.terms.items()}
        return {name: total / weight if weight else total for name, (total, weight) in sums.items()}

    def read(self) -> tuple[float, float, float | None, dict[str, float]]:
        """Return loss, weight, norm of the gradient and auxiliary terms, as the properties of these names give them."""
        total, weight = self._read or self._wait()
        terms = self.auxiliary if self.terms else {}
        norm = None if self.norm is None else self.gradient_norm
        return total / weight + sum(terms.values()) if terms else total / weight, weight, norm, terms

    @property
    def gradient_norm(self) -> float | None:
        """The norm of the true global gradient before clipping, where clipping was asked for."""
        return None if self.norm is None else float(self._arrived(_NORM, self.norm))

    def __repr__(self) -> str:
        """Return the numbers a person asks for; on a GPU this waits for them."""
        shown = {"step": self.number, "loss": self.loss, "weight": self.weight, "size": self.size}
        if self.norm is not None:
            shown["gradient_norm"] = self.gradient_norm or 0.0
        more = ", again=True" if self.again else ""
        return f"StepResult({', '.join(f'{name}={value:.6g}' for name, value in shown.items())}{more})"

    def check(self) -> None:
        """Raise when the loss is not a finite number, or nothing had any weight."""
        total, weight = self._read or self._wait()
        if not 0 < weight < math.inf:
            none = "" if weight else ": no sample has any, or no batch of the step was given to step.backward"
            raise NonFiniteLossError(
                f"step {self.number}: the weight of the whole global batch is {weight + 0.0:g}{none}."
            )
        if not math.isfinite(total):
            raise NonFiniteLossError(f"step {self.number}: the loss is {total}.")
        for name, value in self.auxiliary.items() if self.terms else ():
            if not math.isfinite(value):
                raise NonFiniteLossError(f"step {self.number}: the auxiliary term {name} is {value}.")
        if self.norm is not None:
            self.check_norm()

    def check_norm(self) -> None:
        """Raise when the norm of the gradient is not a finite number, where it was taken."""
        norm = None if self.scaled else self.gradient_norm
        if norm is not None:
            check_norm(self.number, norm)


def check_norm(number: int, norm: float) -> None:
    """Raise when the norm of a step's gradient is not a finite number; its loss was, or that would have been said."""
    if not math.isfinite(norm):
        raise NonFiniteLossError(
            f"step {number}: the norm of the gradient is {norm}, though the loss is finite: some derivative is infinite there "
            "(a square root or a norm at 0, a logarithm or a quotient near 0)."
        )
