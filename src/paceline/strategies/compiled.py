"""`--compile`: what a step computes, the loss with the model, as one region of torch.compile.

Bits must not depend on who computes, nor on what a process has seen before. So the region is the same for every strategy that
promises bits and for any number of workers, and there is one graph for each shape of batch, compiled for that shape alone:
torch's own way, one graph for all shapes from the second on, would have a resumed run compute with another graph.

One graph has one backward pass, at whose end all gradients appear at once, and nothing could be sent to other workers before.
A large model is therefore compiled in a few pieces, as torch does it for its DistributedDataParallel; one process too, for its
bits to be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from paceline.compat.modules import hooked_everywhere, plain_call, replace_call
from paceline.errors import InputError
from paceline.strategies.attention.swap import swap_attention
from paceline.strategies.guards.loss_checks import refuse_mean
from paceline.strategies.precision import Precision, widened
from paceline.task import Loss
from paceline.world import World
from paceline.world.status_page import Phase

if TYPE_CHECKING:
    from paceline.compat.graphs import Compiled, Graph

PIECES = 4
"""Of how many pieces of about the same size a model is compiled: each boundary costs a trip through memory."""
SMALLEST_PIECE = 25 << 20
"""Bytes of parameters below which a piece is not worth a boundary: as much as one bucket of torch's DDP."""
MOST_SHAPES = 64
"""How many calls of a region may compile: one that compiles again and again is slower than none."""
_GRAPHS = 1024
"""More than torch will ever need for these, graph breaks included: it must never go on uncompiled by itself."""
_NEXT_STEP = "Pad batches to a few lengths, keep numbers that change from step to step in tensors, or leave --compile out."

Function = Callable[..., Any]


class Compiler:
    """What a run compiles: regions by function, each compiled once for every shape."""

    def __init__(
        self, world: World, note: Callable[[str], None], *, repeatable: bool, in_pieces: bool
    ) -> None:
        """`repeatable`: with the same kernels in every process. `in_pieces`: large graphs, for what that is worth."""
        self.world, self.note, self.repeatable, self.in_pieces = world, note, repeatable, in_pieces
        self.compilations = 0
        """How many calls of all regions together have compiled."""
        self._regions: dict[Hashable, Region] = {}

    def of(self, function: Function) -> Region:
        """Return a function compiled as one region; the same one for the same function."""
        if isinstance(function, Region):
            return function
        key = _key(function)
        if key not in self._regions:
            self._regions[key] = Region(function, self)  # which keeps it, and so what its key numbers
        return self._regions[key]


