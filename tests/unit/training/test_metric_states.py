"""What metrics and predictions may be, and in which order they are put together."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from paceline.data import Parts
from paceline.declared import Best, Collected, EarlyStopping
from paceline.errors import InputError
from paceline.task import Task
from paceline.training.judging import Judge
from paceline.training.merging import Merging
from paceline.world import Identity, connect
from tests.unit.training.own_runs import data, opened, prepared

WORLD = connect(Identity(rank=0, size=1, local_rank=0, local_size=1), device="cpu")


class Seen:
    """Which batches were merged, in which order."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)

    def merge(self, other: Seen) -> None:
        self.names += other.names

    def compute(self) -> dict[str, Any]:
        return {name: place for place, name in enumerate(self.names)}


def test_states_are_merged_by_shard_and_collected_values_by_sample() -> None:
    keys = [(step, shard, part) for step in range(2) for shard in range(2) for part in range(2)]
    one, other = Merging(), Merging()
    for merging, steps in ((one, (keys,)), (other, (keys[:4], keys[4:]))):
        for part in steps:
            merging.add(
                {
                    key: {
                        "seen": Seen("".join(map(str, key))),
                        "all": Collected(torch.tensor([keys.index(key)]), compute=lambda values: values),
                    }
                    for key in reversed(part)
                }
            )
    found = one.results(WORLD)
    order = ["000", "001", "100", "101", "010", "011", "110", "111"]
    assert {name: value for name, value in found.items() if name.startswith("seen")} == {
        f"seen/{name}": float(place) for place, name in enumerate(order)
    }
    assert [found[f"all/{place}"] for place in range(8)] == list(map(float, range(8)))
    assert other.results(WORLD) == found


class Count:
    """How many samples there are; merging makes a new one."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def merge(self, other: Count) -> Count:
        return Count(self.samples + other.samples)

    def compute(self) -> int:
        return self.samples


def test_what_is_computed_fits_a_floating_point_number() -> None:
    with opened() as run:
        prepared(run)
        with pytest.raises(InputError, match=r"^the metric samples is larger than any floating-point number"):
            run.evaluate(data(), lambda model, batch: {"samples": Count(10**400)})


def test_what_merge_returns_counts_where_it_is_a_metric() -> None:
    with opened() as run:
        prepared(run)
        found = run.evaluate(data(), lambda model, batch: {"samples": Count(len(batch[0]))}, batch_size=2)
    assert found == {"samples": len(data())}


def test_a_metric_that_is_returned_twice_is_refused() -> None:
    kept = Seen()
    with opened() as run:
        prepared(run)
        with pytest.raises(InputError, match="the same object for the metric seen twice"):
            run.evaluate(data(), lambda model, batch: {"seen": kept}, batch_size=2)


@pytest.mark.parametrize("value", [3.0, torch.ones(2), [1]])
def test_a_bare_number_is_no_metric(value: Any) -> None:
    with opened() as run:
        prepared(run)
        with pytest.raises(InputError, match=r"Mean\(total, weight\), of paceline.Collected, or of objects"):
            run.evaluate(data(), lambda model, batch: {"right": value})


def test_torchmetrics_that_cannot_be_merged_are_refused() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    for metric, why in ((torchmetrics.PearsonCorrCoef, "full_state_update"), (_mean(), "without a weight")):

        def measure(model: Any, batch: Any, metric: Any = metric) -> dict[str, Any]:
            made = metric()
            made.update(torch.randn(3), torch.randn(3))
            return {"merged": made}

        with opened() as run:
            prepared(run)
            with pytest.raises(InputError, match=why):
                run.evaluate(data(), measure)


def _mean() -> Any:
    import torchmetrics

    class Averaged(torchmetrics.Metric):  # type: ignore[misc]
        full_state_update = False

        def __init__(self) -> None:
            super().__init__()
            self.add_state("value", torch.tensor(0.0), dist_reduce_fx="mean")

        def update(self, value: Any, _: Any) -> None:
            self.value = value.mean()

        def compute(self) -> Any:
            return self.value

    return Averaged


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda model, batch: model(batch[0]).sum(), "its first dimension must be the batch"),
        (lambda model, batch: [1.0], "must return a tensor or a dict of tensors"),
        (
            lambda model, batch: torch.ones(len(batch[0]), int(batch[0][0, 0] > 0) + 1),
            "Pad what differs in length",
        ),
    ],
)
def test_outputs_that_have_no_row_for_each_sample_are_refused(function: Any, why: str) -> None:
    with opened() as run:
        prepared(run)
        with pytest.raises(InputError, match=why):
            run.predict(data(), function, batch_size=1 if "Pad" in why else 4)


def test_what_is_predicted_is_returned_as_the_function_gave_it() -> None:
    with opened() as run:
        prepared(run)
        inputs = data().tensors[0]
        assert torch.equal(run.predict(data(), lambda model, batch: batch[0]), inputs)
        named = run.predict(data(), lambda model, batch: {"output": batch[0]})
        assert list(named) == ["output"]
        assert torch.equal(named["output"], inputs)
        with pytest.raises(InputError, match="a tensor called ''"):
            run.predict(data(), lambda model, batch: {"": batch[0]})
        turns = iter([True, False] * 9)
        with pytest.raises(InputError, match="returned a for one batch and a tensor for another"):
            run.predict(
                data(), lambda model, batch: batch[0] if next(turns) else {"a": batch[0]}, batch_size=4
            )


class Listed:
    """Is merged with a list of others, as torcheval's metrics are."""

    def merge_state(self, others: Any) -> Any:
        for other in others:
            assert other
        return self

    def compute(self) -> float:
        return 1.0


