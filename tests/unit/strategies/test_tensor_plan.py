"""Which layers a plan splits: read from patterns, found in models, refused with the numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from paceline.errors import InputError
from paceline.strategies.tensor.layers import SequenceNorm
from paceline.strategies.tensor.plan import TensorPlan, make_plan
from paceline.tasks.transformer import Transformer
from tests.contract.tasks import Classify, Tokens


class Attention(nn.Module):
    def __init__(self, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.num_heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)


class Gated(nn.Module):
    """A gated MLP, registered as Llama does: the way down stands in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.w1, self.w2, self.w3 = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 12)


class Normed(nn.Module):
    """Its hidden features are normalised: no worker may have a part of them only."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8)


class Lent(nn.Module):
    """Two MLPs that have their way down in common."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Gated(), Gated()
        self.second.w2 = self.first.w2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.scores = nn.Embedding(6, 4), nn.Linear(4, 6)
        self.scores.weight = self.table.weight


def transformer() -> nn.Module:
    return Transformer(tokens=14, length=9, width=8, layers=2, heads=2)


def words(plan: TensorPlan) -> dict[str, str]:
    """Say a plan in words."""
    return {name: _word(style) for name, style in plan.styles.items()}


def _word(style: ParallelStyle) -> str:
    if isinstance(style, ColwiseParallel):
        whole = style.output_layouts == (Replicate(),)
        return "columns, gathered" if whole else "columns"
    if isinstance(style, RowwiseParallel):
        return "rows" if style.input_layouts == (Shard(-1),) else "rows of the whole"
    return type(style).__name__


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (Classify().model, {"0": "columns", "3": "rows"}),
        (Tokens().model, {"2": "rows of the whole"}),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), {"0": "columns, gathered"}),
        (
            transformer,
            {
                "blocks.0.feed_in": "columns",
                "blocks.0.feed_out": "rows",
                "blocks.1.feed_in": "columns",
                "blocks.1.feed_out": "rows",
            },
        ),
        (Attention, {"query": "columns", "key": "columns", "value": "columns", "out": "rows"}),
        (Gated, {"w1": "columns", "w3": "columns", "w2": "rows"}),
        (lambda: nn.Sequential(Normed(), Gated()), {"1.w1": "columns", "1.w3": "columns", "1.w2": "rows"}),
        # Between the two layers stands what needs all features, so each is split by itself.
        (
            lambda: nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1), nn.Linear(4, 3)),
            {"0": "columns, gathered", "2": "rows of the whole"},
        ),
    ],
)
def test_what_is_proposed(make: Callable[[], nn.Module], wanted: dict[str, str]) -> None:
    assert words(make_plan(make(), None, 2)) == wanted


def test_heads_are_dealt_out_where_attention_is_split() -> None:
    assert make_plan(Attention(heads=4), None, 2).heads == [("", "num_heads")]
    assert make_plan(Attention(heads=3), None, 2).heads == [], "3 heads are not dealt out to 2 workers"
    assert words(make_plan(Attention(heads=3), None, 2))["query"] == "rows of the whole"


def test_patterns_of_the_task_are_expanded() -> None:
    style = ColwiseParallel(output_layouts=Replicate())
    plan = make_plan(
        transformer(), {"blocks.*.feed_in": "columns", "blocks.*.feed_out": "rows", "scores": style}, 2
    )
    assert [name for name, word in words(plan).items() if word == "columns"] == [
        "blocks.0.feed_in",
        "blocks.1.feed_in",
    ]
    assert plan.styles["scores"] is style
    assert plan.regions() == ["blocks.0", "blocks.1"]


def test_norms_before_split_layers_work_on_a_part_of_the_sequence() -> None:
    plan = make_plan(Gated(), None, 2, sequence=True)
    assert isinstance(plan.styles["norm"], SequenceNorm)
    first = plan.styles["w1"]
    assert isinstance(first, ColwiseParallel)
    assert first.input_layouts == (Shard(1),)
    plan = make_plan(transformer(), None, 2, sequence=True)
    assert [name for name, word in words(plan).items() if word == "SequenceNorm"] == [
        "blocks.0.feed_norm",
        "blocks.1.feed_norm",
    ]


def test_scores_that_stay_split() -> None:
    plan = make_plan(transformer(), None, 2, loss=True)
    assert plan.scores == "scores"
    assert words(plan)["scores"] == "columns"
    assert "scores" not in plan.opening, "nothing but the loss sees them split"


@pytest.mark.parametrize(
    ("make", "said", "size", "options", "message"),
    [
        (Classify().model, {"0": "columns"}, 3, {}, r"0 has 16 columns, which tp=3 does not divide\. Use a tp of 2, 4, 8, 16"),
        (transformer, {"blocks.*.feed_out": "rows"}, 5, {}, r"blocks\.0\.feed_out has 32 rows, which tp=5 does not divide"),
        (transformer, {"blocks.*.feed_inn": "columns"}, 2, {}, r"unknown layer in tensor_plan\(\): 'blocks\.\*\.feed_inn'"),
        (transformer, {"scores": "column"}, 2, {}, r"unknown way to split scores: 'column'\. Did you mean 'columns'\?"),
        (transformer, {"norm": "rows"}, 2, {}, r"splits norm by rows, but it is a LayerNorm"),
        (transformer, {}, 2, {}, r"names no layer"),
        (Tied, {"scores": "columns"}, 2, {}, r"scores\.weight is table\.weight too"),
        (Classify().model, None, 7, {}, r"tp=7 finds no layer to split: .* found 0 6x16, 3 16x3\. Use a tp of 2, 3, 4, 6, 8, 16"),
        (lambda: nn.Embedding(4, 4), None, 2, {}, r"found no Linear layer\. Use no tp, or say"),
        (Tied, None, 2, {}, r"tp=2 finds no layer to split"),
        (Classify().model, None, 2, {"loss": True}, r"splits the 3 scores of 3, which tp=2 does not divide"),
        (transformer, {"scores": "rows"}, 2, {"loss": True}, r"splits scores, the last Linear layer, by columns, but"),
        (Classify().model, None, 2, {"sequence": True}, r"finds no LayerNorm or RMSNorm right before one of the 1 layers"),
    ],
)  # fmt: skip
def test_what_is_refused(
    make: Callable[[], nn.Module],
    said: dict[str, str | ParallelStyle] | None,
    size: int,
    options: dict[str, bool],
    message: str,
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        make_plan(make(), said, size, **options)
    assert "\n" not in str(caught.value)


def test_a_layer_that_is_only_called_like_one_is_left_alone() -> None:
    class Strange(nn.Linear):
        def forward(self, values: Tensor) -> Tensor:
            return super().forward(values).softmax(-1)

    model = nn.Sequential(nn.Linear(4, 4), Strange(4, 4), nn.Linear(4, 4))
    assert words(make_plan(model, None, 2)) == {"0": "rows of the whole", "2": "rows of the whole"}


def test_a_layer_with_two_names_is_split_once_by_either() -> None:
    for pattern in ("first.w2", "second.w2", "*.w2"):
        assert words(make_plan(Lent(), {pattern: "rows"}, 2)) == {"first.w2": "rows"}


def test_a_layer_that_two_modules_hold_is_no_half_of_a_pair() -> None:
    assert words(make_plan(Lent(), None, 2)).keys() & {"first.w2", "second.w2"} <= {"first.w2"}
