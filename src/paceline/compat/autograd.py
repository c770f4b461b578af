"""What autograd's engine tells of itself only under private names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward

run_engine: Callable[..., Any] = _engine_run_backward
"""Run the engine as `torch.autograd.backward` and `torch.autograd.grad` do behind their checks."""
graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward pass that this thread is in, -1 outside of any."""
current_node: Callable[[], Any] = torch._C._current_autograd_node
"""Return the node that this thread goes back through, None outside of any."""


def saved(node: Any, name: str) -> Any:
    """Return what a node has kept of its operation (`_saved_other` for "other"), None where it kept no such thing."""
    return getattr(node, f"_saved_{name}", None)
