"""A DataLoader is understood exactly, or refused by name; nothing that yields batches is taken for samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline import Mean, Run
from paceline.data import ShardedLoader
from paceline.errors import InputError
from tests.unit.data.sources import Squares, Stream
from tests.unit.training.own_runs import data, losses, opened, prepared


def trained(run: Run, source: Any, **options: Any) -> list[torch.Tensor]:
    """Take an epoch and give its inputs in order, and the weights."""
    model, _ = prepared(run)
    seen = []
    for step in run.steps(source, epochs=1, **options):
        for batch in step:
            seen.append(batch[0])
            found = losses(model, batch)
            step.backward(found.sum(), len(found))
        step.apply()
    return [*seen, model.weight.detach()]  # type: ignore[list-item]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(one, other) for one, other in zip(left, right, strict=True)
    )


def doubled(items: list[Any]) -> Any:
    return [2 * torch.stack(column) for column in zip(*items, strict=True)]


class Kind(DataLoader[Any]):
    """A subclass that leaves the making of batches alone, as many libraries' do."""


class Changing(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield [2 * column for column in batch]


class Batches:
    """A loader of somebody's own."""

    batch_size = 8

    def __iter__(self) -> Iterator[Any]:
        yield [torch.zeros(8, 4), torch.zeros(8, 1)]


@pytest.mark.parametrize("kind", [DataLoader, Kind])
def test_a_loader_is_its_data_set_and_what_it_says(kind: type[DataLoader[Any]]) -> None:
    with opened() as run:
        wanted = trained(run, data(), batch_size=8)
    with opened() as run:
        assert same(trained(run, kind(data(), batch_size=8, shuffle=True)), wanted)
    with opened() as run:
        assert same(trained(run, kind(data(), batch_size=8, shuffle=True), batch_size=8), wanted)
    with opened() as run:
        in_order = trained(run, kind(data(), batch_size=8))
    assert torch.equal(torch.cat(in_order[:-1]), data().tensors[0])
    with opened() as run:
        loader = kind(data(), batch_size=8, collate_fn=doubled, num_workers=1)
        assert torch.equal(torch.cat(trained(run, loader)[:-1]), 2 * data().tensors[0])


def measured_loss(model: Any, batch: Any) -> Any:
    return {"loss": Mean(losses(model, batch).sum(), len(batch[0]))}


@pytest.mark.parametrize(
    ("sampler", "change", "words"),
    [
        (
            WeightedRandomSampler([1.0] * 24, 24),
            lambda one: one.weights[:12].zero_(),
            "the sampler's weights",
        ),
        (WeightedRandomSampler([1.0] * 24, 24), lambda one: setattr(one, "num_samples", 9), "num_samples"),
        (SubsetRandomSampler(list(range(12))), lambda one: one.indices.pop(), "the sampler's indices"),
    ],
)
def test_a_loader_that_says_something_else_later_is_refused(sampler: Any, change: Any, words: str) -> None:
    with opened(shards=2) as run:
        loader = run.loader(DataLoader(data(24), batch_size=4, sampler=sampler))
        list(loader.epoch(0))
        list(loader.epoch(1))
        change(sampler)
        with pytest.raises(InputError, match=words):
            loader.epoch(2)


def test_a_loader_with_processes_that_stay_keeps_them() -> None:
    with opened(shards=2) as run:
        source = data(24)
        loader = run.loader(DataLoader(source, batch_size=4, num_workers=1, persistent_workers=True))
        list(loader.epoch(0))
        source.tensors = tuple(torch.zeros_like(one) for one in source.tensors)
        found = [batch for step in loader.epoch(1) for shard in step.shards for batch in shard.batches]
        assert all(batch[0].abs().sum() > 0 for batch in found)


def test_predictions_take_no_loader_that_chooses_samples() -> None:
    with opened(shards=2) as run:
        prepared(run)
        chosen = DataLoader(data(24), batch_size=4, sampler=SubsetRandomSampler(range(12)))
        with pytest.raises(InputError, match=r"leaves samples out \(a sampler\)"):
            run.predict(chosen, lambda model, batch: model(batch[0]))


def test_evaluation_takes_a_loader_of_any_batch() -> None:
    with opened() as run:
        prepared(run)
        wanted = run.evaluate(data(), measured_loss, batch_size=24)
        assert run.evaluate(DataLoader(data(), batch_size=24, shuffle=True), measured_loss) == wanted


def test_an_evaluation_leaves_no_sample_out() -> None:
    told: list[Any] = []
    with opened() as run:
        run._engine.state.emit = told.append
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        dropping = DataLoader(data(), batch_size=7, shuffle=True, drop_last=True)
        model, optimizer, prepared_loader = run.prepare(model, optimizer, dropping)
        wanted = run.evaluate(data(), measured_loss, batch_size=7)
        in_order = run.predict(data(), lambda model, batch: model(batch[0]), batch_size=7)
        assert not any("drop_last" in one.text for one in told)
        sampled = BatchSampler(SequentialSampler(data()), 7, drop_last=True)
        for loader in (dropping, prepared_loader, DataLoader(data(), batch_sampler=sampled)):
            assert run.evaluate(loader, measured_loss) == wanted
            assert torch.equal(run.predict(loader, lambda model, batch: model(batch[0])), in_order)
        assert [one.text for one in told if "drop_last" in one.text] == [
            "every sample is measured once, those too that drop_last=True of the DataLoader would leave out"
        ]
        assert len(prepared_loader) == 3  # training drops them
        with pytest.raises(
            InputError, match=r"opened with drop_last=True\. Give run.evaluate the DataLoader"
        ):
            run.evaluate(run.loader(dropping), measured_loss)


@pytest.mark.parametrize(
    ("loader", "options", "words"),
    [
        (lambda: DataLoader(data(), batch_size=8), {"batch_size": 16}, "batches of 8 .* batches of 16"),
        (lambda: DataLoader(Stream(9), batch_size=7, drop_last=True), {}, "drop_last"),
        (lambda: DataLoader(data(), batch_size=8), {"order": lambda seed, epoch: [1]}, "one of its own"),
        (
            lambda: DataLoader(data(), batch_sampler=[[1, 2]]),
            {},
            "list. has no batch_size. Give it one, or say batch_size=N",
        ),
        (lambda: DataLoader(data(), batch_size=None), {}, "batch_size=None"),
        (lambda: Changing(data(), batch_size=8), {}, "Changing .* way of its own"),
        (Batches, {}, "Batches has a batch_size"),
        (lambda: iter(DataLoader(data(), batch_size=8)), {}, "only once"),
        (lambda: (batch for batch in [1]), {}, "only once"),
        (lambda: data().tensors, {}, "TensorDataset"),
        (lambda: {"train": data()}, {}, "no numbers"),
        (lambda: "train.csv", {}, "not a data set"),
        (lambda: Path("train.csv"), {}, "not a data set"),
    ],
)
def test_what_would_not_be_kept_is_refused(loader: Any, options: dict[str, Any], words: str) -> None:
    with opened() as run, pytest.raises(InputError, match=words):
        trained(run, loader(), **options)


def test_a_feed_takes_no_loader_by_any_way() -> None:
    with pytest.raises(InputError, match="gives batches, not samples"):
        ShardedLoader(DataLoader(Squares(8), batch_size=4), batch_size=4, shards=1, seed=0, owned=range(1))


def test_where_batches_divide_the_samples_none_is_dropped() -> None:
    with opened() as run:
        wanted = trained(run, DataLoader(data(), batch_size=8))
    with opened() as run:
        assert same(trained(run, DataLoader(data(), batch_size=8, drop_last=True)), wanted)


def test_two_functions_that_collate_are_one_too_many() -> None:
    loader = DataLoader(data(), batch_size=8, collate_fn=doubled)
    with opened() as run, pytest.raises(InputError, match="for collate"):
        run.loader(loader, collate=doubled)


def test_a_list_of_what_may_be_batches_is_named() -> None:
    heard: list[str] = []
    features, labels = torch.zeros(16, 6), torch.zeros(16)
    words = [(torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64))] * 4
    for batches in (
        [(features, labels)] * 4,
        ([features, labels],) * 4,
        [{"x": features, "y": labels}] * 4,
    ):
        with opened() as run:
            run._engine.state.emit = lambda event: heard.append(getattr(event, "text", ""))  # type: ignore[method-assign]
            run.loader(batches, batch_size=2)
            run.loader(batches, batch_size=2)  # said once a run
    with opened() as run:
        run._engine.state.emit = lambda event: heard.append(getattr(event, "text", ""))  # type: ignore[method-assign]
        assert len(heard) == 3
        assert all(
            "a list of 4 samples, the first of Tensor[16, 6], Tensor[16]. If that" in one for one in heard
        )
        for samples in (
            [(torch.zeros(6), torch.tensor(1))] * 4,
            words,
            [(torch.zeros(3, 8, 8), 1)] * 4,
            [features] * 4,
            [(torch.zeros(1, 6), torch.zeros(1))] * 4,
            TensorDataset(features, labels),
        ):
            run.loader(samples, batch_size=2)
    assert len(heard) == 3


