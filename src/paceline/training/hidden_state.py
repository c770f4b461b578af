"""What a model computes with that is neither parameter nor buffer: random generators of its own, tensors written in place.

Each worker's passes move its own, so what is drawn from them or read in them depends on which shards a worker has. Nothing
fails, no checkpoint holds them, and weights come out otherwise than with one process.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.errors import InputError


class HiddenState:
    """Watches them from the beginning of a step to its end; not in the first one, whose passes may well make them."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._steps = 0
        self._generators: list[tuple[str, torch.Generator]] = []
        self._tensors: list[tuple[str, Tensor]] = []
        self._before: tuple[list[Tensor], list[int]] = [], []
        self._told = False

    def begin(self, model: nn.Module) -> None:
        """Note where everything stands before a step."""
        if model is not self._model:
            self._model, self._steps = model, 0
        self._steps += 1
        if self._steps == 2:
            self._look(model)
        if self._generators or self._tensors:
            self._before = self._now()

    def check(self, number: int, *, several: bool) -> str | None:
        """Return what to tell of a step that has written to a tensor; raise where `several` workers draw from their own."""
        if self._steps < 2 or not (self._generators or self._tensors):
            return None
        (states, versions), (states_now, versions_now) = self._before, self._now()
        for (name, _), before, now in zip(self._generators, states, states_now, strict=True):
            if not torch.equal(before, now):
                return self._drawn(name, number, several=several)
        for (name, _), earlier, later in zip(self._tensors, versions, versions_now, strict=True):
            if earlier != later:
                return self._once(
                    f"step {number}: forward writes to {name}, a tensor that is neither parameter nor buffer. It follows the "
                    "passes of this worker's own samples, and no checkpoint holds it, so what is computed from it depends on "
                    "shards and workers. Register it as a buffer, with a rule in buffers()."
                )
        return None

    def _look(self, model: nn.Module) -> None:
        held = [
            (f"{name}.{key}".lstrip("."), value)
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, torch.Generator | Tensor)
        ]
        self._generators = [(name, one) for name, one in held if isinstance(one, torch.Generator)]
        self._tensors = [(name, one) for name, one in held if isinstance(one, Tensor)]

    def _now(self) -> tuple[list[Tensor], list[int]]:
        states = [one.get_state() for _, one in self._generators]
        return states, [one._version for _, one in self._tensors]  # noqa: SLF001  (torch's own count of writes in place)

    def _drawn(self, name: str, number: int, *, several: bool) -> str | None:
        text = (
            f"step {number}: the model draws from {name}, a torch.Generator of its own, which follows the passes of one worker: "
            "with another number of workers it draws other numbers. Draw from torch's own stream (leave generator= out), which "
            "is seeded for every shard."
        )
        if several:
            raise InputError(text)
        return self._once(text)

    def _once(self, text: str) -> str | None:
        told, self._told = self._told, True
        return None if told else text
