"""Calls with CUDA tensors between two workers on one GPU: they arrive there, and gradients cross as within one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline import remote
from paceline.remote import Role

DEVICE = "cuda:0"
pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device")


def table() -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(10, 4, device=DEVICE)


def head() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, 1, device=DEVICE)


def ids() -> Tensor:
    return torch.tensor(
        [1, 2, 3, 9], device=DEVICE
    )  # no row twice: its gradient would be added up in no fixed order


@remote.service
class Server:
    """A table and a few things to do with what comes."""

    def __init__(self) -> None:
        self.table, self.seen = table(), ""

    def doubled(self, values: dict[str, Any]) -> dict[str, Any]:
        self.seen = ",".join(str(value.device) for value in values.values())
        return {name: value + value for name, value in values.items()}

    def where(self) -> str:
        return self.seen

    def lookup(self, rows: Tensor) -> Tensor:
        return self.table(rows)

    def scaled(self, values: Tensor) -> Tensor:
        return values * self.table.weight[0]

    def parameters(self) -> list[remote.Reference[Tensor]]:
        return [remote.reference(value) for value in self.table.parameters()]

    def weight(self) -> Tensor:
        return self.table.weight.detach()


def sent() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    large = torch.randn(512, 1024, generator=generator)
    tensors = {
        "small": torch.arange(5),
        "large": large,
        "half": large[:3].to(torch.bfloat16),
        "turned": large[:7].t(),
        "empty": torch.empty(0, 3),
        "complex": torch.complex(large[0], large[1]).conj(),
    }
    return {**{name: one.to(DEVICE) for name, one in tensors.items()}, "host": large[0]}


def loss_of(rows: Tensor, scale: Any, top: nn.Linear) -> Tensor:
    return top(scale(top(rows) * rows)).square().sum()


def train(session: remote.Session) -> dict[str, Any]:
    server = remote.create("server:0", Server)
    mine = sent()
    back = server.doubled(mine)
    where = set(server.where().split(","))
    written_after = torch.ones(1 << 20, device=DEVICE)
    for _ in range(50):
        written_after = written_after * 1.0 + 1.0  # still in the stream when the call is made
    pending = remote.method(server.doubled).future({"it": written_after})
    written_after.zero_()
    kept = remote.method(server.doubled).remote({"it": ids()})
    top = head()
    optimizer = remote.Optimizer(torch.optim.Adam, [*server.parameters(), *top.parameters()], lr=0.1)
    losses = []
    for _ in range(5):
        with remote.backward_pass(optimizer) as pass_:
            loss = loss_of(server.lookup(ids()), server.scaled, top)
            pass_.backward(loss)
            pass_.step()
        losses.append(loss.item())
    return {
        "back": {name: (str(one.device), one.stride(), one.cpu()) for name, one in back.items()},
        "where": where,
        "pending": pending.wait()["it"].cpu().unique().tolist(),
        "kept": (str(kept.fetch()["it"].device), kept.fetch()["it"].tolist()),
        "trained": (losses, top.weight.detach().cpu(), server.weight().cpu()),
        "local": alone(),
        "expected": {
            name: (str(one.device), (one + one).stride(), (one + one).cpu()) for name, one in mine.items()
        },
    }


def alone() -> tuple[list[float], Tensor, Tensor]:
    rows, top = table(), head()
    optimizer = torch.optim.Adam([*rows.parameters(), *top.parameters()], lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = loss_of(rows(ids()), lambda values: values * rows.weight[0], top)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, top.weight.detach().cpu(), rows.weight.detach().cpu()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("roles") / "run"
    results = paceline.launch_roles({"trainers": Role(train, 1), "servers": 1}, out=out, threads=1)
    made: dict[str, Any] = results["trainers"][0]
    return made


def test_arguments_and_answers_arrive_on_the_device_they_were_on(found: dict[str, Any]) -> None:
    assert found["where"] == {DEVICE, "cpu"}
    for name, (device, stride, value) in found["expected"].items():
        came = found["back"][name]
        assert came[:2] == (device, stride), name
        assert torch.equal(came[2], value), name


def test_what_is_sent_is_what_it_was_at_the_call(found: dict[str, Any]) -> None:
    assert found["pending"] == [102.0]


def test_a_value_that_stays_with_its_owner_is_fetched_to_the_device(found: dict[str, Any]) -> None:
    assert found["kept"] == (DEVICE, [2, 4, 6, 18])


def test_gradients_and_updates_across_workers_are_those_of_one_process(found: dict[str, Any]) -> None:
    losses, top, rows = found["trained"]
    expected_losses, expected_top, expected_rows = found["local"]
    assert losses == expected_losses
    assert losses[0] > losses[-1]
    assert torch.equal(top, expected_top)
    assert torch.equal(rows, expected_rows)
