"""Tensors in each other's memory: one process's bits, or one line that names both."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss
from paceline.errors import InputError


class Net(nn.Module):
    """Two layers beside each other, and what one of them may have of the other; called in a row, for pp."""

    def __init__(self, share: Callable[[Any], None]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.out = nn.Linear(6, 3)
        self.ref: Tensor | None
        share(self)

    def forward(self, values: Tensor) -> Tensor:
        """Return three numbers for each sample."""
        for block in self.blocks:
            values = torch.tanh(block(values))
        made: Tensor = self.out(values)
        ref = getattr(self, "ref", None)
        return made if ref is None else made + 0.1 * values @ ref.T[:6, :3]


def _replace(net: Any) -> None:
    net.blocks[1].weight = nn.Parameter(net.blocks[0].weight.data)


def _view(net: Any) -> None:
    net.ref = nn.Parameter(net.blocks[0].weight.data[:3])


def _buffer(net: Any) -> None:
    net.register_buffer("ref", net.blocks[1].weight.data)


def _unsaved(net: Any) -> None:
    net.register_buffer("ref", net.blocks[1].weight.detach(), persistent=False)


def _attribute(net: Any) -> None:
    net.ref = net.blocks[0].weight.detach()


def _tied(net: Any) -> None:
    net.blocks[1].weight = net.blocks[0].weight


def _side_by_side(net: Any) -> None:
    whole = torch.randn(12, 6) * 0.3
    net.blocks[0].weight, net.blocks[1].weight = nn.Parameter(whole[:6]), nn.Parameter(whole[6:])


def _apart(net: Any) -> None:
    net.ref = nn.Parameter(torch.randn(3, 6))


OVERLAPS = {
    "a second parameter": (_replace, r"blocks\.1\.weight lies in the memory of blocks\.0\.weight .*\(blocks\.1\.weight = "),
    "a view": (_view, r"(ref|blocks\.0\.weight) lies in the memory of (blocks\.0\.weight|ref) .* in forward"),
    "a buffer": (_buffer, r"ref lies in the memory of blocks\.1\.weight"),
    "a buffer that is not saved": (_unsaved, r"ref lies in the memory of blocks\.1\.weight"),
    "a plain attribute": (_attribute, r"ref lies in the memory of blocks\.0\.weight"),
}  # fmt: skip
FINE = {"tied": _tied, "side by side": _side_by_side, "apart": _apart}
FOLLOWS = {"zero", "ps", "local-sgd"}
"""Those that write to the parameters where they lie: what a plain attribute has of their memory follows them."""


def train(run: paceline.Run, given: bool) -> dict[str, Any]:
    """Train every case, one after the other, in one group of workers; servers take part in one training."""
    made: dict[str, Any] = {}
    shares = {name: share for name, (share, _) in OVERLAPS.items()}
    for name, share in (shares if run.world.mesh.servers else {**shares, **FINE}).items():
        own = paceline.Run(run.world, run._engine.state.options)
        try:
            made[name] = _train_one(own, share, given=given)
        except InputError as error:
            made[name] = str(error)
        if own._engine.state.replica_or_none is not None:
            own._engine.state.replica.abandon()
    return made


def _train_one(run: paceline.Run, share: Callable[[Any], None], *, given: bool) -> dict[str, Tensor]:
    seen = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(40, 6, generator=seen), torch.randn(40, 3, generator=seen))

    def make() -> nn.Module:
        torch.manual_seed(3)
        return Net(share)

    run.prepare(make() if given else make, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(data, batch_size=8, epochs=1):
        step.compute(lambda model, batch: Loss.mean((model(batch[0]) - batch[1]).square().mean(1)))
    return {key: value.clone() for key, value in run._engine.state.replica.state()["model"].items()}


def launched(strategy: str, workers: int, *, given: bool = True, **options: Any) -> dict[str, Any]:
    first, *_ = paceline.launch(
        train, given, strategy=strategy, workers=workers, shards=4, threads=1, device="cpu", **options
    )
    return first  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    made = launched("single", 1)
    assert all(isinstance(state, dict) for state in made.values()), made
    return made


def wrong(
    got: dict[str, Any], single: dict[str, Any], refused: set[str], close: float = 0.0
) -> dict[str, str]:
    """Return what is neither refused, where it should be, nor what one process makes of it."""
    found = {}
    for name, made in got.items():
        wanted = single[name]
        if isinstance(made, str):
            # What is tied over blocks or stages is refused as before.
            message = (
                OVERLAPS[name][1]
                if name in refused
                else "are one parameter|share"
                if name == "tied"
                else "$^"
            )
            if not re.search(message, made) or "\n" in made:
                found[name] = made
        elif name in refused:
            found[name] = "was not refused"
        elif not all(torch.allclose(made[key], value, rtol=0, atol=close) for key, value in wanted.items()):
            found[name] = "weights differ"
    return found


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_whole_tensors_are_updated_where_they_lie(strategy: str, single: dict[str, Any]) -> None:
    assert not wrong(launched(strategy, 2), single, set())


CUTTING: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {}),
    "fsdp made anew": (2, {"given": False}),
    "pp": (2, {}),
    "zero": (2, {"shard_optimizer": True}),
    "ps": (2, {"servers": 2}),
    "tp": (2, {}),
    "local-sgd": (2, {"local_steps": 1}),
    "ddp=2,fsdp=2": (4, {}),
}


@pytest.mark.parametrize("name", CUTTING)
def test_what_would_part_is_refused(name: str, single: dict[str, Any]) -> None:
    workers, options = CUTTING[name]
    strategy = {"zero": "ddp", "fsdp made anew": "fsdp"}.get(name, name)
    refused = {*OVERLAPS} - ({"a plain attribute"} if name in FOLLOWS else set())
    close = 1e-5 if name in ("tp", "local-sgd") else 0.0
    assert not wrong(launched(strategy, workers, **options), single, refused, close)


def of_a_table(run: paceline.Run) -> None:
    table = nn.Embedding(8, 6, sparse=True)
    model = nn.ModuleDict(
        {"table": table, "net": Net(lambda net: setattr(net, "ref", nn.Parameter(table.weight.data[:3])))}
    )
    run.prepare(model, lambda made: torch.optim.SGD(made.parameters(), lr=0.1))


def test_a_view_of_a_table_on_servers_is_refused() -> None:
    with pytest.raises(InputError, match=r"net\.ref lies in the memory of table\.weight"):
        paceline.launch(of_a_table, strategy="hybrid", workers=2, servers=1, threads=1, device="cpu")
