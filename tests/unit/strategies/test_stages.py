"""Where a model is cut into stages, and in which order a pipeline works."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.errors import InputError
from paceline.strategies.pipeline.call import Reached
from paceline.strategies.pipeline.order import Action, ActionKind, forward_programs, programs
from paceline.strategies.pipeline.share import Arrival, make_stage
from paceline.strategies.pipeline.stages import Chain, balanced, chain_of
from paceline.strategies.pipeline.streams import Streams
from paceline.tasks.addition import Addition

# Where to cut.


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_no_other_cut_has_a_lighter_heaviest_stage(costs: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))

    def heaviest(starts: tuple[int, ...]) -> int:
        ends = [*starts[1:], len(costs)]
        return max(sum(costs[start:end]) for start, end in zip(starts, ends, strict=True))

    found = balanced(costs, parts)
    assert (found[0], len(found)) == (0, parts)
    assert sorted(set(found)) == list(found)
    every = [(0, *rest) for rest in combinations(range(1, len(costs)), parts - 1)]
    assert heaviest(found) == min(map(heaviest, every))


def sequence(*layers: nn.Module, stages: list[str] | None = None) -> Chain:
    return chain_of(nn.Sequential(*layers), stages, (torch.zeros(2, 4),), {})


def test_a_row_of_layers() -> None:
    activation = nn.ReLU()
    inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), activation)
    chain = sequence(nn.Linear(4, 8), activation, inner, nn.Linear(8, 4))
    assert chain.names == ("", "1", "2.0", "2.1", "2.2", "3")
    assert chain.owners["2.1.running_mean"] == (3,)
    # 40, 72, 16 and 36 parameters; 32, 64, 0 and 32 products a sample.
    assert [round(cost, 3) for cost in chain.costs] == [0.494, 0.0, 0.939, 0.098, 0.0, 0.47]
    assert chain.cut(2) == (0, 3)
    assert chain.places(chain.cut(2))["2.0.bias"] == 0
    assert chain.places(chain.cut(2))["2.1.weight"] == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_model_is_not_cut() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    for made in (torch.jit.script(layers), torch.jit.trace(layers, torch.ones(1, 4))):
        with pytest.raises(
            InputError, match=r"the model comes from torch\.jit.*pp cannot follow the calls in it"
        ):
            chain_of(made, None, (torch.zeros(2, 4),), {})
    assert sequence(nn.Linear(4, 4), torch.jit.script(layers), nn.Linear(4, 4)).names == ("", "1", "2")


def test_a_layer_that_only_real_numbers_can_go_through_is_weighed_by_its_parameters() -> None:
    class Choosy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum().item() > 0 else -x

    chain = sequence(nn.Linear(4, 4), Choosy(), nn.Linear(4, 4))
    assert chain.costs == (0.5, 0.0, 0.5)


def test_the_forward_pass_says_what_comes_before_the_blocks_and_what_behind() -> None:
    model = Addition(layers=3).model()  # `place` is made last and used first
    chain = chain_of(model, None, (torch.zeros(2, 7, dtype=torch.int64),), {})
    assert chain.names == ("", "blocks.0", "blocks.1", "blocks.2")
    units = {
        name: chain.owners[f"{name}.weight"] for name in ("token", "position", "place", "norm", "scores")
    }
    assert units == {"token": (0,), "position": (0,), "place": (0,), "norm": (3,), "scores": (3,)}
    assert chain.cut(2) == (0, 2)


def test_named_stages() -> None:
    layers = [nn.Linear(4, 4) for _ in range(5)]
    assert sequence(*layers, stages=["3"]).cut(2) == (0, 1)
    assert sequence(*layers, stages=["3"]).names == ("", "3")
    model = Addition(layers=4).model()
    call = (torch.zeros(2, 7, dtype=torch.int64),)
    assert chain_of(model, ["blocks.*"], call, {}).names == ("", *(f"blocks.{place}" for place in range(4)))
    with pytest.raises(InputError, match=r"blocks\.7"):
        chain_of(model, ["blocks.7"], call, {})
    with pytest.raises(InputError, match=r"calls blocks\.1 where blocks\.3 was due"):
        chain_of(model, ["blocks.3", "blocks.1"], call, {})


def test_more_stages_than_layers() -> None:
    with pytest.raises(InputError, match="into 4 stages, but it has 3 layers"):
        sequence(*(nn.Linear(4, 4) for _ in range(3))).cut(4)


def test_weights_that_two_stages_share() -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    chain = sequence(first, nn.Tanh(), last)
    assert set(chain.places((0,)).values()) == {0}
    with pytest.raises(InputError, match=r"stages 0 and 1 of the pipeline share 0\.weight and 2\.weight"):
        chain.places(chain.cut(2))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(4, 4), "finds no row of layers in Linear"),
        (nn.TransformerEncoderLayer(4, 2), "finds no row of layers in TransformerEncoderLayer"),
    ],
)
def test_nothing_to_cut_between(model: nn.Module, words: str) -> None:
    with pytest.raises(InputError, match=words):
        chain_of(model, None, (torch.zeros(2, 3, 4),), {})


class Winding(nn.Module):
    """Blocks that are called in another order than they stand in."""

    def __init__(self, *, choosy: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.choosy = choosy

    def forward(self, x: Tensor) -> Tensor:
        if self.choosy and bool((x if self.choosy == "input" else self.blocks[0](x)).sum() > 0):
            return x
        return self.blocks[1](self.blocks[2](self.blocks[0](x)))  # type: ignore[no-any-return]


def test_a_forward_pass_that_cannot_be_followed() -> None:
    with pytest.raises(InputError, match=r"calls blocks\.2 where blocks\.1 was due"):
        chain_of(Winding(), None, (torch.zeros(2, 4),), {})
    with pytest.raises(InputError, match="cannot follow the forward pass of Winding"):
        chain_of(Winding(choosy="output"), None, (torch.zeros(2, 4),), {})


class Padded(nn.Module):
    """Blocks with a mask, where one is needed, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(Masked() for _ in range(4))

    def forward(self, ids: Tensor, mask: Tensor, wanted: Tensor) -> Tensor:
        x = self.token(ids)
        places = torch.arange(ids.shape[1], device=x.device)
        if bool((places > 9).any()):
            raise AssertionError("values of a constant")
        used = None if bool(mask.all()) else mask[..., None].to(x)
        for block in self.blocks:
            x = block(x, used)
        return x.sum(-1) - wanted


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(x) if mask is None else torch.tanh(self.layer(x)) * mask


