"""Regions of `--compile`: what is captured, how often, and what is refused; each in a process of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.errors import InputError
from paceline.strategies import compiled
from paceline.strategies.compiled import Compiler, compile_blocks, compile_calls
from paceline.strategies.precision import Precision
from paceline.task import Loss
from paceline.world import alone

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("c++") is None, reason="needs a C++ compiler"
)
MODELS: list[Callable[[], nn.Module]] = [
    lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)),
    lambda: nn.Linear(6, 2),
    lambda: nn.TransformerEncoderLayer(6, 2, 4, dropout=0.0, batch_first=True),
]


def captured() -> tuple[int, list[str]]:
    from paceline.compat import graphs  # loads the compiler: for the workers alone

    return graphs.captured()


def make_compiler(notes: list[str] | None = None) -> Compiler:
    return Compiler(alone(), [].append if notes is None else notes.append, repeatable=True, in_pieces=True)


def squares(model: nn.Module, batch: Tensor) -> Loss:
    return Loss.mean(model(batch).flatten(1).pow(2).sum(1))


def average(model: nn.Module, batch: Tensor) -> Loss:
    return Loss(F.mse_loss(model(batch), batch), len(batch))


def divided(model: nn.Module, batch: Tensor) -> Loss:
    counted = (batch > -9).sum()
    return Loss(model(batch).sum() / counted, counted)


def batches(*sizes: int) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(size, 1, 6) for size in sizes]


def one_graph_for_each_shape(_: paceline.Run) -> None:
    for done, make in enumerate(MODELS):
        notes: list[str] = []
        model, compiler = make(), make_compiler(notes)
        for batch in batches(4, 4, 3, 4, 3):  # two epochs with a short last batch
            found, expected = compiler.of(squares)(model, batch), squares(model, batch)
            assert (type(found), found.weight) == (Loss, len(batch))
            torch.testing.assert_close(found.total, expected.total, rtol=1e-6, atol=1e-6)
            ways = [torch.autograd.grad(one.total, [*model.parameters()]) for one in (found, expected)]
            # Of numbers up to about 10, some of which cancel out: a few roundings.
            torch.testing.assert_close(*ways, rtol=1e-5, atol=8 * 10 * 2**-23)
        assert captured() == (2 * (done + 1), [])
        assert [note.partition(":")[0].partition(",")[0] for note in notes] == [
            "compiling",
            "compiling again",
        ]


def pieces_go_back_by_themselves(_: paceline.Run) -> None:
    compiled.SMALLEST_PIECE = 64
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    order: list[int] = []
    for number, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(lambda _, number=number: order.append(number))
    (batch,) = batches(4)
    loss = make_compiler().of(squares)(model, batch)
    assert _nodes(loss.total) > 1, "each piece is a node of autograd: its gradients are there when it has run"
    loss.total.backward()
    assert (order[0], order[-1]) == (3, 0)
    assert captured() == (1, [])


def _nodes(total: Tensor) -> int:
    """Count the compiled nodes that a backward pass goes through."""
    waiting: list[Any] = [total.grad_fn]
    found = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [one for one, _ in node.next_functions]
    return sum("CompiledFunction" in node.name() for node in found)


def means_are_refused(_: paceline.Run) -> None:
    for loss in (average, divided):
        with pytest.raises(InputError, match="this loss is a mean where its sum belongs"):
            make_compiler().of(loss)(nn.Linear(6, 6), *batches(4))


def too_many_shapes_are_refused(_: paceline.Run) -> None:
    compiled.MOST_SHAPES = 2
    model, loss = nn.Linear(6, 2), make_compiler().of(squares)
    for batch in batches(2, 3, 2, 3):
        loss(model, batch)
    with pytest.raises(InputError, match="compiled for 2 shapes"):
        loss(model, *batches(4))


def copies_of_blocks_have_their_own_weights(_: paceline.Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    plain, (batch,), compiler = deepcopy(model), batches(4), make_compiler()
    compile_blocks(model, compiler)
    compile_blocks(model, compiler)  # once more, in a group that has formed anew
    torch.testing.assert_close(model(batch), plain(batch))
    copied = deepcopy(model)
    with torch.no_grad():
        copied[0].weight.zero_()
        plain[0].weight.zero_()
    torch.testing.assert_close(copied(batch), plain(batch))
    functions, _ = captured()
    make_compiler().of(squares)(model, batch)  # the whole model, where one worker is left
    assert captured() == (functions + 1, [])


def a_model_is_compiled_with_the_region_that_calls_it(_: paceline.Run) -> None:
    model, (batch,), compiler = nn.Sequential(nn.Linear(6, 2)), batches(4), make_compiler()
    expected = squares(model, batch)
    compile_calls(model, compiler, Precision("fp32", torch.device("cpu")))
    torch.testing.assert_close(squares(model, batch).total, expected.total)
    assert captured() == (1, [])
    torch.testing.assert_close(compiler.of(squares)(model, batch).total, expected.total)
    assert captured() == (2, [])


def hooks_that_come_later_are_called(_: paceline.Run) -> None:
    """Those of a module, and those of all modules, of every kind; and they are not called when they are gone."""
    model, (batch,) = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)), batches(4)
    region = make_compiler().of(squares)

    def differs() -> float:
        """Return by how much the compiled gradients differ from those of the plain loss."""
        sums = []
        for function in (region, squares):
            model.zero_grad()
            function(model, batch).total.backward()
            sums.append(torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]))
        return float((sums[0] - sums[1]).abs().max())

    def halved(_: nn.Module, values: Any, *__: Any) -> Any:
        return (values[0] * 0.5,)

    assert differs() < 1e-4
    handles = [
        model[1].register_forward_pre_hook(halved),
        model[2].register_forward_hook(lambda _, __, output: output * 0.5),
        model[2].register_full_backward_hook(halved),
    ]
    assert differs() < 1e-4, "a hook is not called"
    for handle in handles:
        handle.remove()
    assert differs() < 1e-4, "a hook is called that is gone"
    everywhere = nn.modules.module.register_module_forward_pre_hook(halved)
    assert differs() < 1e-4, "a hook of all modules is not called"
    everywhere.remove()


@pytest.mark.parametrize(
    "check",
    [
        hooks_that_come_later_are_called,
        one_graph_for_each_shape,
        pieces_go_back_by_themselves,
        means_are_refused,
        too_many_shapes_are_refused,
        copies_of_blocks_have_their_own_weights,
        a_model_is_compiled_with_the_region_that_calls_it,
    ],
    ids=lambda check: check.__name__,
)
def test_regions(check: Callable[[paceline.Run], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of compilers costs more than it saves
    paceline.launch(check, strategy="single", compile=True, threads=1, device="cpu")