def test_a_metric_that_is_merged_otherwise_is_refused_in_one_line() -> None:
    with opened() as run:
        prepared(run)
        with pytest.raises(InputError, match=r"the metric Listed .* calls merge_state\(\[other\]\)"):
            run.evaluate(data(), lambda model, batch: {"listed": Listed()}, batch_size=4)


def test_a_loader_whose_rows_would_not_be_those_of_the_samples_is_refused() -> None:
    def function(model: Any, batch: Any) -> Any:
        return batch[0]

    with opened() as run:
        prepared(run)
        wanted = data().tensors[0]
        assert torch.equal(run.predict(DataLoader(data(), batch_size=3, shuffle=True), function), wanted)
        for given in (
            run.loader(DataLoader(data(), batch_size=3, shuffle=True)),  # as run.prepare returns it
            run.loader(data(), batch_size=3, order=lambda seed, epoch: [2, 2, 0]),
            run.loader(DataLoader(data(), batch_size=5, drop_last=True)),
            DataLoader(data(), batch_size=3, sampler=WeightedRandomSampler([1.0] * len(data()), 4)),
        ):
            with pytest.raises(InputError, match="in the order of the samples, and this loader has another"):
                run.predict(given, function)


def test_a_file_of_predictions_says_its_kind(tmp_path: Path) -> None:
    with opened() as run:
        prepared(run)
        with pytest.raises(InputError, match=r"ends in \.safetensors or \.npy"):
            run.predict(data(), lambda model, batch: model(batch[0]), out=tmp_path / "out.csv")
        with pytest.raises(InputError, match=r"a \.npy file cannot hold the tensors a, b"):
            run.predict(data(), lambda model, batch: {"a": batch[0], "b": batch[0]}, out=tmp_path / "out.npy")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", [".npy", ".safetensors"])
