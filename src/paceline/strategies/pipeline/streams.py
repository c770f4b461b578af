"""Random streams that go on from stage to stage: where those of torch, numpy and Python stand, in a form that travels."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.errors import InputError
from paceline.world import seeds


@dataclass(frozen=True)
class Standing:
    """Where the random streams stand."""

    torch: tuple[bytes, ...]
    """That of the host, and the device's."""
    numpy: tuple[Any, ...] | None
    """None: where the shard's seed put it. Most tasks draw from torch alone."""
    python: tuple[Any, ...] | None
    """The same for Python's `random`."""


class Streams:
    """The random streams of one micro-batch on one stage."""

    def __init__(self, seed: int, standing: Standing | None, device: torch.device) -> None:
        """Begin at the shard's seed, or go on from where its last micro-batch ended."""
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        seeds.seed_everything(seed)
        self._numpy, self._python = _numpy(), random.getstate()
        if standing is not None:
            self.go_on(standing)

    def standing(self) -> Standing:
        """Return where the streams stand now."""
        of_numpy, of_python = _numpy(), random.getstate()
        return Standing(
            tuple(generator.get_state().numpy().tobytes() for generator in self._generators),
            None if of_numpy == self._numpy else of_numpy,
            None if of_python == self._python else _packed(of_python),
        )

    def go_on(self, standing: Standing) -> None:
        """Put the streams where they stood on the stage before, or at the end of the micro-batch before."""
        for generator, raw in zip(self._generators, standing.torch, strict=True):
            generator.set_state(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        wanted = standing.numpy or self._numpy
        if _numpy() != wanted:
            kind, key, *rest = wanted
            np.random.set_state((kind, np.frombuffer(key, dtype=np.uint32), *rest))
        state = self._python if standing.python is None else _unpacked(standing.python)
        if random.getstate() != state:
            random.setstate(state)

    def replayed(self, before: Standing, standing: Standing) -> None:
        """Raise where the forward pass of a stage drew other numbers on its way to the cut than the stages before did.

        What it draws itself is drawn on each stage anew, and may be used after the cut; what the modules of other
        stages draw is not.
        """
        now = self.standing()
        for name, was, there, here in (
            *(("torch", *three) for three in zip(before.torch, standing.torch, now.torch, strict=True)),
            ("numpy", before.numpy, standing.numpy, now.numpy),
            ("random", before.python, standing.python, now.python),
        ):
            if was != here != there:
                raise InputError(
                    f"the forward pass draws from {name} before a cut of the pipeline, and so do modules of its own: a later "
                    "stage cannot tell which number is whose. Draw in one of the two only, or use another strategy."
                )


def _numpy() -> tuple[Any, ...]:
    kind, key, *rest = np.random.get_state()
    return kind, np.asarray(key).tobytes(), *rest


def _packed(state: tuple[Any, ...]) -> tuple[Any, ...]:
    version, words, gauss = state
    return version, array("I", words).tobytes(), gauss


def _unpacked(state: tuple[Any, ...]) -> tuple[Any, ...]:
    version, words, gauss = state
    return version, tuple(array("I", words)), gauss
