"""Other tensors in the place of a model's weights, for one call or for good: one process's bits, or one line that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import stateless
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss
from paceline.strategies.structure import Structure
from tests.dist.strategies.scenarios import Outcome, same


class Block(nn.Module):
    """What is gathered as one, and split by tp."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, features: Tensor) -> Tensor:
        """Return as many numbers as it was given."""
        return features + self.down(torch.tanh(self.up(features)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Three blocks and a head; the second block is called in some way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(6, 1)
        for name, value in self.blocks[1].named_parameters():
            self.register_buffer(name.replace(".", "_"), value.detach() * 0.5)
        if kind == "hook":
            self.blocks[1].register_forward_pre_hook(put_half)
            self.blocks[1].register_forward_hook(put_back)

    def forward(self, features: Tensor) -> Tensor:
        """Return one number for each sample."""
        first, second, third = self.blocks
        call = WAYS.get(self.kind, lambda block, x: block(x))
        return self.head(third(call(second, first(features))))  # type: ignore[no-any-return]


def put_half(block: Any, _: Any) -> None:
    """Put half of a weight into its place."""
    vars(block)["held"] = [block.up._parameters["weight"]]
    block.up._parameters["weight"] = block.held[0] * 0.5


def put_back(block: Any, *_: Any) -> None:
    """Put the weight back."""
    (block.up._parameters["weight"],) = vars(block).pop("held")


def scaled(block: nn.Module, factor: float) -> dict[str, Tensor]:
    return {name: value * factor for name, value in block.named_parameters()}


def detached(block: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in block.named_parameters()}


def lend(block: nn.Module, features: Tensor) -> Tensor:
    with stateless._reparametrize_module(block, scaled(block, 0.5)):
        return block(features)  # type: ignore[no-any-return]


def assign(block: Any, features: Tensor) -> Tensor:
    held = block.up.weight
    block.up.weight = nn.Parameter(held.detach() * 0.5)
    made = block(features)
    block.up.weight = held
    return made + block(features)  # type: ignore[no-any-return]


def assign_memory(block: Any, features: Tensor) -> Tensor:
    parameter = block.up._parameters["weight"]
    held = parameter.data
    parameter.data = held * 0.5
    made = block(features)
    parameter.data = held
    return made  # type: ignore[no-any-return]


WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "detached": lambda block, x: block(x) + functional_call(block, detached(block), (x,)),
    "scaled": lambda block, x: functional_call(block, scaled(block, 0.5), (x,)),
    "lent": lend,
    "assigned": assign,
    "memory": assign_memory,
}
IN_A_CALL = [*WAYS, "hook", "whole model", "average"]
FOR_GOOD = ["memory between steps", "memory at the end", "optimizer's memory", "parameter", "loaded"]


def compute(kind: str, model: Any, features: Tensor) -> Tensor:
    """Return the model's answer, and what a loss adds to it."""
    if kind == "whole model":
        made: Tensor = functional_call(model, scaled(model, 0.5), (features.requires_grad_(),))
        return made
    if kind == "average":
        buffers = {name.replace("_", "."): value for name, value in model.named_buffers()}
        with torch.no_grad():
            target = functional_call(model.blocks[1], buffers, (features,))
        return model(features) + target.sum(1, keepdim=True)  # type: ignore[no-any-return]
    if kind == "penalty":  # of what belongs to no block, before a pass whose input has a gradient too
        penalty = (2 * model.head.weight).square().sum()
        return model(features.requires_grad_()) + penalty  # type: ignore[no-any-return]
    return model(features)  # type: ignore[no-any-return]


def change(kind: str, model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Give a weight another tensor behind a step."""
    layer = model.blocks[1].up
    if kind == "memory between steps" or (kind == "memory at the end" and number == 1):
        layer.weight.data = layer.weight.data * 0.9
    elif kind == "optimizer's memory":
        first = optimizer.param_groups[0]["params"][0]
        first.data = first.data * 0.9
    elif kind == "parameter":
        layer.weight = nn.Parameter(layer.weight.detach() * 0.9)
    elif kind == "loaded":
        model.load_state_dict({key: value * 0.9 for key, value in model.state_dict().items()}, assign=True)


def train_one(run: paceline.Run, kind: str, blocks: list[str] | None) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model, optimizer = run.prepare(
        Net(kind),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        structure=Structure(blocks=blocks),
    )
    data = TensorDataset(torch.randn(16, 6, generator=torch.Generator().manual_seed(1)))
    for step in run.steps(data, batch_size=8, epochs=1):
        step.compute(lambda model, batch: Loss.mean((compute(kind, model, batch[0]) - 1).square().sum(1)))
        change(kind, model, optimizer, step.number)
    return {name: value.clone() for name, value in run._engine.state.replica.state()["model"].items()}


def work(run: paceline.Run, kinds: list[str], blocks: list[str] | None = None) -> dict[str, Outcome]:
    made: dict[str, Outcome] = {}
    for kind in kinds:
        own = paceline.Run(run.world, run._engine.state.options)
        try:
            made[kind] = train_one(own, kind, blocks)
        except paceline.InputError as error:
            made[kind] = str(error)
    return made


def train(strategy: str, workers: int, *call: Any) -> list[dict[str, Outcome]]:
    return list(paceline.launch(work, *call, strategy=strategy, workers=workers, shards=4, threads=1))


@pytest.fixture(scope="module")
def alone() -> dict[str, Outcome]:
    return train("single", 1, [*IN_A_CALL, "penalty", "memory between steps"])[0]


def test_a_block_that_fsdp_gathers_refuses_what_it_would_overwrite(alone: dict[str, Outcome]) -> None:
    kinds = [kind for kind in IN_A_CALL if kind != "hook"]
    for found in train("fsdp", 2, [*kinds, *FOR_GOOD, "hook", "penalty"]):
        for kind in [*kinds, *FOR_GOOD]:
            assert "was given another tensor" in str(found[kind]), kind
        assert same(found["hook"], alone["hook"])  # inside of the gathered block
        assert same(found["penalty"], alone["penalty"])


def test_fsdp_takes_it_where_the_whole_model_is_gathered_at_once(alone: dict[str, Outcome]) -> None:
    kinds = [*IN_A_CALL, "penalty"]
    for found in train("fsdp", 2, kinds, []):
        assert [kind for kind in kinds if not same(found[kind], alone[kind])] == []


@pytest.mark.parametrize("strategy", ["ddp", "ps"])
def test_a_worker_with_the_whole_model_takes_it(strategy: str, alone: dict[str, Outcome]) -> None:
    kinds = [*IN_A_CALL, "penalty", "memory between steps"]
    found = train(strategy, 2, kinds)[0]
    assert [kind for kind in kinds if not same(found[kind], alone[kind])] == []


def test_ddp_names_a_parameter_that_it_does_not_know() -> None:
    for found in train("ddp", 2, ["parameter", "loaded"]):
        assert "blocks.1.up.weight was replaced" in str(found["parameter"])
        assert "blocks.0.up.weight was replaced" in str(found["loaded"])


class Rows(nn.Module):
    """A table that hybrid keeps on servers, looked up in some way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table, self.head = kind, nn.Embedding(16, 6, sparse=True), nn.Linear(6, 1)

    def forward(self, numbers: Tensor) -> Tensor:
        """Return one number for each row."""
        rows = self.table(numbers)
        if self.kind == "others":
            rows = rows + functional_call(self.table, {"weight": torch.ones(16, 6)}, (numbers,))
        elif self.kind == "read":
            rows = rows + self.table.weight.detach().mean()
        return self.head(rows)  # type: ignore[no-any-return]


def look_up(run: paceline.Run, kind: str) -> None:
    model: Any = run.prepare(Rows(kind), lambda model: torch.optim.SGD(model.parameters(), lr=0.05))[0]
    for step in run.steps(TensorDataset(torch.arange(16)), batch_size=8, epochs=1):
        step.compute(lambda model, batch: Loss.mean((model(batch[0]) - 1).square().sum(1)))
        if kind in LATER and step.number == 0:
            LATER[kind](model.table)


def put_another(table: nn.Embedding) -> None:
    table.weight.data = table.weight.data * 0.9


@torch.no_grad()
def write(table: nn.Embedding) -> None:
    table.weight.mul_(0.5)


LATER: dict[str, Callable[[nn.Embedding], object]] = {
    "memory": put_another,
    "write": write,
    "write unseen": lambda table: table.weight.data.zero_(),
    "max_norm": lambda table: setattr(table, "max_norm", 0.1),
    "frequencies": lambda table: setattr(table, "scale_grad_by_freq", True),
    "dense": lambda table: setattr(table, "sparse", False),
}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("others", "was given another tensor"),
        ("memory", "was given another tensor"),
        ("read", "nan"),
        ("write", r"line \d+ of test_replaced_weights.py writes to"),
        ("write unseen", r"table\.weight was written to"),
        ("max_norm", "table has max_norm or"),
        ("frequencies", "or scale_grad_by_freq"),
        ("dense", r"table no longer has sparse=True"),
    ],
)
def test_a_table_on_servers_is_not_replaced_in_silence(kind: str, words: str) -> None:
    with pytest.raises(paceline.PacelineError, match=words):
        paceline.launch(look_up, kind, strategy="hybrid", workers=2, shards=2, threads=1)


def test_tp_refuses_what_was_made_of_a_part(alone: dict[str, Outcome]) -> None:
    kinds = ["scaled", "lent", "hook", "whole model", "average"]
    for found in train("tp", 2, [*kinds, "detached", "penalty"]):
        for kind in kinds:
            assert "was given another tensor" in str(found[kind]), kind
        assert "outside of its layer" in str(found["penalty"])
        held, wanted = found["detached"], alone["detached"]
        assert isinstance(held, dict)
        assert isinstance(wanted, dict)
        assert all(torch.allclose(held[name], value, atol=1e-5) for name, value in wanted.items())
