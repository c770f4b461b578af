"""Makes a process give the same bits twice: deterministic kernels, or the name of the operation that has none."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.compat import compiler_setting
from paceline.errors import InputError
from paceline.world import env

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_NO_KERNEL = re.compile(r"^(\S+) does not have a deterministic implementation")


def select_kernels(device: torch.device, *, compiled: bool) -> None:
    """Make torch use deterministic kernels only, the same under every strategy. Call before CUDA computes anything."""
    # In evaluation nn.TransformerEncoder takes a kernel of its own, which rounds otherwise, unless somebody listens to its
    # layers: fsdp does, pp cuts them, one process does not. All take the way that training takes.
    torch.backends.mha.set_fastpath_enabled(False)
    _set_fusions([])
    if device.type != "cuda":
        return
    if env.read(_WORKSPACE) is None:
        env.export({_WORKSPACE: ":4096:8"})  # without it cuBLAS may pick another algorithm from run to run
    torch.backends.cudnn.benchmark = False
    # Filling fresh memory shows who reads it before writing to it, at up to 2 % of a step; it makes no kernel repeatable.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if compiled:
        torch.use_deterministic_algorithms(mode=True)
    else:
        # The same switch without the compiler's own, which would be loaded only to set it.
        torch.set_deterministic_debug_mode("error")


@contextmanager
def preserved() -> Iterator[None]:
    """Put back afterwards what `select_kernels` and compiling change of this process, and how many threads compute."""
    fast_path, threads = torch.backends.mha.get_fastpath_enabled(), torch.get_num_threads()
    benchmark, mode = torch.backends.cudnn.benchmark, torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    fusions = _set_fusions([])
    _set_fusions(fusions)
    with env.preserved(_WORKSPACE), compiler_setting.preserved():
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            torch.backends.cudnn.benchmark = benchmark
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
            torch.set_deterministic_debug_mode(mode)
            _set_fusions(fusions)


def _set_fusions(allowed: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Set how often TorchScript may fuse a graph anew; return what was set before.

    It fuses a function after its first calls, and so rounds otherwise from then on: how many shards have gone through it, which
    depends on the workers, would decide the bits. Where it may not fuse, each call computes what plain Python does.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript as a whole
        before: list[tuple[str, int]] = torch.jit.set_fusion_strategy(allowed)
    return before


def named(error: RuntimeError) -> InputError | None:
    """Turn torch's refusal of an operation into a message that says what to do; None for any other error."""
    found = _NO_KERNEL.match(str(error))
    if found is None:
        return None
    return InputError(
        f"{found[1]} has no deterministic kernel on this device, so the bits would differ from run to run. "
        "Use another operation, or --exact numeric."
    )
