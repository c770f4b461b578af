"""Work of a loop on gradients is refused wherever they are not the sums of the step: nothing of it is dropped in silence."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import InputError
from paceline.strategies.guards.no_gradient import NoGradient

BEHIND = {
    "clip_grad_norm_": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.5),
    "clip of a part": lambda model, _: nn.utils.clip_grad_norm_([model[2].weight], 1e-3),
    "clip of the optimizer's": lambda _, held: nn.utils.clip_grad_norm_(held.param_groups[0]["params"], 0.5),
    "clip_grad_value_": lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "scaled": lambda model, _: [one.grad.mul_(0.1) for one in model.parameters() if one.grad is not None],
    "scaled as data": lambda model, _: [
        one.grad.data.mul_(0.1) for one in model.parameters() if one.grad is not None
    ],
    "assigned": lambda model, _: [setattr(one, "grad", torch.zeros_like(one)) for one in model.parameters()],
    "cleared": lambda model, _: model.zero_grad(),
    "a penalty": lambda model, _: (0.1 * model[2].weight.square().sum()).backward(),
    "a pass": lambda model, _: model(torch.ones(3, 4)).sum().backward(),
}
INSIDE = {
    f"{name} inside": BEHIND[name]
    for name in ("clip_grad_norm_", "scaled", "clip of the optimizer's", "a pass", "cleared")
}


def attack(model: nn.Module, features: Tensor) -> None:
    """Look for the gradient of an input as tutorials do, and clear those of the weights."""
    model(features.clone().requires_grad_()).sum().backward()
    model.zero_grad()


def habits(run: paceline.Run, names: list[str]) -> dict[str, Any]:
    """Train a model once for each habit, and return what was said, or the weights."""
    made: dict[str, Any] = {}
    for name in names:
        own = paceline.Run(run.world, run._engine.state.options)
        try:
            made[name] = loop(own, name)
        except InputError as error:
            made[name] = str(error)
        # Whoever is in the step behind still waits for its server's answer: a server that goes takes it along.
        run.world.comm.barrier()
        own._engine.state.replica.abandon()
    return made


def loop(run: paceline.Run, habit: str) -> dict[str, Tensor]:
    seen = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(16, 4, generator=seen), torch.randn(16, 1, generator=seen))
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = run.prepare(model, optimizer)
    if habit == "an average":
        AveragedModel(model)
    for step in run.steps(data, batch_size=8, epochs=1):
        late = step.number == 1  # a habit is found in whatever step it begins
        for features, wanted in step:
            if habit == "cleared at the top":
                model.zero_grad()
            if habit == "an attack":
                attack(model, features)
            step.backward((model(features) - wanted).square().flatten())
            if late and habit in INSIDE:
                INSIDE[habit](model, optimizer)
        if late and habit in BEHIND:
            BEHIND[habit](model, optimizer)
        step.apply()
    return {name: value.clone() for name, value in run._engine.state.replica.state()["model"].items()}


def said(strategy: str, names: list[str]) -> list[dict[str, Any]]:
    return list(paceline.launch(habits, names, strategy=strategy, workers=2, shards=4, threads=1))


def test_work_on_gradients_that_lie_in_rows_is_refused() -> None:
    for found in said("fsdp", [*BEHIND, *INSIDE, "an average", "an attack", "cleared at the top", "none"]):
        assert "the model is copied" in found.pop("an average")
        assert "torch.autograd.grad(loss, x)" in found["an attack"]
        cleared, plain = found.pop("cleared at the top"), found.pop("none")
        assert all(torch.equal(cleared[name], value) for name, value in plain.items())
        for name, words in found.items():
            assert re.search(r"step\.(apply|backward)\(", str(words)), (name, words)


def log_norms(run: paceline.Run, where: str) -> tuple[list[float], str]:
    """Set the rate by the norm of a gradient, which is looked at in the batches or behind them."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    model, optimizer = run.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1))
    rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    norms: list[float] = []
    for step in run.steps(TensorDataset(rows), batch_size=8, epochs=2):
        for (features,) in step:
            step.backward(model(features).square().flatten())
            if where == "inside":
                norms.append(float(made[0].weight.grad.norm()))
        if where == "behind":
            norms.append(float(made[0].weight.grad.norm()))
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + norms[-1])
        step.apply()
    return norms, run.weights_sha256()


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}])
def test_a_sum_is_not_read_in_the_place_of_a_shards_gradient(options: dict[str, Any]) -> None:
    several = {"strategy": "ddp", "workers": 2, "shards": 2, "threads": 1, **options}
    with pytest.raises(InputError, match="Look at it behind the batches"):
        paceline.launch(log_norms, "inside", **several)
    if not options:
        alone = paceline.launch(log_norms, "behind", shards=2, threads=1)[0]
        assert [*paceline.launch(log_norms, "behind", **several)] == [alone, alone]


