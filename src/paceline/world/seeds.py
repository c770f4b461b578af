"""Where every seed comes from: a keyed mix of the run's seed and a path such as (epoch, step, shard).

The same path gives the same seed on every machine and in every process, and paths that differ give streams
that have nothing in common.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from paceline.compat import cuda_seeds


def derive(seed: int, *path: int | str) -> int:
    """Return the 63-bit seed of one place in a run: `derive(seed, "dropout", step, shard)`."""
    # The kind of each part and a terminator keep ("ab",), ("a", "b"), (1,) and ("1",) apart.
    parts = [f"i{part};" if isinstance(part, int) else f"s{len(part)}:{part};" for part in (seed, *path)]
    text = "".join(parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_everything(value: int) -> None:
    """Seed the generators of torch (CUDA too, once it is in use), numpy and random.

    Called once a shard a step, so it goes straight to the generators and past `torch.manual_seed`.
    """
    torch.default_generator.manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for generator in torch.cuda.default_generators:
            generator.manual_seed(value)


@contextmanager
def preserved() -> Iterator[None]:
    """Put every generator back afterwards to where it was before.

    CUDA that is put to use meanwhile begins as it would have done without: with the seeds that torch has kept for it, or, where
    there are none, with the seed of the CPU's generator. Until then torch keeps the same ones as before.
    """
    waiting = None if torch.cuda.is_initialized() else cuda_seeds.waiting()  # type: ignore[no-untyped-call]
    torch_seed = torch.default_generator.initial_seed()
    torch_state = torch.default_generator.get_state()
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    cuda = torch.cuda.default_generators if waiting is None else ()
    cuda_states = [generator.get_state() for generator in cuda]
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        for generator, state in zip(cuda, cuda_states, strict=True):
            generator.set_state(state)
        if waiting is not None and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            waiting.put_back()
        elif waiting is not None:
            for generator in torch.cuda.default_generators:
                generator.manual_seed(torch_seed)
            waiting.repeat()
