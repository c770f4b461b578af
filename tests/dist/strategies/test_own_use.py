"""What a loop of its own does with weights between passes, where fsdp has cut them up: one process's bits, or one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss
from paceline.compat.dtensor import operator_handlers
from paceline.training import trainer
from paceline.training.spec import TrainSpec

VALUES = torch.linspace(-1, 1, 64).view(4, 16)
MASK = VALUES.abs() < 0.4


class Net(nn.Module):
    """An encoder and a decoder; a loop may call the latter by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("average", self.last.weight.detach().clone())

    def decode(self, hidden: Tensor) -> Tensor:
        """Return the scores of what was encoded."""
        return self.last(torch.tanh(hidden))  # type: ignore[no-any-return]

    def forward(self, features: Tensor) -> Tensor:
        """Return the scores."""
        return self.decode(self.encode(features))


def rows(weight: Tensor) -> None:
    for row in weight:
        row.clamp_(-0.05, 0.05)


def set_row(weight: Tensor) -> None:
    weight[0] = 0.0


def set_masked(weight: Tensor) -> None:
    weight[weight.abs() < 0.1] = 0.0


def augment(weight: Tensor) -> None:
    part = weight.data[1:3]
    part *= 0.5


def by_chunks(weight: Tensor) -> None:
    for chunk in weight.chunk(2):
        chunk.mul_(0.5)


def by_split(weight: Tensor) -> None:
    weight.split([1, 3])[1].mul_(0.5)


def through_clone(weight: Tensor) -> None:
    made = weight.clone()
    made[0].zero_()
    weight.copy_(made)


def shifted_norm(weight: Tensor) -> None:
    weight.div_(weight.norm(dim=0, keepdim=True) + 1e-6)


def draw_until_it_fits(weight: Tensor) -> None:
    for _ in range(4):
        nn.init.trunc_normal_(weight, a=-0.3, b=0.3)
    weight.add_(torch.rand(()))  # the generator has come as far as in one process


def look(weight: Tensor) -> None:
    if (weight == weight.max()).any():
        weight.mul_(0.5)


def relu_inside(weight: Tensor) -> None:
    functional.relu(weight[1:3], inplace=True)


Change = Callable[[Tensor], Any]
LOST: dict[str, Change] = {
    "slice of data": lambda weight: weight.data[1:3].mul_(0.5),
    "slice": lambda weight: weight[1:3].mul_(0.5),
    "data of a slice": lambda weight: weight[1:3].data.mul_(0.5),
    "detached slice": lambda weight: weight.detach()[1:3].detach().mul_(0.5),
    "row of data": lambda weight: weight.data[0].zero_(),
    "flat": lambda weight: weight.view(-1)[:5].fill_(0.0),
    "reshaped": lambda weight: weight.reshape(-1)[:5].fill_(0.0),
    "turned": lambda weight: weight.t()[:, 1:3].mul_(0.5),
    "narrow": lambda weight: weight.narrow(0, 1, 2).mul_(0.5),
    "select": lambda weight: weight.select(0, 1).mul_(0.5),
    "diagonal": lambda weight: weight.diagonal().zero_(),
    "augmented": augment,
    "chunks": by_chunks,
    "split": by_split,
    "out": lambda weight: torch.mul(weight[1:3], 0.5, out=weight[1:3]),
    "relu": relu_inside,
    "several": lambda weight: torch._foreach_mul_([weight[1:3]], 0.5),
    "init": lambda weight: nn.init.constant_(weight[1:3], 0.1),
    "draw": lambda weight: nn.init.normal_(weight[1:3]),
    "clone": through_clone,
    "set row": set_row,
}
BY_PLACE: dict[str, Change] = {
    "masked": set_masked,
    "index_fill_": lambda weight: weight.index_fill_(0, torch.tensor([1]), 0.0),
    "index_copy_": lambda weight: weight.index_copy_(0, torch.tensor([1]), torch.ones(1, 16)),
    "scatter_": lambda weight: weight.scatter_(0, torch.zeros(1, 16, dtype=torch.int64), 0.5),
    "tril_": lambda weight: weight.tril_(),
    "fill_diagonal_": lambda weight: weight.fill_diagonal_(0.0),
    "cumsum_": lambda weight: weight.cumsum_(0),
    "renorm_": lambda weight: weight.renorm_(2, 1, 0.5),
    "exponential_": lambda weight: weight.exponential_(),
}
SUMS: dict[str, Change] = {
    "norm": lambda weight: weight.div_(weight.norm(dim=0, keepdim=True)),
    "norm and more": shifted_norm,
    "mean": lambda weight: weight.sub_(weight.mean(0)),
    "product": lambda weight: weight.copy_(weight @ (weight.t() @ weight)),
}
WHOLE: dict[str, Change] = {
    "nothing": lambda _: None,
    "clamp of data": lambda weight: weight.data.clamp_(-0.1, 0.1),
    "mul_": lambda weight: weight.mul_(0.5),
    "abs_": lambda weight: weight.abs_(),
    "columns": lambda weight: weight[:, 2].zero_(),
    "transposed": lambda weight: weight.t().mul_(0.9),
    "mask of itself": lambda weight: weight.mul_((weight.abs() > 0.1).float()),
    "where": lambda weight: weight.copy_(torch.where(weight.abs() < 0.1, 0.0, weight)),
    "normal rows": lambda weight: weight.copy_(functional.normalize(weight, dim=1)),
    "greatest": lambda weight: weight.div_(weight.abs().amax(0)),
    "constant": lambda weight: nn.init.constant_(weight, 0.1),
    "draw": lambda weight: nn.init.normal_(weight, std=0.1),
    "draw until it fits": draw_until_it_fits,
    "look": look,
    "several": lambda weight: torch._foreach_mul_([weight], 0.5),
    "out": lambda weight: torch.mul(weight, 0.5, out=weight),
    "plain values": lambda weight: weight.copy_(VALUES),
    "plain row": lambda weight: weight.mul_(VALUES[0]),
    "plain column": lambda weight: weight.data.mul_(VALUES[:, :1]),
    "plain mask": lambda weight: weight.masked_fill_(MASK, 0.0),
    "number in a tensor": lambda weight: weight.mul_(torch.tensor(0.5)),
    "lerp_": lambda weight: weight.lerp_(VALUES, 0.1),
    "clone": lambda weight: weight.copy_(weight.clone().mul_(2)),
    "read": lambda weight: (weight[0].sum(), weight.norm(), weight[weight.shape[0] - 1].abs().max()),
}