class Region:
    """A function that is compiled as a whole, whatever it calls included, when it meets a shape for the first time."""

    def __init__(self, function: Function, compiler: Compiler) -> None:
        # Loaded here, for it takes seconds and only who compiles needs it.
        from paceline.compat import graphs

        self.function = function
        """What is compiled."""
        self._graphs, self._compiler = graphs, compiler
        graphs.allow_graphs(_GRAPHS)
        graphs.guard_hooks()
        self._compiled: dict[tuple[bool, ...], Function] = {}
        """By the kinds of hooks that are on all modules: torch does not look whether there are any by now."""
        self._calls = self._compilations = 0
        self._new: list[_NewGraph] = []
        """The graphs that the call in flight has compiled."""
        self._phase: Phase | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, compiled."""
        if not self._calls:
            self._compiler.note("compiling: the first pass takes longer")
        self._calls += 1
        try:
            value = self._of_now()(*args, **kwargs)
        finally:
            if self._phase is not None:
                self._compiler.world.status_page.enter(self._phase)
                self._phase = None
        if self._new or self._calls == 1:
            self._check(value)
        return value

    def _of_now(self) -> Function:
        """Return what torch compiles of the function while there are the hooks that there are."""
        hooked = hooked_everywhere()
        made = self._compiled.get(hooked)
        if made is None:
            made = torch.compile(_own_code(self.function), backend=self._compile, dynamic=False)
            self._compiled[hooked] = made
        return made

    def _compile(self, graph: Graph, inputs: Sequence[Any]) -> Compiled:
        """Compile what torch has captured; it calls this."""
        compiler = self._compiler
        if self._phase is None:
            self._phase = compiler.world.status_page.enter(Phase.COMPILE)
        if self._calls > 1 and not self._new:
            compiler.note(f"compiling again, for {_shapes(inputs)}")
        swapped = compiler.repeatable and swap_attention(graph, compiler.world.device)
        shown = self._graphs.outputs_without_memory(graph, inputs)
        # Each term of a loss has a backward pass, and all but the last one keep the graph.
        ways_back = (
            2 if shown is None else sum(isinstance(one, Tensor) and one.requires_grad for one in shown)
        )
        trained = sum(one.nbytes for one in inputs if isinstance(one, nn.Parameter) and one.requires_grad)
        made = self._graphs.compile_graph(
            graph,
            inputs,
            piece_bytes=max(SMALLEST_PIECE, trained // PIECES) if compiler.in_pieces else None,
            repeatable=compiler.repeatable,
            passes_once=ways_back <= 1,
            cached=not swapped,
        )
        new = _NewGraph(made, shown)
        self._new.append(new)
        return new

    def _check(self, value: Any) -> None:
        """Look at what a call has come to that has compiled."""
        new, self._new = self._new, []
        self._compilations += 1
        self._compiler.compilations += 1
        if self._calls == 1 and len(new) != 1:
            so_far = f"a step was compiled in {len(new)} parts" if new else "nothing of a step was compiled"
            self._compiler.note(
                f"{so_far}, because something in the loss or the model cannot be compiled; TORCH_LOGS=graph_breaks shows what"
            )
        if self._compilations > MOST_SHAPES:
            raise InputError(
                f"a step was compiled for {MOST_SHAPES} shapes of batches, or numbers that change, and has met another one. "
                + _NEXT_STEP
            )
        for graph in new:
            graph.check_mean(value)


class _NewGraph:
    """A compiled graph, whose first outputs are kept until they were looked at."""

    def __init__(self, run: Compiled, shown: list[Any] | None) -> None:
        self._run, self._shown = run, shown
        self._given: Sequence[Any] = ()

    def __call__(self, *args: Any) -> Any:
        made = self._run(*args)
        if self._shown is not None:
            self._given = made
        return made

    def check_mean(self, value: Any) -> None:
        """Refuse a loss that is a mean where its sum belongs: compiled code does not show it, so the captured graph is asked."""
        shown, given = self._shown or (), self._given
        self._shown, self._given = None, ()
        if not isinstance(value, Loss) or not all(isinstance(one, Loss) for one in value.auxiliary.values()):
            return
        known = {id(one): other for one, other in zip(given, shown, strict=False) if isinstance(one, Tensor)}

        def seen(loss: Loss) -> Loss:
            weight = known.get(id(loss.weight), loss.weight)
            terms = {name: seen(term) for name, term in loss.auxiliary.items()}
            return Loss(known.get(id(loss.total), loss.total), weight, terms)

        with suppress(RuntimeError):  # a question that only a number with memory can answer
            refuse_mean(seen(value))


def _key(function: Function) -> tuple[Hashable, ...]:
    """Return what two functions share that compute the same: one that a loop makes anew in each step is compiled once.

    Objects are told apart by themselves: those that compare equal may not stay so, and many have no hash.
    """
    if isinstance(function, MethodType):
        return id(function.__self__), *_key(function.__func__)
    if isinstance(function, FunctionType):
        named = function.__kwdefaults__ or {}
        held = (
            function.__globals__,
            *(function.__closure__ or ()),
            *(function.__defaults__ or ()),
            *named.values(),
        )
        return function.__code__, *named, *map(id, held)
    return (id(function),)


def _own_code(function: Function) -> Function:
    """Return a function that calls another one, with code of its own: torch keeps what it has compiled by code."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)


def _shapes(inputs: Sequence[Any]) -> str:
    shapes = [
        "x".join(map(str, one.shape)) or "one number"
        for one in inputs
        if isinstance(one, Tensor) and not isinstance(one, nn.Parameter)
    ]
    return f"inputs of {', '.join(shapes[:3])}{' ...' * (len(shapes) > 3)}" if shapes else "other numbers"


class CompiledForward:
    """A block's forward, compiled; an object and not a closure, so that a deep copy of the model takes the copied block along."""

    def __init__(self, forward: Function, region: Region) -> None:
        self._forward, self._region = forward, region

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block; blocks of one kind share what is compiled."""
        # A group of one worker goes on with the same blocks, and compiles them along with the rest.
        if torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        return self._region(self._forward, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        """Return the forward of the copied block, in the same region."""
        return CompiledForward(deepcopy(self._forward, memo), self._region)


def compile_blocks(blocks: Iterable[nn.Module], compiler: Compiler) -> None:
    """Compile modules one by one, in place and inside of their hooks: what gathers and frees weights stays between them."""
    region = compiler.of(_call)
    for block in blocks:
        if block not in _WITH_FORWARD:
            _WITH_FORWARD.add(block)
            # An attribute of the instance, which torch's __call__ prefers to the method of its class.
            block.forward = CompiledForward(block.forward, region)


def compile_calls(model: nn.Module, compiler: Compiler, precision: Precision) -> None:
    """Compile the calls of a model in place, in a precision, for a loop that calls it by itself; its type and names stay."""
    plain = plain_call(model)
    region = compiler.of(plain)

    def call(*args: Any, **kwargs: Any) -> Any:
        with precision.autocast():
            # A region that calls the model compiles it along with the rest.
            made = plain(*args, **kwargs) if torch.compiler.is_compiling() else region(*args, **kwargs)
        return made if precision.name == "fp32" else widened(made)

    replace_call(model, call)


def _call(function: Function, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


_WITH_FORWARD: WeakSet[nn.Module] = WeakSet()
"""Modules whose forward is compiled, for the rest of their lives: recomputation may have wrapped it since."""
