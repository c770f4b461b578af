"""One stage at work: the forward and backward pass of one micro-batch, as one process would compute that part of it.

The task's loss is called on every stage, with something in the place of the model: at its call the stage is computed. Before
the last stage the loss ends there; on the last it goes on with the model's output. Random streams go on at each stage where
the one before stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from paceline.compat.autograd import run_engine
from paceline.compat.pytree import tree_map
from paceline.errors import InputError
from paceline.reduce.tree import Gradients
from paceline.strategies.base import StrategyInputs
from paceline.strategies.buffers.buffers import Buffers, Versions
from paceline.strategies.guards.saved_values import NOTHING, Graph, SavedValues, is_uncounted, writes_refused
from paceline.strategies.guards.second_order import check_transforms
from paceline.strategies.pipeline.attributes import StageAttributes
from paceline.strategies.pipeline.call import Function, Reached, StandIn, uncalled
from paceline.strategies.pipeline.inputs import Changed, InputComparison, Inputs, Received
from paceline.strategies.pipeline.share import Arrival, Share, StageBody, refuse_left_behind
from paceline.strategies.pipeline.streams import Standing, Streams
from paceline.task import Loss


@dataclass
class Micro:
    """One micro-batch: a part of a logical shard, or all of it."""

    shard: int
    seed: int
    part: int
    final: bool
    """Whether it is the last part of its shard."""
    batch: Any
    stream: Standing | None = None
    """Where the random streams stand at its beginning, if that is not the beginning of the shard."""
    ended: Standing | None = None
    """Where they stand at its end; the last stage knows."""


@dataclass(frozen=True)
class Handed:
    """What passes from one stage to the next, without its tensors."""

    value: Any
    """A nest of plain values; for each tensor its place in the list of tensors."""
    trained: list[bool]
    """Which tensors take a gradient."""
    stream: Standing
    elsewhere: list[bool] = field(default_factory=list)
    """Which tensors lie in the memory of the model's arguments, or of another one of these."""
    changed: dict[int, Any] = field(default_factory=dict)
    """Arguments of the model that the first stage has written to, by their place; for each tensor its place among those sent."""
    attributes: bytes = b""
    """Names of plain attributes that passes of the stages before have set, as far as they are new."""


@dataclass(frozen=True)
class _Place:
    index: int


@dataclass
class _Saved:
    """What the backward pass of a micro-batch needs."""

    inputs: list[Tensor]
    """Those that take a gradient."""
    outputs: list[Tensor] = field(default_factory=list)
    """Those that gradients come back for."""
    loss: Loss | None = None
    starts: list[Tensor | None] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)
    """What the first stage was called with: a block that is computed again keeps that, and no graph tells."""
    values: SavedValues = NOTHING
    made: Any = None
    """What the last stage returned, as long as its loss is computed."""