def test_a_file_of_predictions_clears_what_died_and_leaves_what_lives(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"out[1]{ending}"
    writing = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "import torch\n"
        "from paceline.training.prediction_file import prediction_file\n"
        "with prediction_file(Path(sys.argv[1])) as file:\n"
        "    file.add({'a': torch.ones(3, 2)})\n"
        "    print('written', flush=True)\n"
        "    sys.stdin.read()\n"
        "    file.commit()\n"
    )
    others = [
        subprocess.Popen(
            [sys.executable, "-c", writing, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    try:
        for one in others:
            assert one.stdout is not None
            assert one.stdout.readline() == b"written\n"
        others[0].kill()
        others[0].wait()
        with opened() as run:
            prepared(run)
            assert run.predict(data(), lambda model, batch: batch[0], out=path) == 24
        assert len(list(tmp_path.iterdir())) == 2
        assert path.stat().st_size > 24 * 4 * 4
        others[1].communicate(timeout=60)
        assert others[1].returncode == 0
        assert list(tmp_path.iterdir()) == [path]
        assert path.stat().st_size < 24 * 4 * 4
    finally:
        for one in others:
            one.kill()
            one.communicate()


class Judged(Task):
    early_stopping = EarlyStopping("loss", patience=2, mode="min", min_delta=0.1)
    keep_best = Best("right", k=2)


def test_early_stopping_waits_for_what_is_better_by_enough() -> None:
    judge = Judge(Judged())
    told = []
    for step, loss in enumerate([1.0, 0.95, 0.8, float("nan"), 0.75]):
        info = judge.judge(step, 0, {"loss": loss, "right": -loss})
        assert info is not None
        told.append((info.is_best, judge.stops))
        again = Judge(Judged())
        again.load_state_dict(judge.state_dict())
        assert again.judge(step, 0, {"loss": 0.0, "right": 9.0}) is None
        assert (again.stops, again.best()) == (judge.stops, judge.best())
    assert told == [(True, False), (True, False), (True, False), (False, False), (True, True)]
    assert judge.best() == {"step": 4, "metric": "right", "value": -0.75}
    with pytest.raises(
        InputError, match="early_stopping goes by the metric 'loss', and metrics\\(\\) returns right"
    ):
        judge.judge(9, 0, {"right": 1.0})


@pytest.mark.parametrize("first", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_what_is_not_finite_is_never_the_best(first: float, mode: str) -> None:
    class Kept(Task):
        keep_best = Best("loss", mode=mode)
        early_stopping = EarlyStopping("loss", patience=2, mode=mode)

    judge = Judge(Kept())
    told = [judge.judge(step, 0, {"loss": value}) for step, value in enumerate((first, 0.5, first))]
    assert [one is not None and one.is_best for one in told] == [False, True, False]
    assert judge.best() == {"step": 1, "metric": "loss", "value": 0.5}
    assert not judge.stops


@pytest.mark.parametrize(
    "make",
    [
        lambda: EarlyStopping("loss", patience=0),
        lambda: EarlyStopping("loss", mode="least"),
        lambda: EarlyStopping("loss", min_delta=-1),
        lambda: Best("", k=1),
        lambda: Best("right", k=0),
    ],
)
def test_what_is_declared_is_checked_when_it_is_made(make: Any) -> None:
    with pytest.raises(InputError):
        make()


def numbers(model: Any, batch: Any) -> Any:
    return batch[0][:, 0]


def part(first: int) -> list[tuple[torch.Tensor]]:
    return [(torch.tensor([float(number)]),) for number in range(first, first + 5)]


@pytest.mark.parametrize("options", [{"lengths": [5] * 4}, {"samples_per_epoch": 9, "buffer": 3}])
def test_rows_of_parts_are_in_the_order_of_the_parts(options: dict[str, Any]) -> None:
    with opened() as run:
        prepared(run)
        predicted = run.predict(Parts([0, 5, 10, 15], part, **options), numbers, batch_size=8)
        assert predicted.tolist() == list(range(20))
        with pytest.raises(InputError, match="Parts, whose samples are dealt to the shards"):
            run.predict(run.loader(Parts([0, 5, 10, 15], part, **options), batch_size=8), numbers)


def test_rows_of_a_loader_are_in_the_order_of_the_samples() -> None:
    samples = TensorDataset(torch.arange(20.0).reshape(20, 1))
    with opened() as run:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(samples, batch_size=8, shuffle=True)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        assert run.predict(loader, numbers).tolist() == list(range(20))
        in_order = run.loader(samples, batch_size=8, shuffle=False)
        assert run.predict(in_order, numbers).tolist() == list(range(20))
        with pytest.raises(InputError, match="a loader that shuffles"):
            run.predict(run.loader(samples, batch_size=8), numbers)