def test_work_on_gradients_inside_the_batches_is_refused_where_the_sums_are_there() -> None:
    one_shard_each: Any = {"strategy": "ddp", "workers": 2, "shards": 2, "threads": 1}
    for found in paceline.launch(habits, [*INSIDE, "none"], **one_shard_each):
        assert not isinstance(found.pop("none"), str)
        for name, words in found.items():
            assert "inside `for batch in step`" in str(words), (name, words)


def test_work_on_gradients_of_split_layers_is_refused() -> None:
    for found in said("tp", [*BEHIND, *INSIDE, "an average", "an attack"]):
        assert "torch.autograd.grad(loss, x)" in found["an attack"]
        assert [name for name, words in found.items() if not isinstance(words, str)] == []


def test_work_on_a_part_of_the_gradients_is_refused_where_servers_have_them() -> None:
    for found in said("ps", ["clip of a part"]):
        assert "max_grad_norm=1.0" in found["clip of a part"]


class Optimistic(torch.optim.Optimizer):
    """Goes by the last gradient as well, which it keeps as it is: right where each step has its own."""

    elementwise = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in (one for one in group["params"] if one.grad is not None):
                before = self.state[one].get("before", one.grad)
                one.sub_(2 * one.grad - before, alpha=group["lr"])
                self.state[one]["before"] = one.grad


