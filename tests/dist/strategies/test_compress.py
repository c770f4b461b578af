"""--compress: fewer bytes between workers, a stated error, and losses that stay exact."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.reduce.powersgd import LowRank
from paceline.strategies.tuning import Tuning
from paceline.training import trainer
from paceline.training.spec import TrainSpec
from paceline.world.local import LocalComm

WORKERS = 3
WIDTH = 300
TCP_INFO_BYTES_ACKED = 120
"""Where Linux puts the bytes that the other side has got, in `struct tcp_info`."""
UNITS = {"bf16": 2**-8, "fp16": 2**-11}


class Wide(nn.Module):
    """Two layers, so that there is a matrix to make smaller, and vectors beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, values: Tensor) -> Tensor:
        made: Tensor = self.head(torch.tanh(self.inside(values)))
        return made


def data() -> torch.utils.data.TensorDataset:
    drawn = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(
        torch.randn(60, WIDTH, generator=drawn), torch.randn(60, 1, generator=drawn)
    )


def sent_over_sockets() -> int:
    """Count what has left this process through all its connections."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        if not entry.is_symlink() or not os.readlink(entry).startswith("socket:"):  # noqa: PTH115
            continue
        with socket.socket(fileno=os.dup(int(entry.name))) as connection:
            if (
                connection.family in (socket.AF_INET, socket.AF_INET6)
                and connection.type == socket.SOCK_STREAM
            ):
                facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                total += struct.unpack_from("<Q", facts, TCP_INFO_BYTES_ACKED)[0]
    return total


def steps(run: paceline.Run, compress: str, scale: float, count: int) -> dict[str, Any]:
    """Take steps of plain SGD on a loss of some size, at a rate that makes up for it.

    Gives the weights, and for each of them the first step's sum of the workers' magnitudes.
    """

    def loss(model: nn.Module, batch: list[Tensor]) -> paceline.Loss:
        return paceline.Loss.mean(scale * (model(batch[0]) - batch[1]).square().flatten())

    own = paceline.Run(run.world, replace(run._engine.state.options, tuning=Tuning(compress=compress)))
    replica = own._engine.preparation.prepare_replica(
        Wide, lambda made: torch.optim.SGD(made.parameters(), lr=0.01 / scale)
    )
    parameters = list(replica.model.parameters())
    magnitudes, losses, sent = [], [], 0
    for step in own.steps(data(), batch_size=60, steps=count):
        if step.number == 0:
            batches = [batch for shard in step.work.shards for batch in shard.batches]
            total = sum(loss(replica.model, batch).total for batch in batches) * (
                0.01 / scale / step.work.size
            )
            gradients = torch.autograd.grad(total, parameters)  # type: ignore[arg-type]
            magnitudes = [run.world.comm.all_reduce(value.abs()) for value in gradients]
        before = sent_over_sockets()
        losses.append(step.compute(loss).loss)
        sent += sent_over_sockets() - before
    return {
        "weights": [value.detach().clone() for value in parameters],
        "magnitudes": magnitudes,
        "losses": losses,
        "sent": sent,
        "counted": getattr(replica.reducer.exchange, "sent", 0),
        "exactness": str(own._engine.state.exactness),
    }


def all_steps(run: paceline.Run) -> dict[Any, dict[str, Any]]:
    first = {(compress, scale): steps(run, compress, scale, 1) for compress, scale in [*SIZES, *EXACT]}
    return {
        **first,
        **{compress: steps(run, compress, 1.0, 4) for compress in ("none", "bf16", "powersgd:2")},
    }


SIZES = [("bf16", 1.0), ("fp16", 1.0), ("fp16", 1e-9), ("fp16", 1e9)]
EXACT = [("none", scale) for scale in (1.0, 1e-9, 1e9)]


@pytest.fixture(scope="module")
def taken() -> tuple[dict[Any, dict[str, Any]], ...]:
    """What each worker made of every case."""
    return paceline.launch(all_steps, workers=WORKERS, shards=4, transport="gloo", threads=1, device="cpu")


@pytest.mark.parametrize(("compress", "scale"), SIZES)
def test_a_gradient_is_off_by_no_more_than_is_said(taken: Any, compress: str, scale: float) -> None:
    exact, small = taken[0]["none", scale], taken[0][compress, scale]
    assert small["exactness"] == "numeric"
    assert small["losses"] == exact["losses"], "the ledger goes as it is"
    for other in taken[1:]:
        pairs = zip(other[compress, scale]["weights"], small["weights"], strict=True)
        assert all(torch.equal(theirs, mine) for theirs, mine in pairs)
    unit, worst = UNITS[compress], 0.0
    # The smallest that fp16 can say beside the largest of a bucket.
    smallest = 2.0**-36 * max(float(magnitude.max()) for magnitude in exact["magnitudes"])
    for left, right, magnitude in zip(exact["weights"], small["weights"], exact["magnitudes"], strict=True):
        # Beside the stated error, each weight is rounded once on either side, and so are the float32 sums.
        rounding = 2**-23 * (left.abs() + 8 * magnitude) + smallest
        error = (left - right).abs()
        assert bool((error <= (2 * unit + unit**2) * magnitude + rounding).all())
        worst = max(worst, float((error / (magnitude * unit + rounding)).max()))
    assert worst > 0.25, "it was not compressed at all"


def test_what_goes_over_the_sockets(taken: Any) -> None:
    for worker in taken:
        plain, half, thin = (worker[compress] for compress in ("none", "bf16", "powersgd:2"))
        # 2 bytes for each 4, and some hundred bytes a message for the ledger and the headers of gloo.
        assert 0.45 < half["sent"] / plain["sent"] < 0.55
        assert half["sent"] == pytest.approx(half["counted"], rel=0.05)
        # Two matrices of 300 x 2 instead of one of 300 x 300; the vectors go as they are.
        assert thin["sent"] / plain["sent"] < 0.05


def trained(run: paceline.Run, spec: TrainSpec) -> dict[str, Any]:
    return trainer.main(run, spec)


DIGITS = TrainSpec(task="paceline.tasks.digits:Digits", name="digits", epochs=7)


def test_digits_reaches_its_accuracy() -> None:
    results = paceline.launch(
        trained, DIGITS, workers=2, shards=2, threads=1, device="cpu", tuning={"compress": "powersgd:2"}
    )
    assert results[0]["exactness"] == "statistical"
    assert results[0]["metrics"]["accuracy"] >= 0.95
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]


def test_auxiliary_terms_go_as_they_are() -> None:
    spec = TrainSpec(task="tests.contract.tasks:Balanced", name="Balanced", steps=1, batch_size=16)
    options = {"workers": WORKERS, "shards": 4, "threads": 1, "device": "cpu"}
    (exact, *_), (small, *_) = (
        paceline.launch(trained, spec, tuning={"compress": compress}, **options)
        for compress in ("none", "bf16")
    )
    assert small["loss"] == exact["loss"]
    assert small["weights_sha256"] != exact["weights_sha256"]


def test_more_than_it_can_promise_is_refused() -> None:
    with pytest.raises(paceline.InputError, match="bitwise' is more than"):
        paceline.launch(
            trained, DIGITS, workers=2, exact="bitwise", device="cpu", tuning={"compress": "bf16"}
        )


def test_what_a_thin_product_misses_is_not_lost() -> None:
    matrices = torch.randn(40, 24, 30, generator=torch.Generator().manual_seed(1))
    low_rank = LowRank(LocalComm(), 2)
    totals = torch.zeros(24, 30)
    misses = []
    for wanted in matrices + 3 * matrices[0]:
        value = wanted.clone()
        running = low_rank.second(low_rank.start({7: value}))
        low_rank.finish(running)
        assert torch.linalg.matrix_rank(value) == 2
        totals += value
        misses.append(float((value - wanted).norm() / wanted.norm()))
    missing = (matrices + 3 * matrices[0]).sum(0) - totals
    assert min(misses) > 0.3, "each step misses much"
    assert torch.allclose(missing, low_rank._remainder[7], atol=0.01)
    assert float(missing.norm() / totals.norm()) < 0.25, "and all of them together less"


def test_small_and_flat_tensors_are_not_worth_it() -> None:
    low_rank = LowRank(LocalComm(), 4)
    assert [low_rank.shrinks(shape) for shape in ((300,), (8, 8), (8, 3, 3, 3), (300, 300))] == [
        False,
        False,
        False,
        True,
    ]


def reduced(run: paceline.Run) -> int:
    """Take three steps and count the exchanges of the last one."""
    replica = run._engine.preparation.prepare_replica(
        Wide, lambda made: torch.optim.SGD(made.parameters(), lr=0.01)
    )
    keys: set[int] = set()
    started = replica.reducer.exchange.start

    def start(key: int, *args: Any) -> None:
        keys.add(key)
        started(key, *args)

    replica.reducer.exchange.start = start
    for step in run.steps(data(), batch_size=60, steps=3):
        keys.clear()
        step.compute(lambda model, batch: paceline.Loss.mean((model(batch[0]) - batch[1]).square().flatten()))
    return len(keys)


def test_the_size_of_buckets() -> None:
    options: dict[str, Any] = {"workers": 2, "threads": 1, "device": "cpu"}
    small = paceline.launch(reduced, tuning={"bucket_mb": 0.001}, **options)
    large = paceline.launch(reduced, tuning={"bucket_mb": 100.0}, **options)
    assert small[0] > large[0] == 1
