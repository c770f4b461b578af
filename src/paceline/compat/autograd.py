"""What autograd's engine tells of itself only under private names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

run_engine: Callable[..., Any] = _engine_run_backward
"""Run the engine as `torch.autograd.backward` and `torch.autograd.grad` do behind their checks."""
run_backward: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], None] = partial(
    run_engine, keep_graph=False, create_graph=False, inputs=(), allow_unreachable=True, accumulate_grad=True
)
"""Accumulate gradients from some roots, starting from given ones: the last step of `torch.autograd.backward`.

Its checks load sympy for given starts (0.6 s in every worker), only to compare shapes that are right by construction here.
"""
graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward pass that this thread is in, -1 outside of any."""
current_node: Callable[[], Any] = torch._C._current_autograd_node
"""Return the node that this thread goes back through, None outside of any."""


def saved(node: Any, name: str) -> Any:
    """Return what a node has kept of its operation (`_saved_other` for "other"), None where it kept no such thing."""
    return getattr(node, f"_saved_{name}", None)