class Stage:
    """A part of the model, and the micro-batches that are on their way through it."""

    def __init__(
        self,
        index: int,
        count: int,
        bodies: Mapping[int, StageBody],
        names: frozenset[str],
        inputs: StrategyInputs,
        device: torch.device,
    ) -> None:
        """`bodies` run all stages of this worker, by number; `names` are the tensors of this stage."""
        self.body = body = bodies[index]
        self.index, self.first, self.last = index, index == 0, index == count - 1
        self.share = Share(body.root, sorted(names))
        held = {name: one for name, one in body.root.named_parameters() if name in names}
        self._weights = list(held.values())
        self.trained: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in held.items() if parameter.requires_grad
        }
        self.parameters = list(self.trained.values())
        self.buffers = Buffers(self.share, _own_rules(inputs, body.root, names), inputs.shards)
        self._precision, self._device = inputs.precision, device
        self._watch = InputComparison()
        self.attributes = StageAttributes(body, list(bodies.values()))
        self._saved: dict[int, _Saved] = {}
        self._original: dict[str, Tensor] = {}
        self._versions: dict[int, tuple[dict[str, Tensor], Versions]] = {}

    # Forward.

    def forward(
        self, number: int, micro: Micro, function: Function, came: tuple[Handed, list[Tensor]] | None
    ) -> Any:
        """Compute one micro-batch; return (what is handed on, its tensors), or on the last stage what the function returned."""
        saved = _Saved([])
        arrival: Arrival | None = None
        changed: Changed = {}
        news = b"" if came is None else came[0].attributes
        handed_in: Inputs | Received = Received((), ())
        if came is not None:
            arrival, changed = _unpacked(*came)
            saved.inputs = [one for one in came[1] if one.requires_grad]
            handed_in = Received(came[1], came[0].elsewhere, self._watch)

        def compute(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal changed, handed_in, news
            check_transforms("pp")
            watch = self._watch if self.first else None  # a later stage computes with what came to it
            inputs = Inputs((args, kwargs), watch, objects=not self.body.replays)
            saved.given = inputs.tensors() if self.first else []
            self.attributes.enter()
            try:
                saved.made = made = self.body.run(args, kwargs, arrival, streams)
            except Reached:
                news = self.attributes.hand_on(news)
                if self.first:
                    changed, handed_in = inputs.changed(), inputs
                else:
                    handed_in.check()
                raise
            handed_in.check()
            inputs.write(changed)
            self.attributes.leave(news)
            return made

        self.attributes.begin()
        streams = Streams(micro.seed, micro.stream, self._device)
        stand_in = StandIn(
            compute, any(module.training for module in self.body.modules()[:1]), self.body.original
        )
        try:
            with self._precision.autocast():
                value = function(stand_in, micro.batch)
        except Reached as reached:
            value = _packed(reached.value, streams.standing(), handed_in, changed, news)
            saved.outputs = [one for one in value[1] if one.requires_grad]
        except RuntimeError as error:
            self._refuse_known(error, saved.made)
            raise
        if not stand_in.called:
            raise uncalled()
        if self.last:
            self.attributes.end()
            saved.loss = value if isinstance(value, Loss) else None
            micro.ended = None if micro.final else streams.standing()
        self._keep(number, saved)
        return value

    def _refuse_known(self, error: RuntimeError, made: Any) -> None:
        """Raise in one line where a loss asks for what lies before a cut."""
        if "not have been used in the graph" in str(error):  # the model's output begins one of its own
            raise InputError(
                "the loss (or metrics) takes the gradient of an input (torch.autograd.grad: FGSM, a saliency, a penalty with "
                "create_graph=True), and under pp the model's output does not lead back to it: the graph begins anew at each "
                "cut. Use --strategy ddp."
            ) from error
        refuse_left_behind(self.body.root, made, error)

    def _keep(self, number: int, saved: _Saved) -> None:
        """Keep what the backward pass needs; a copy of what others' passes may write to before it, unseen by torch."""
        if not torch.is_grad_enabled():
            return
        refuse_left_behind(self.body.root, saved.made, saved.loss)
        losses = () if saved.loss is None else (saved.loss, *saved.loss.auxiliary.values())
        graph = Graph([*saved.outputs, *(loss.total for loss in losses)])
        found, saved.given = [*graph.uncounted, *filter(is_uncounted, saved.given)], []
        saved.made = None
        saved.values = SavedValues(found, self._weights)
        self._saved[number] = saved

    # Backward. Gradients come and go as one list for each term of the loss: auxiliary ones first, the main one last.

    def starts(
        self, number: int, scale: Callable[[torch.dtype], Tensor], terms: Sequence[str]
    ) -> list[list[Tensor | None]]:
        """Return, on the last stage, what the backward pass of each term of the loss starts from."""
        loss = self._saved[number].loss
        if loss is None:
            raise RuntimeError("a backward pass begins behind a loss")
        totals = [*(loss.auxiliary[name].total for name in terms), loss.total]
        self._saved[number].outputs = totals
        return [
            [scale(total.dtype) if place == term else None for place in range(len(totals))]
            for term, total in enumerate(totals)
        ]

    def backward(
        self, number: int, came: Sequence[Sequence[Tensor | None]]
    ) -> tuple[list[list[Tensor | None]], list[Gradients]]:
        """Return, for each term, the gradients of what was received and those of the parameters."""
        saved = self._saved.pop(number)
        wanted = [*saved.inputs, *self.parameters]
        with saved.values.restored():
            made = [
                _run(saved.outputs, starts, wanted, retain=True, accumulate=False) for starts in came[:-1]
            ]
            made.append(_accumulated(saved.outputs, came[-1], wanted, retain=False))
        count = len(saved.inputs)
        return [one[:count] for one in made], [one[count:] for one in made]

    def backward_input(self, number: int, came: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of what was received alone; those of the parameters come later, from the same graph."""
        saved = self._saved[number]
        saved.starts = list(came)
        with saved.values.restored():
            return _accumulated(saved.outputs, saved.starts, saved.inputs, retain=True)

    def backward_weight(self, number: int) -> Gradients:
        """Return the gradients of the parameters."""
        saved = self._saved.pop(number)
        with saved.values.restored():
            return _accumulated(saved.outputs, saved.starts, self.parameters, retain=False)

    def forget(self) -> None:
        """Release what the micro-batches in flight have saved for their backward passes."""
        self._saved.clear()

    # Buffers: each shard changes tensors of its own, because another shard's backward pass may still need the old ones.

    def open_shard(self, micro: Micro) -> None:
        """Switch the stage to the buffers of this micro-batch's shard."""
        if not self.buffers.active:
            return
        if not self._original:
            held = dict(self.share.named_buffers())
            self._original = {
                name: held[name] for name in (held if self.buffers.names is None else self.buffers.names)
            }
        if micro.shard not in self._versions:
            fresh = {name: buffer.clone() for name, buffer in self._original.items()}
            self.share.put(fresh)
            self._versions[micro.shard] = fresh, self.buffers.open_shard(self.share)
        else:
            self.share.put(self._versions[micro.shard][0])

    def close_shard(self, micro: Micro) -> None:
        """Keep what a finished shard made of its buffers."""
        if self.buffers.active and micro.final:
            self.buffers.close_shard(micro.shard, self.share, self._versions.pop(micro.shard)[1])

    def own_buffers(self) -> None:
        """Switch the stage back to its own buffers."""
        self.share.put(self._original)
        self._original, self._versions = {}, {}


def _accumulated(
    outputs: Sequence[Tensor], starts: Sequence[Tensor | None], wanted: Sequence[Tensor], *, retain: bool
) -> list[Tensor | None]:
    """Accumulate gradients in `.grad`, as one process does, and take them from there."""
    _run(outputs, starts, wanted, retain=retain, accumulate=True)
    made = [one.grad for one in wanted]
    for one in wanted:
        one.grad = None
    return made


def _run(
    outputs: Sequence[Tensor],
    starts: Sequence[Tensor | None],
    wanted: Sequence[Tensor],
    *,
    retain: bool,
    accumulate: bool,
) -> list[Tensor | None]:
    """Go straight to torch's engine, past the checks before it, as `compat.autograd.run_backward` does.

    `retain` keeps the graph for another pass; the gradients are returned, unless they `accumulate` in `.grad`.
    """
    pairs = [
        (output, start)
        for output, start in zip(outputs, starts, strict=True)
        if start is not None and output.requires_grad
    ]
    if not pairs or not wanted:
        return [None] * len(wanted)
    with writes_refused("pp", "Under pp other batches go through a stage in between."):
        made = run_engine(
            tuple(output for output, _ in pairs),
            tuple(start for _, start in pairs),
            retain,
            False,
            tuple(wanted),
            allow_unreachable=True,
            accumulate_grad=accumulate,
        )
    return [] if accumulate else list(made)


def _packed(
    value: Any, stream: Standing, inputs: Inputs | Received, changed: Changed, news: bytes
) -> tuple[Handed, list[Tensor]]:
    tensors: list[Tensor] = []
    places: dict[int, _Place] = {}

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in places:  # handed on twice it arrives as one, for the next stage may write to it
            places[id(leaf)] = _Place(len(tensors))
            tensors.append(leaf)
        return places[id(leaf)]

    value = tree_map(place, value)
    shared = inputs.shared_with(tensors)
    written = {number: (place(one), moved) for number, (one, moved) in changed.items()}
    shared += [False] * len(written)
    return Handed(value, [one.requires_grad for one in tensors], stream, shared, written, news), tensors


class _Computed(torch.autograd.Function):
    """Hands a leaf to the stage as what it was before the cut, the product of an operation, which may be written to in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        """Return the same memory, as no view of the leaf."""
        del ctx
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient as it is."""
        del ctx
        return gradient


def _unpacked(handed: Handed, tensors: Sequence[Tensor]) -> tuple[Arrival, Changed]:
    given = list(tensors)
    if torch.is_grad_enabled():
        for place, (tensor, trained) in enumerate(zip(tensors, handed.trained, strict=True)):
            if trained:
                given[place] = _Computed.apply(tensor.requires_grad_())  # type: ignore[no-untyped-call]
    value = tree_map(lambda leaf: given[leaf.index] if isinstance(leaf, _Place) else leaf, handed.value)
    changed = {number: (tensors[place.index], moved) for number, (place, moved) in handed.changed.items()}
    return Arrival(value, handed.stream), changed


def _own_rules(inputs: StrategyInputs, root: nn.Module, names: frozenset[str]) -> Mapping[str, Any]:
    """Return the rules for buffers by whole names, as far as they concern this stage; the whole model has checked them."""
    return {
        name: rule
        for pattern, rule in inputs.buffer_rules.items()
        for name, _ in root.named_buffers()
        if name in names and fnmatchcase(name, pattern)
    }