def test_data_sets_with_a_batch_size_of_their_own_are_no_loaders() -> None:
    tensors, stream = TensorDataset(torch.zeros(8)), Stream(8)
    tensors.batch_size = stream.batch_size = 4  # type: ignore[attr-defined]
    for source in (tensors, stream, DataLoader(Stream(8), batch_size=4)):
        with opened() as run:
            assert sum(step.size for step in run.loader(source, batch_size=4).epoch(0)) == 8


def test_a_batch_sampler_makes_the_global_batches() -> None:
    batches = [[5, 6, 7], [1, 2], [23]]
    with opened() as run:
        seen = trained(run, DataLoader(data(), batch_sampler=batches), batch_size=4)
    assert torch.equal(torch.cat(seen[:-1]), data().tensors[0][[5, 6, 7, 1, 2, 23]])
    with opened() as run:
        steps = run.steps(data(), batch_size=4, epochs=1, order=lambda seed, epoch: [3] * 9)
        prepared(run)
        sizes = []
        for step in steps:
            for batch in step:
                sizes.append(len(batch[0]))
                step.backward(
                    step_loss := losses(run._engine.state.replica.model, batch).sum(), len(batch[0])
                )
                assert step_loss > 0
            step.apply()
    assert sizes == [4, 4, 1]