class Leaving(nn.Module):
    """Blocks that some batches go around."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 0).all()):
            return x
        return self.blocks[1](self.blocks[0](x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("padded", [False, True])
def test_a_pass_that_looks_at_its_arguments_is_followed_with_their_values(padded: bool) -> None:
    torch.manual_seed(0)
    model = Padded()
    ids = torch.randint(9, (2, 3))
    call = ids, torch.tensor([[1, 1, 1], [1, 1, 0 if padded else 1]]), torch.ones(2, 3)
    chain = chain_of(model, None, call, {})
    assert chain.values
    places = chain.places(chain.cut(2))
    names = [frozenset(name for name, place in places.items() if place == stage) for stage in range(2)]
    bodies = [make_stage(model, chain, chain.cut(2), stage, one) for stage, one in enumerate(names)]
    streams = Streams(1, None, torch.device("cpu"))
    with pytest.raises(Reached) as reached:
        bodies[0].run(call, {}, None, streams)
    made = bodies[1].run(call, {}, Arrival(reached.value.value, streams.standing()), streams)
    assert torch.equal(made, model(*call))
    assert torch.empty(1, device="meta").is_meta, "the mode has ended"


def test_a_pass_that_leaves_out_a_stage_for_some_batches_is_refused() -> None:
    model = Leaving()
    chain = chain_of(model, None, (torch.zeros(2, 4),), {})
    bodies = [make_stage(model, chain, chain.cut(2), stage, frozenset()) for stage in range(2)]
    streams = Streams(1, None, torch.device("cpu"))
    with pytest.raises(InputError, match="does not always call the modules"):
        bodies[0].run((torch.ones(2, 4),), {}, None, streams)
    arrival = Arrival(((torch.zeros(2, 4),), {}), streams.standing())
    with pytest.raises(InputError, match="does not always call the modules"):
        bodies[1].run((torch.ones(2, 4),), {}, arrival, streams)


# In which order.

LAYOUTS = [
    ("gpipe", 2, 2),
    ("gpipe", 3, 6),
    ("1f1b", 2, 2),
    ("1f1b", 4, 4),
    ("interleaved", 2, 4),
    ("interleaved", 3, 9),
    ("zero-bubble", 2, 4),
    ("zero-bubble", 4, 8),
]


@pytest.mark.parametrize("micros", range(1, 10))
@pytest.mark.parametrize(("schedule", "workers", "stages"), LAYOUTS)
def test_everything_is_done_once_and_nobody_waits_in_a_circle(
    schedule: str, workers: int, stages: int, micros: int
) -> None:
    made = programs(schedule, workers, stages, micros)
    everything = [action for program in made for action in program]
    assert len(set(everything)) == len(everything)
    for worker, program in enumerate(made):
        assert all(action.stage % workers == worker for action in program)
    wanted = {(stage, micro) for stage in range(stages) for micro in range(micros)}
    for kinds in (
        {ActionKind.FORWARD},
        {ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT},
        {ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT},
    ):
        assert {(one.stage, one.micro) for one in everything if one.kind in kinds} == wanted
    run_with_patience(made, workers)


def test_forward_only() -> None:
    made = forward_programs(2, 4, 3)
    assert {one.kind for program in made for one in program} == {
        ActionKind.FORWARD,
        ActionKind.SEND_OUTPUT,
        ActionKind.RECEIVE_INPUT,
    }
    run_with_patience(made, 2)


def run_with_patience(made: tuple[tuple[Action, ...], ...], workers: int) -> None:
    """Run the programs with messages that wait for nobody, and receivers that wait for the very next message."""
    sent: dict[tuple[int, int], list[tuple[bool, int, int]]] = {}
    places, had = [0] * workers, set[tuple[ActionKind, int, int]]()
    moved = True
    while moved:
        moved = False
        for worker, program in enumerate(made):
            while places[worker] < len(program):
                action = program[places[worker]]
                if not step(action, worker, workers, sent, had):
                    break
                had.add((action.kind, action.stage, action.micro))
                places[worker] += 1
                moved = True
    assert places == [len(program) for program in made]
    assert not any(sent.values())


def step(
    action: Action,
    worker: int,
    workers: int,
    sent: dict[tuple[int, int], list[tuple[bool, int, int]]],
    had: set[tuple[ActionKind, int, int]],
) -> bool:
    """Do one thing, unless it has to wait; what needs something must have it."""
    kind, stage, micro = action.kind, action.stage, action.micro
    if kind in (ActionKind.SEND_OUTPUT, ActionKind.SEND_GRADIENT):
        forward = kind is ActionKind.SEND_OUTPUT
        other = stage + (1 if forward else -1)
        sent.setdefault((worker, other % workers), []).append((forward, other, micro))
    elif kind in (ActionKind.RECEIVE_INPUT, ActionKind.RECEIVE_GRADIENT):
        forward = kind is ActionKind.RECEIVE_INPUT
        source = (stage + (-1 if forward else 1)) % workers
        queue = sent.get((source, worker), [])
        if not queue:
            return False
        assert queue.pop(0) == (forward, stage, micro), (
            "messages of a pair come in the order they are waited for"
        )
    elif kind is ActionKind.FORWARD:
        assert stage == 0 or (ActionKind.RECEIVE_INPUT, stage, micro) in had
    else:
        assert (ActionKind.FORWARD, stage, micro) in had
    return True


def test_one_forward_and_one_backward_keep_few_micro_batches_under_way() -> None:
    for worker, program in enumerate(programs("1f1b", 4, 4, 9)):
        open_, most = 0, 0
        for action in program:
            open_ += {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1}.get(action.kind, 0)
            most = max(most, open_)
        assert most == 4 - worker