def train_one(run: paceline.Run, change: Callable[[paceline.Run, Any], Any]) -> str:
    torch.manual_seed(3)
    model, _ = run.prepare(Net, lambda made: torch.optim.Adam(made.parameters(), lr=0.01))
    features = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(features, features[:, :4].argmax(1))
    for step in run.steps(data, batch_size=16, steps=4):
        for x, y in step:
            step.backward(functional.cross_entropy(model(x), y, reduction="none"))
        step.apply()
        if step.number == 1:
            with torch.no_grad():
                change(run, model)
    return run.weights_sha256()


def attempt(run: paceline.Run, change: Callable[[paceline.Run, Any], Any]) -> str:
    try:
        return train_one(paceline.Run(run.world, run._engine.state.options), change)
    except paceline.InputError as error:
        return str(error)


def change_all(run: paceline.Run, group: str) -> dict[str, str]:
    kinds = {"lost": LOST, "by place": BY_PLACE, "sums": SUMS, "whole": WHOLE}[group]
    if run.world.size == 3:  # the third worker has no row, of which torch can take no greatest
        kinds = {kind: change for kind, change in kinds.items() if kind not in ("greatest", "look")}
    return {
        kind: attempt(run, lambda _, model, change=change: change(model.last.weight))  # type: ignore[misc]
        for kind, change in kinds.items()
    }


def launch(function: Any, strategy: str, workers: int, *args: Any) -> list[Any]:
    return list(
        paceline.launch(
            function, *args, strategy=strategy, workers=workers, shards=4, threads=1, device="cpu"
        )
    )


@pytest.mark.parametrize(
    ("group", "words"),
    [("lost", "writes to a part of it"), ("by place", "by the place of a number"), ("sums", "was added up")],
)
def test_what_would_be_lost_or_come_out_otherwise_is_refused(group: str, words: str) -> None:
    for found in launch(change_all, "fsdp", 2, group):
        named = ("last.weight: ", "a sharded tensor of shape (4, 16): ")
        assert {kind: said for kind, said in found.items() if not said.startswith(named)} == {}
        allowed = (words, "cannot be computed of it")
        assert [kind for kind, said in found.items() if not any(one in said for one in allowed)] == []
        assert [kind for kind, said in found.items() if "\n" in said or "--strategy ddp" not in said] == []


@pytest.mark.parametrize(("strategy", "workers"), [("fsdp", 2), ("fsdp", 3), ("ddp=2,fsdp=2", 4)])
def test_a_write_to_a_whole_weight_is_that_of_one_process(strategy: str, workers: int) -> None:
    (alone,) = launch(change_all, "single", 1, "whole")
    for found in launch(change_all, strategy, workers, "whole"):
        assert {kind: one for kind, one in found.items() if one != alone[kind]} == {}


def iterate(_: paceline.Run, model: Any) -> None:
    rows(model.last.weight)


def call_a_part(_: paceline.Run, model: Any) -> None:
    with torch.enable_grad():
        model.decode(torch.ones(2, 16))


def average(_: paceline.Run, model: Any) -> None:
    model.average.lerp_(model.last.weight, 0.1)


def write_on_one(run: paceline.Run, model: Any) -> None:
    if run.world.rank == 1:
        model.last.weight.mul_(0.5)


def write_own_values(run: paceline.Run, model: Any) -> None:
    model.last.weight.copy_(VALUES + run.world.rank)


