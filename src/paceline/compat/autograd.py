"""What autograd's engine tells of itself only under private names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

Watch = Callable[[Callable[[], Any], tuple[Any, ...], bool], Any]
"""Runs a backward pass: what runs it, the tensors that it was asked for by name, and whether it adds to their `.grad`."""

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


def watch_passes(watch: Watch) -> Callable[[], None]:
    """Have every pass of `backward(inputs=...)` and `torch.autograd.grad` go by `watch`; return what ends that.

    Both look the engine up in `torch.autograd` (`_engine_run_backward`), and give it the tensors as its fifth argument.
    """
    _watches.append(watch)
    vars(torch.autograd)["_engine_run_backward"] = _watched

    def end() -> None:
        if watch in _watches:
            _watches.remove(watch)
        if not _watches and vars(torch.autograd)["_engine_run_backward"] is _watched:
            vars(torch.autograd)["_engine_run_backward"] = run_engine

    return end


def _watched(*args: Any, **kwargs: Any) -> Any:
    run, inputs = partial(run_engine, *args, **kwargs), args[4]
    for watch in _watches if inputs else ():
        run = partial(watch, run, tuple(inputs), kwargs["accumulate_grad"])
    return run()


_watches: list[Watch] = []


def saved(node: Any, name: str) -> Any:
    """Return what a node has kept of its operation (`_saved_other` for "other"), None where it kept no such thing."""
    return getattr(node, f"_saved_{name}", None)


def all_saved(nodes: Iterable[Any]) -> tuple[list[Tensor], bool, set[type]]:
    """Return every tensor kept behind some nodes, whether hooks (`saved_tensors_hooks`) keep any, and the kinds of nodes there.

    Nothing is unpacked: that would compute a checkpoint's block once more, and refuse a tensor that was written to since.
    It is called for each micro-batch, and takes 2 to 3 us a node.
    """
    waiting = [node for node in nodes if node is not None]
    seen: set[Any] = {None, *waiting}
    tensors: list[Tensor] = []
    hooked, kinds = False, set()
    for node in waiting:  # it grows
        kind = type(node)
        kinds.add(kind)
        read = _readers[kind] if kind in _readers else _reader(kind)
        if read is not None:
            for held in read(node):
                for one in held if type(held) is tuple else (held,):
                    if one is None:
                        continue
                    if one.unpack_hook is not None:
                        hooked = True
                    elif (tensor := one.data) is not None:
                        tensors.append(tensor)
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return tensors, hooked, kinds


_Reader = Callable[[Any], tuple[Any, ...]]
_readers: dict[type, _Reader | None] = {}
"""What reads all that a node of a kind has kept; None for a kind that keeps nothing."""


def _reader(kind: type) -> _Reader | None:
    names = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    made: _Reader | None = attrgetter(*names) if names else None
    if len(names) == 1:
        only = attrgetter(*names)
        made = lambda node: (only(node),)  # noqa: E731
    _readers[kind] = made
    return made