def keeping(run: paceline.Run, looks: bool = True) -> tuple[str, list[Any]]:
    """Look at the gradients of the step before: at the tensor, and at its data."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    model, _ = run.prepare(made, Optimistic(made.parameters()))
    rows = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    kept: list[Tensor] = []
    found = []
    for step in run.steps(TensorDataset(rows), batch_size=8, epochs=2):
        for (features,) in step:
            step.backward(model(features).square().flatten())
        step.apply()
        found.append([one.tolist() for one in kept])
        seen = [one.grad for one in model.parameters() if looks and one.grad is not None]
        kept = [part for one in seen for part in (one, one.data)]
    return run.weights_sha256(), found


def test_a_gradient_that_is_kept_is_not_written_over() -> None:
    alone = paceline.launch(keeping, shards=2, threads=1)[0]
    assert [*paceline.launch(keeping, workers=2, shards=2, threads=1)] == [alone, alone]
    sharded = {"strategy": "ddp", "shard_optimizer": True}
    weights = {
        found[0] for found in paceline.launch(keeping, False, workers=2, shards=2, threads=1, **sharded)
    }
    assert weights == {alone[0]}


class Looking(paceline.Task):
    """Looks at gradients in a hook, or only asks for them and clears them."""

    batch_size, shards, epochs = 8, 2, 1

    def __init__(self, looks: bool) -> None:
        self.looks, self.norm = looks, 0.0

    def model(self) -> nn.Module:
        self.made = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        return self.made

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters())

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)))

    def loss(self, model: nn.Module, batch: Any) -> paceline.Loss:
        return paceline.Loss.mean(model(batch[0]).square().sum(1))

    def on_step(self, info: paceline.StepInfo) -> None:
        for one in self.made.parameters():
            if self.looks and one.grad is not None:
                self.norm += float(one.grad.norm())
        self.made.zero_grad()


PARTS: list[dict[str, Any]] = [
    {"strategy": "fsdp", "workers": 2},
    {"strategy": "pp", "workers": 2},
    {"strategy": "ps", "workers": 2, "servers": 1},
    {"strategy": "ddp", "workers": 2, "shard_optimizer": True},
]


@pytest.mark.parametrize("options", PARTS)
def test_a_hook_that_looks_at_a_part_of_the_gradients_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"on_step used gradients|weight\.grad of the model is used"):
        paceline.train(Looking(looks=True), threads=1, **options)


def test_a_hook_sees_gradients_where_they_are_whole_and_may_clear_them_anywhere() -> None:
    alone = paceline.train(Looking(looks=True), threads=1).weights_sha256
    assert paceline.train(Looking(looks=True), workers=2, threads=1).weights_sha256 == alone
    for options in PARTS:
        assert paceline.train(Looking(looks=False), threads=1, **options).weights_sha256 == alone


AFTER = {
    "moved": lambda model: (model.to("cpu"), model.float()),
    "norm": lambda model: [float(one.grad.norm()) for one in model.parameters() if one.grad is not None],
    "clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5),
    "data": lambda model: [one.grad.data.sum() for one in model.parameters() if one.grad is not None],
    "tested": lambda model: [one.grad is None for one in model.parameters()],
    "counted": lambda model: [one.grad.numel() for one in model.parameters() if one.grad is not None],
    "none": lambda model: [setattr(one, "grad", None) for one in model.parameters()],
    "zero_grad": lambda model: model.zero_grad(),
    "zeros": lambda model: model.zero_grad(set_to_none=False),
    "state": lambda model: torch.save(model.state_dict(), io.BytesIO()),
    "copy": copy.deepcopy,
    "pickle": pickle.dumps,
    "probe": lambda model: model(torch.ones(3, 4)).sum().backward(),
    "own": lambda model: (
        model.zero_grad(),
        model(torch.ones(3, 4)).sum().backward(),
        [float(one.grad.norm()) for one in model.parameters()],
    ),
}


def look_after(run: paceline.Run, names: list[str]) -> list[tuple[str, str, bool]]:
    """Train one model for each look at its gradients behind apply; return what was said, or the weights, and if any are left."""
    found = []
    for name in names:
        own = paceline.Run(run.world, run._engine.state.options)
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        model, _ = own.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9))
        rows = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)))
        try:
            for step in own.steps(rows, batch_size=8, epochs=1):
                if own._engine.state.options.strategy == "pp":
                    step.compute(lambda model, batch: paceline.Loss.mean(model(batch[0]).square().sum(1)))
                else:
                    for (features,) in step:
                        step.backward(model(features).square().sum(1))
                    step.apply()
                AFTER[name](model)
                own.evaluate(rows, lambda model, batch: {"m": paceline.Mean(model(batch[0]).sum(), 16)})
            said = own.weights_sha256()
        except Exception as error:  # noqa: BLE001
            said = str(error)
        found.append((name, said, any(isinstance(one.grad, NoGradient) for one in model.parameters())))
        run.world.comm.barrier()
        own._engine.state.replica.abandon()
    return found


SPLIT: list[dict[str, Any]] = [*PARTS, {"strategy": "tp", "workers": 2}]
LOOKS = ["norm", "clip", "data"]
CLEARING = ["none", "tested", "counted", "zero_grad", "zeros", "state"]


@pytest.mark.parametrize("options", SPLIT)
def test_a_part_of_the_gradients_is_not_read_behind_apply_and_may_be_cleared(options: dict[str, Any]) -> None:
    names = [*CLEARING, *LOOKS]
    if options.get("shard_optimizer"):
        names += ["copy", "pickle", "probe", "own", "moved"]
    elif options["strategy"] in ("pp", "ps"):  # one run in a launch
        names = ["norm"]
    for found in paceline.launch(look_after, names, shards=2, threads=1, **options):
        for name, said, left in found:
            assert not left, name
            if name in LOOKS:
                assert re.search("used gradients behind step.apply|of the model is used", said), (name, said)
            else:
                assert said == found[0][1], name


def test_gradients_are_read_behind_apply_where_they_are_whole() -> None:
    alone = paceline.launch(look_after, [*AFTER], shards=2, threads=1)[0]
    assert [*paceline.launch(look_after, [*AFTER], workers=2, shards=2, threads=1)] == [alone] * 2
    assert len({said for _, said, _ in alone}) == 1


class Kept(paceline.Task):
    """The same without a loop: only the optimizer keeps a gradient."""

    batch_size, shards, epochs = 8, 2, 2

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Optimistic(model.parameters())

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))

    def loss(self, model: nn.Module, batch: Any) -> paceline.Loss:
        return paceline.Loss.mean(model(batch[0]).square().flatten())


def test_an_optimizer_may_keep_gradients() -> None:
    one, two = (paceline.train(Kept(), workers=workers, threads=1) for workers in (1, 2))
    assert one.weights_sha256 == two.weights_sha256