def write_own_norm(_: paceline.Run, model: Any) -> None:
    model.last.weight.mul_(1 / float(model.last.weight.norm()))


def rate_of_sums(run: paceline.Run, model: Any) -> None:
    run._engine.state.replica.optimizer.param_groups[0]["lr"] /= float(
        model.last.weight.detach().square().sum()
    )


def log_norms(_: paceline.Run, model: Any) -> None:
    assert torch._foreach_norm([model.last.weight])[0].item()


REFUSED: dict[str, tuple[Callable[[paceline.Run, Any], None], str]] = {
    "rows": (iterate, "last.weight: unbind cannot be computed of it"),
    "decode": (call_a_part, "last.bias is used outside of a forward pass of the model"),
    "average": (average, "lerp_ writes last.weight into a plain tensor"),
    "one": (write_on_one, "last.weight: rank 0 and rank 1 have written different things"),
    "values": (write_own_values, "last.weight: rank 0 and rank 1 have written different things"),
    "norm": (write_own_norm, "last.weight: a number is made of a sum over it"),
    "rate": (rate_of_sums, "a number is made of a sum over it"),
    "foreach": (log_norms, "a number is made of a sum over it"),
    "mean": (
        lambda _, model: float(model.last.weight.mean()),
        "last.weight: a number is made of a sum over it",
    ),
}


def numbers(run: paceline.Run) -> list[Any]:
    found: list[Any] = []

    def read(_: paceline.Run, model: Any) -> None:
        weight = model.last.weight
        found.extend(
            [float(weight.abs().max()), weight.min().item(), bool(weight.isnan().any()), weight[3, 2].item()]
        )

    attempt(run, read)
    return found


def test_a_number_that_is_no_sum_is_that_of_one_process() -> None:
    (alone,) = launch(numbers, "single", 1)
    assert len(alone) == 4
    assert launch(numbers, "fsdp", 2) == [alone, alone]


def use_all(run: paceline.Run) -> dict[str, str]:
    return {kind: attempt(run, change) for kind, (change, _) in REFUSED.items()}


def test_other_uses_are_refused_in_one_line() -> None:
    for found in launch(use_all, "fsdp", 2):
        assert [kind for kind, (_, words) in REFUSED.items() if words not in found[kind]] == []
        assert [said for said in found.values() if "\n" in said] == []


class Averaging(paceline.Task):
    """A hook of the optimizer moves an average that is a buffer."""

    def model(self) -> nn.Module:
        """Return the model."""
        return Net()

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        """Return one whose steps move the average."""
        made = torch.optim.SGD(model.parameters(), lr=0.1)

        def move(*_: Any) -> None:
            with torch.no_grad():
                model.average.lerp_(model.last.weight, 0.1)

        move.elementwise = True  # type: ignore[attr-defined]
        made.register_step_post_hook(move)
        return made

    def train_data(self) -> TensorDataset:
        """Return some samples."""
        return TensorDataset(torch.eye(8))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the square of the scores."""
        return Loss.mean(model(batch[0]).square().sum(1))


def train_average(run: paceline.Run) -> None:
    trainer.main(run, TrainSpec(task=f"{__name__}:Averaging", name="averaging", steps=2))


def test_a_hook_of_the_optimizer_that_averages_is_refused() -> None:
    with pytest.raises(paceline.InputError, match=r"lerp_ writes last.weight into a plain tensor .*'ddp'"):
        launch(train_average, "fsdp", 2)


def take_greatest(run: paceline.Run) -> None:
    train_one(run, lambda _, model: model.last.weight.amax(0))


def test_a_worker_without_rows_says_so() -> None:
    with pytest.raises(paceline.InputError, match=r"last.weight: amax cannot be computed of it"):
        launch(take_greatest, "fsdp", 3)


def count_seen(run: paceline.Run) -> tuple[int, int, int]:
    """Return how many operators are taken over before a model is there, while it is, and when its group is left."""
    before = len(operator_handlers())
    run.prepare(Net, lambda made: torch.optim.Adam(made.parameters(), lr=0.01))
    within = len(operator_handlers())
    run._engine.state.replica.placement.abandon()
    return before, within, len(operator_handlers())


def test_nothing_is_seen_once_the_group_is_left() -> None:
    for before, within, after in launch(count_seen, "fsdp", 2):
        assert within > 1000 > after
        assert after - before < 10  # the draws of whole weights


def change_one(run: paceline.Run) -> tuple[str, str]:
    lost = attempt(run, lambda _, model: model.last.weight[1:3].mul_(0.5))
    return attempt(run, lambda _, model: model.last.weight.mul_(0.5)), lost


def test_it_is_so_for_what_is_compiled() -> None:
    options = {"shards": 4, "threads": 1, "device": "cpu", "compile": True}
    (whole, lost), other = paceline.launch(change_one, strategy="fsdp", workers=2, **options)
    assert (whole, lost) == other
    assert len(whole) == 64  # its hash
    assert "writes to a part of it" in lost
