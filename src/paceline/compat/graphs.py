"""torch's compiler behind `torch.compile`: what it is told, and captured graphs, compiled in one piece or several."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from paceline.compat import compiler  # noqa: F401  (in place of the stand-in, before anything of it is imported)

# isort: split
from torch._dynamo import config as _dynamo
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.utils import counters
from torch._functorch import config as _functorch
from torch._inductor import config as _inductor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion

with warnings.catch_warnings():
    # torch's own modules use what torch calls deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch._inductor.compile_fx import compile_fx

Graph = fx.GraphModule
Compiled = Callable[..., Any]
_FORGETS_PRECISION = TorchVersion(torch.__version__) < "2.13"
"""Whether torch's cache of traced passes takes those of bf16 for those of fp16: it knows that there is autocast, not to what."""


def allow_graphs(count: int) -> None:
    """Have torch compile up to so many graphs of one function; past that it would run it uncompiled, and not say so."""
    _dynamo.recompile_limit = max(_dynamo.recompile_limit, count)
    _dynamo.accumulated_recompile_limit = max(_dynamo.accumulated_recompile_limit, count)


def guard_hooks() -> None:
    """Have torch compile again where a module without hooks is given one, which it would not call otherwise.

    It costs about a microsecond for each module a call: 31.1 ms for a step of 61 modules became 31.7 at best, 35.3 became 35.0
    at the median.
    """
    _dynamo.skip_nnmodule_hook_guards = False


def compile_graph(
    graph: Graph,
    inputs: Sequence[Any],
    *,
    piece_bytes: int | None,
    repeatable: bool,
    passes_once: bool,
    cached: bool,
) -> Compiled:
    """Compile a graph with torch's own compiler.

    `piece_bytes`: in pieces of at least so many bytes of parameters, each with a backward pass of its own; None is one piece.
    `repeatable`: no kernel is chosen by timing it. `passes_once`: no backward pass keeps the graph for another one. `cached`:
    torch may take the traced passes of an earlier process, which it knows by the names of what a graph calls.
    """
    chosen: dict[str, Any] = (
        {"deterministic": True} if repeatable and hasattr(_inductor, "deterministic") else {}
    )
    traced: dict[str, Any] = {
        "donated_buffer": _functorch.donated_buffer and passes_once,
        "enable_autograd_cache": _functorch.enable_autograd_cache and cached and not _is_mistaken(),
    }
    with _inductor.patch(chosen), _functorch.patch(traced):
        # Blocks that are recomputed are graphs inside this one, which torch 2.11 does not split.
        if piece_bytes is None or _has_subgraphs(graph):
            return _callable(compile_fx(graph, list(inputs)))
        split = DDPOptimizer(piece_bytes, compile_fx, piece_bytes)  # type: ignore[arg-type]
        return _callable(split.compile_fn(graph, list(inputs)))


def outputs_without_memory(graph: Graph, inputs: Sequence[Any]) -> list[Any] | None:
    """Return what a graph would give, as tensors without memory whose `grad_fn` show its operations; None where it cannot."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
            fakes = [mode.from_tensor(one) if isinstance(one, Tensor) else one for one in inputs]
            return list(graph(*fakes))
    except Exception:  # noqa: BLE001  (whatever an operation without memory cannot do: nothing is known then)
        return None


def captured() -> tuple[int, list[str]]:
    """Return how many functions torch has captured in this process, once for each shape, and why it could not go on in some."""
    return counters["frames"]["ok"], sorted(counters["graph_break"])


def _is_mistaken() -> bool:
    """Return whether torch may find passes in its cache that were traced in another precision."""
    return _FORGETS_PRECISION and any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def _has_subgraphs(graph: Graph) -> bool:
    return any(
        node.op == "get_attr" and isinstance(getattr(graph, str(node.target), None), fx.GraphModule)
        for node in graph.graph.nodes
    )


def _callable(made: Any) -> Compiled:
    """Return a plain function: the frames of a module that is made of pieces torch would capture once more."""

    def run(*args: Any) -> Any:
        return made(*args)

    return run
