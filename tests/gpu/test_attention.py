"""Attention under `--compile`: right gradients, the same bits each time, and the same for any number of workers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import TensorDataset

from paceline import Loss, Run, launch
from paceline.strategies.attention.swap import HOPPER, MOST_HEADS, attention

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() == 0 or torch.cuda.get_device_capability() != HOPPER,
    reason="needs a CUDA device of the Hopper generation",
)

Gradients = tuple[Tensor, ...]


def inputs(length: int, width: int, *, packed: bool) -> tuple[Gradients, Tensor]:
    draw = torch.Generator("cuda").manual_seed(length + width)
    how: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": draw}
    if packed:  # as one layer makes all three
        three = torch.randn(3, length, 3, 5, width, **how)
        made = tuple(three[:, :, index].transpose(1, 2) for index in range(3))
        grad = torch.randn(3, length, 5, width, **how).transpose(1, 2)
    else:
        made = tuple(torch.randn(3, 5, length, width, **how) for _ in range(3))
        grad = torch.randn(3, 5, width, length, **how).transpose(2, 3)
    return tuple(one.detach().requires_grad_() for one in made), grad


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("length", [2, 50, 64, 197, 1024])
def test_gradients_are_no_further_from_the_exact_ones_than_torchs(
    length: int, width: int, causal: bool, packed: bool
) -> None:
    given, grad = inputs(length, width, packed=packed)
    out = attention(*given, is_causal=causal, scale=0.2)
    found = torch.autograd.grad(out, given, grad)
    wide = [one.detach().double().requires_grad_() for one in given]
    with sdpa_kernel(SDPBackend.MATH):
        exact_out = F.scaled_dot_product_attention(*wide, is_causal=causal, scale=0.2)
    exact = torch.autograd.grad(exact_out, wide, grad.double())
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        other_out = F.scaled_dot_product_attention(*given, is_causal=causal, scale=0.2)
    other = torch.autograd.grad(other_out, given, grad)
    for ours, theirs, right in zip((out, *found), (other_out, *other), (exact_out, *exact), strict=True):
        scale = right.abs().max().item() * 2.0**-8  # half a unit in the last place of the largest number
        assert (ours - right).norm() <= 1.2 * (theirs - right).norm() + scale
        assert (ours - right).abs().max() <= 1.5 * (theirs - right).abs().max() + scale


@pytest.mark.parametrize("width", [64, 128])
def test_bits_repeat(width: int) -> None:
    given, grad = inputs(1024, width, packed=True)

    def once() -> Gradients:
        out = attention(*given, is_causal=True)
        return out, *torch.autograd.grad(out, given, grad)

    first = once()
    for _ in range(30):
        assert all(map(torch.equal, once(), first))


def test_the_heads_of_one_launch_are_not_too_many() -> None:
    how: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    given = [torch.randn(MOST_HEADS // 5 + 1, 5, 8, 64, **how).requires_grad_() for _ in range(3)]
    assert type(attention(*given).grad_fn).__name__ != "CudnnAttentionBackward"
    out = attention(*(one[:-1] for one in given))
    assert type(out.grad_fn).__name__ == "CudnnAttentionBackward"
    out.float().sum().backward()
    assert math.isfinite(given[0].grad.float().sum().item())  # type: ignore[union-attr]


class Layer(nn.Module):
    """Attention with two heads."""

    def __init__(self, wide: int, narrow: int, *, masked: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(wide, 3 * 128), nn.Linear(128, narrow)
        self.masked = masked

    def forward(self, inputs: Tensor) -> Tensor:
        batch, length, _ = inputs.shape
        query, key, value = self.first(inputs).view(batch, length, 3, 2, 64).permute(2, 0, 3, 1, 4)
        mask = torch.zeros(length, length, device=inputs.device, dtype=query.dtype) if self.masked else None
        seen = F.scaled_dot_product_attention(query, key, value, mask, is_causal=not self.masked)
        made: Tensor = self.last(seen.transpose(1, 2).reshape(batch, length, 128))
        return made


class Model(nn.Module):
    """Two layers."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(16, 16, masked=masked), Layer(16, 4, masked=masked)])

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


def loss(model: nn.Module, batch: Any) -> Loss:
    return Loss.mean(F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="none"))


def train(run: Run, masked: bool, watch: bool) -> tuple[str, bool]:
    torch.manual_seed(5)
    model = Model(masked=masked)
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    data = TensorDataset(torch.randn(32, 40, 16), torch.randint(0, 4, (32, 40)))
    trace = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    if watch:
        trace.start()
    for step in run.steps(data, batch_size=8, epochs=2):
        step.compute(loss)
    torch.cuda.synchronize()
    if watch:
        trace.stop()
    kernels = {event.name for event in trace.events()} if watch else set()  # type: ignore[no-untyped-call]
    return run.weights_sha256(), any("key_value_kernel" in name for name in kernels)


HOW: dict[str, Any] = {"device": "cuda", "compile": True, "shards": 2, "precision": "bf16"}


@pytest.mark.parametrize("masked", [False, True])
def test_a_compiled_step_takes_the_kernels_where_they_fit(masked: bool) -> None:
    ((_, ours),) = launch(train, masked, True, strategy="single", **HOW)
    assert ours is not masked


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_any_strategy_gives_the_bits_of_one_process(precision: str) -> None:
    how = {**HOW, "precision": precision}
    ((alone, _),) = launch(train, False, False, strategy="single", **how)
    for strategy in ("ddp", "dp", "ps") if precision == "bf16" else ("ddp",):
        told = launch(train, False, False, strategy=strategy, workers=2, **how)
        assert {bits for bits, _ in told} == {alone}, strategy


def test_passes_traced_in_another_precision_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    how = {**HOW, "strategy": "single", "exact": "numeric"}
    lower, other = (
        {bits for bits, _ in launch(train, True, False, **{**how, "precision": one})}
        for one in ("bf16", "fp16")
    )
    assert lower != other


@pytest.mark.parametrize("kept", ["none", "blocks", "selective"])
def test_a_block_that_is_computed_again_takes_the_kernels_too(kept: str) -> None:
    ((_, ours),) = launch(train, False, True, strategy="single", activation_checkpointing=kept, **HOW)
    assert ours
