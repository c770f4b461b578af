"""What one worker keeps of a model that is cut into stages: its tensors, and modules to run each of its stages with.

Everything keeps the name it has in the whole model. A stage of a sequential model is a row of its layers. Of any other model
a stage is the whole forward pass: what lies before it runs on the meta device, to no cost, until the first module of the stage is
called; that one gets what came from the stage before, and the call of the next stage's first module ends it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from paceline.compat.modules import buffers_of
from paceline.compat.pytree import tree_flatten, tree_leaves, tree_map
from paceline.errors import InputError
from paceline.strategies.pipeline.call import Reached
from paceline.strategies.pipeline.inputs import Inputs, is_transparent
from paceline.strategies.pipeline.model_copy import Attributes, ModelCopy, structure
from paceline.strategies.pipeline.stages import Chain, members, stand_ins
from paceline.strategies.pipeline.streams import Standing, Streams
from paceline.strategies.pipeline.values import WithValues, has_values, made_anew, own_values
from paceline.strategies.pipeline.values import without_values as on_meta
from paceline.task import Loss
from paceline.world import seeds


class Share(nn.Module):
    """The tensors of one stage under the whole model's names; as much of a module as `Buffers` asks for."""

    def __init__(self, root: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self._root = (root,)  # in a tuple it is no submodule: this is only a view of it
        self.names = frozenset(names)
        self._others = {name for name, _ in root.named_buffers()} - self.names

    def named_modules(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that have a buffer here, or a name for one that is yet to be made."""
        for path, module in self._root[0].named_modules():
            held = buffers_of(module).items()  # named_buffers leaves out those that are None
            if any(value is None or f"{path}.{name}".lstrip(".") in self.names for name, value in held):
                yield path, module

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield this stage's buffers, and any that a forward pass has made."""
        for path, module in self._root[0].named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                where = f"{path}.{name}".lstrip(".")
                if where not in self._others:
                    yield where, buffer

    def buffers(self, *_: Any, **__: Any) -> Iterator[Tensor]:
        """Return them without names."""
        return (buffer for _, buffer in self.named_buffers())

    def put(self, buffers: Mapping[str, Tensor]) -> None:
        """Put these tensors in the place of the stage's buffers."""
        for name, buffer in buffers.items():
            path, _, leaf = name.rpartition(".")
            setattr(self._root[0].get_submodule(path), leaf, buffer)


@dataclass(frozen=True)
class Arrival:
    """What came from the stage before."""

    value: Any
    """What the first module of this stage is given."""
    stream: Standing
    """Where the random streams stood there."""


class StageBody(ABC):
    """What runs one stage; by default with the whole model's own modules, between which attributes need no copying."""

    replays = False
    """Whether what stands before the stage in the forward pass is done here again, with the same objects for arguments."""
    root: nn.Module
    """The model whose modules run."""
    original: nn.Module
    """The whole model."""

    @abstractmethod
    def begin(self) -> None:
        """Prepare for a step, or refuse a model that has got other modules or hooks since the cut."""

    def end(self) -> None:  # noqa: B027
        """Write what passes made of plain attributes back to the whole model."""

    def give_one(self, name: str) -> None:  # noqa: B027
        """Copy one plain attribute that a loss has set on the whole model before its call."""

    def keep_apart(self, kind: type) -> None:  # noqa: B027
        """Continue with what the stage has where the whole model has this kind of thing."""

    @abstractmethod
    def modules(self) -> list[nn.Module]:
        """Return every module that runs here."""

    @abstractmethod
    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], came: Arrival | None, streams: Streams
    ) -> Any:
        """Compute the stage; raise `Reached` with what is handed on at the end of all but the last. Nothing came to the first."""


class Layers(StageBody):
    """A stage of a sequential model."""

    def __init__(self, layers: Sequence[nn.Module], root: nn.Module, *, last: bool) -> None:
        self.root = self.original = root
        self._layers, self._last = layers, last
        self._structure = _rows_of(root)

    def begin(self) -> None:
        """Check that these are the layers of the whole model still."""
        for name, held in _rows_of(self.root).items():
            if self._structure.get(name) != held:
                _refuse_change(name)

    def modules(self) -> list[nn.Module]:
        """Return every module that runs here."""
        return [module for layer in self._layers for module in layer.modules()]

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], came: Arrival | None, streams: Streams
    ) -> Any:
        """Compute one layer after the other."""
        if came is not None:
            streams.go_on(came.stream)
            value = came.value
        elif len(args) == 1 and not kwargs:
            value = args[0]
        else:
            raise InputError(
                f"the loss calls the nn.Sequential with {len(args) + len(kwargs)} arguments; it takes one. Call model(x)."
            )
        for layer in self._layers:
            value = layer(value)
        if not self._last:
            raise Reached(value)
        return value


class Passage(StageBody):
    """A stage of a model with a forward pass of its own, from the call of one module to the call of another."""

    replays = True

    def __init__(
        self, twin: ModelCopy, cuts: Sequence[str], start: int, end: int, *, values: bool = False
    ) -> None:
        """`cuts` are the modules at which units begin; the stage reaches from unit `start` up to `end`.

        `values`: the pass looks at those of its arguments.
        """
        self.root, self.original = twin.model, twin.original
        self._twin = twin
        self._replay: _Replay | None = None
        self._values, self._last = values, end == len(cuts)
        if start:
            _remember(self.root, "", cuts[start : end + 1])
        for unit, name in enumerate(cuts):
            module = self.root.get_submodule(name)
            if unit == end:
                module.register_forward_pre_hook(self._end, with_kwargs=True)
            elif unit == start and unit:
                module.register_forward_pre_hook(self._begin, with_kwargs=True)
            elif start < unit < end and start:
                module.register_forward_pre_hook(self._go_on, with_kwargs=True)
        twin.note()

    def begin(self) -> None:
        """Copy the plain attributes that the whole model has now."""
        changed = self._twin.changed()
        if changed is not None:
            _refuse_change(changed)
        self._twin.give()

    def end(self) -> None:
        """Write what passes made of plain attributes back to the whole model."""
        self._twin.take()

    def give_one(self, name: str) -> None:
        """Copy one plain attribute that a loss has set on the whole model before its call."""
        path, _, key = name.rpartition(".")
        self._twin.give_one(self.original.get_submodule(path), key)

    def keep_apart(self, kind: type) -> None:
        """Continue with what the stage has where the whole model has this kind of thing."""
        self._twin.keep_apart(kind)

    def modules(self) -> list[nn.Module]:
        """Return every module that runs here."""
        return list(self.root.modules())

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], came: Arrival | None, streams: Streams
    ) -> Any:
        """Go through the forward pass, after the first stage without values of parameters up to the cut."""
        if came is None:
            self.root(*args, **kwargs)
            refuse_end()
        self._replay = replay = _Replay(args, kwargs, came, streams, values=self._values)
        # Up to the beginning of the stage nothing is computed that could be learned from.
        torch.set_grad_enabled(False)
        try:
            with replay:
                made = self.root(*replay.args, **replay.kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if "meta" in str(error):
                _refuse(self.root, error)
            raise
        else:
            if not (replay.arrived and self._last):
                refuse_end()
            replay.inputs.check()
            return made
        finally:
            torch.set_grad_enabled(replay.learns)
            self._replay = None

    # Hooks of the modules at the cuts. Without a replay one is called again by a checkpoint that the user's own code makes.

    def _begin(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if self._replay is None else self._replay.arrive(args, kwargs)

    def _go_on(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if self._replay is None else self._replay.with_values(args, kwargs)

    def _end(self, _: nn.Module, args: Any, kwargs: Any) -> NoReturn:
        if self._replay is None:
            raise Reached((args, kwargs))
        if not self._replay.arrived:
            refuse_end()
        self._replay.inputs.check()
        raise Reached(self._replay.with_values(args, kwargs))


class _Replay:
    """One forward pass of a stage after the first: without values of parameters until its first module is called."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        came: Arrival,
        streams: Streams,
        *,
        values: bool = False,
    ) -> None:
        self.args, self.kwargs = own_values((args, kwargs)) if values else on_meta((args, kwargs))
        self._following = WithValues((args, kwargs)) if values else None
        self.learns = torch.is_grad_enabled()
        self.inputs = Inputs(())
        """The arguments as they are at the cut, and what stands for what came over it; none before it."""
        self.arrived = False
        self._came, self._streams, self._before = came, streams, streams.standing()
        self._stand_ins: list[Any] = []
        """Kept: an address is a name only as long as its tensor lives."""
        self._values: dict[int, Tensor] = {}

    def __enter__(self) -> None:
        """Begin the pass."""
        if self._following is not None:
            self._following.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        """End it, if it has not come to the stage."""
        if self._following is not None:
            self._following.leave()

    def arrive(self, args: Any, kwargs: Any) -> Any:
        """Put in what came from the stage before; the same tensors may be handed to later modules too."""
        self.arrived = True
        if self._following is not None:
            self._following.end()
        self._streams.replayed(self._before, self._came.stream)
        self._streams.go_on(self._came.stream)
        # What the forward pass writes before this, other stages do.
        self._stand_ins = tree_leaves((args, kwargs))
        handed = [leaf for leaf in self._stand_ins if isinstance(leaf, Tensor)]
        self.inputs = Inputs((self.args, self.kwargs, handed))
        self._values = {
            id(stand_in): value
            for stand_in, value in zip(self._stand_ins, tree_leaves(self._came.value), strict=True)
            if isinstance(stand_in, Tensor) and isinstance(value, Tensor)
        }
        torch.set_grad_enabled(self.learns)
        return self._came.value

    def with_values(self, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a module with what came from the stage before in the place of its stand-ins."""
        return tree_map(lambda leaf: self._values.get(id(leaf), leaf), (args, kwargs))


class _Remembered:
    """The forward pass of a module of another stage: only the shapes that come out of it matter, and those it knows by heart.

    Operations on the meta device are slow in torch, 0.1 to 1 ms each.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module, self._forward = module, forward
        self._known: dict[Any, Any] = {}
        self._tells = False
        """Whether it does more than return something: writes to its arguments, counts in an attribute."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return tensors without values, of the shapes that these arguments lead to."""
        leaves, spec = tree_flatten((args, kwargs))
        forms = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        key = repr((spec, forms))
        if key in self._known and not self._tells:
            return made_anew(self._known[key])
        attributes, inputs = Attributes(self._module.named_modules()), Inputs((args, kwargs))
        attributes.begin()
        with seeds.preserved():  # as in every later call, in which it draws nothing
            if has_values(leaves) and not self._tells:
                self._try_without_values(args, kwargs)
            self._known[key] = on_meta(self._forward(*args, **kwargs))
        plain = [name for name in attributes.written() if not isinstance(self._value(name), Tensor)]
        self._tells = self._tells or bool(plain) or inputs.touched() or not all(map(is_transparent, leaves))
        return made_anew(self._known[key])

    def _try_without_values(self, args: Any, kwargs: Any) -> None:
        """Find out whether the values of its arguments decide what comes out of it: then it is called every time."""
        try:
            self._forward(*on_meta(args), **on_meta(kwargs))
        except (RuntimeError, NotImplementedError):
            self._tells = True

    def _value(self, name: str) -> Any:
        path, _, key = name.rpartition(".")
        return vars(self._module.get_submodule(path)).get(key)


def _remember(module: nn.Module, path: str, run: Sequence[str]) -> None:
    """Make modules of other stages remember their shapes: the largest that hold nothing here and contain none of `run`."""
    tensors = [*module.parameters(), *module.buffers()]
    needed = not path or any(name == path or name.startswith(f"{path}.") for name in run)
    if tensors and all(tensor.is_meta for tensor in tensors) and not needed:
        module.forward = _Remembered(module, module.forward)
    elif path not in run:
        for name, child in module.named_children():
            _remember(child, f"{path}.{name}".lstrip("."), run)


def _refuse(model: nn.Module, error: Exception | None) -> NoReturn:
    raise InputError(
        f"the forward pass of {type(model).__name__} uses something after a cut of the pipeline that was made before it, and "
        "only what is handed to the module at the cut gets across. Hand it on from block to block, or write an nn.Sequential."
    ) from error


def refuse_left_behind(model: nn.Module, made: Any, outcome: Exception | Loss | None) -> None:
    """Raise where a loss has used what the model's output holds of the other side of a cut: there, it has no values."""
    error = outcome if isinstance(outcome, Exception) else None
    used = "meta" in str(error).lower() or (isinstance(outcome, Loss) and outcome.total.is_meta)
    if used and any(one.is_meta for one in Inputs(made, objects=True).tensors()):
        _refuse(model, error)


def refuse_end() -> NoReturn:
    """Raise where a pass goes past a cut."""
    raise InputError(
        "the model's forward pass does not always call the modules at which pp has cut it, each once and in one order: for some "
        "batches it leaves one out. Name modules that it always calls in pipeline_stages(), or use another strategy."
    )


def make_stage(
    model: nn.Module, chain: Chain, starts: Sequence[int], stage: int, names: frozenset[str]
) -> StageBody:
    """Make what runs one stage, out of the whole model; `names` are the tensors that it holds."""
    bounds = [*starts, len(chain.names)]
    start, end = bounds[stage], bounds[stage + 1]
    if chain.sequential:
        layers = members(model)
        low = layers.index(chain.names[start]) if start else 0
        high = layers.index(chain.names[end]) if end < len(chain.names) else len(layers)
        chosen = [model.get_submodule(name) for name in layers[low:high]]
        return Layers(chosen, model, last=stage == len(starts) - 1)
    twin = ModelCopy(model, stand_ins(model, names))
    return Passage(twin, chain.names, start, end, values=chain.values)


def _rows_of(model: nn.Module) -> dict[str, list[Any]]:
    """Return the members and hooks of the plain sequences whose layers are called without them."""
    layers = members(model)
    return {
        name: held
        for name, held in structure(model).items()
        if not any(name == layer or name.startswith(f"{layer}.") for layer in layers)
    }


def _refuse_change(name: str) -> NoReturn:
    raise InputError(
        f"{name or 'the model'} was given other modules or hooks after pp had cut the model into stages, which do not have them. "
        "Make the model as it is to be trained, with its hooks, before run.prepare, or use another strategy."
    )
