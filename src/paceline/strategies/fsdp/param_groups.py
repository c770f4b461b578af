"""The parameter groups of a fully sharded model: parameters that are gathered together and whose gradients leave together.

torch's `fully_shard` does the gathering, frees what is not needed, and fires at the right moments. Here is decided
which messages a pass sends, what is in them, and when a parameter group's gradients are complete.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)

from paceline.compat import autograd, foreach, fsdp
from paceline.compat.modules import NormWithStatistics
from paceline.compat.tensors import write_count
from paceline.errors import InputError
from paceline.reduce.gather import Gather, Wait
from paceline.reduce.packing import refuse_rows
from paceline.strategies.fsdp.lost_gradient import lose_gradient
from paceline.strategies.fsdp.replaced import Slot
from paceline.strategies.guards.refusals import refuse_copies
from paceline.strategies.guards.scripted import refuse_scripted
from paceline.strategies.guards.second_order import check_order, check_transforms
from paceline.strategies.guards.writes import Samples, differing, place_of, refuse_writes, sums_of
from paceline.strategies.in_turns.models import Models
from paceline.strategies.sharded import ShardedTensors
from paceline.strategies.tuning import Tuning
from paceline.world import spans

Value = TypeVar("Value")
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Listener(Protocol):
    """What a replica does about the messages of its parameter groups."""

    gather: Gather

    def outlive(self, action: Callable[[], Value], otherwise: Callable[[], Value]) -> Value:
        """Return what a message of a pass came to, or something else in its place where its step is discarded."""

    def gathers(
        self, param_group: ParamGroup, message: Tensor, rows: Tensor, group: dist.ProcessGroup, *, later: bool
    ) -> Wait | None:
        """Gather the weights of a parameter group; return what waits until they are here."""

    def reduces(self, param_group: ParamGroup, live: Tensor, output: Tensor) -> None:
        """Add a parameter group's gradients up over all workers; `output` gets this worker's rows."""

    def room(self, param_group: ParamGroup) -> Tensor:
        """Return memory in which a parameter group's gradients are laid out for `reduces`."""


class ParamGroup:
    """One group of parameters that travels together; where nothing in it is trained it is only gathered."""

    def __init__(
        self,
        index: int,
        name: str,
        module: FSDPModule,
        group: fsdp.Group,
        listener: Listener,
        *,
        reshard: bool,
    ) -> None:
        """`reshard` frees its weights behind each forward pass, not only behind the backward pass."""
        self.index, self.name = index, name
        self._keeps = not (reshard and name)
        self._module, self._group = module, group
        self._trains = [member.sharded.requires_grad for member in group.members]
        self.trained = [member for member, trains in zip(group.members, self._trains, strict=True) if trains]
        self.chunk = sum(member.padded_count for member in self.trained)
        self.workers = group.process_group.size()
        """How many share it."""
        self.device = group.device
        """Where it is computed."""
        # Of the trained ones: beside them there may be weights in fewer bits that are not.
        self.type = group.reduce_dtype or (self.trained or group.members)[0].sharded.dtype
        """The type in which its gradients travel."""
        self._reduces = False
        self._is_armed = False
        self._marks: list[tuple[int, int]] = []
        self._sums: Tensor | None = None
        self._samples: Samples | None = None
        self._sampled: list[Tensor] | None = None
        self._changed: str | None = None
        self.looks = False
        """Whether all values of gathered weights are compared, and not a few: not every write is counted."""
        self._uses = 0
        self.reduced = False
        """Whether its gradients left in this pass."""
        self.missing: list[fsdp.GroupedParam] = []
        """Parameters that the last pass gave no gradient for."""
        self._gather = _Gather(self, listener)
        module.set_custom_all_gather(self._gather)
        module.set_custom_reduce_scatter(_Reduce(self, listener))
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        self._post_backward = group.replace("post_backward", self._after_backward)
        self._pre_forward = group.replace("pre_forward", self._before_forward)
        self._pre_backward = group.replace("pre_backward", self._before_backward)
        self._reshard = group.replace("reshard", self._before_reshard)
        group.watch_inputs(self._watch_inputs)
        self._slots: list[Slot] = []

    def watch(self, local: ShardedTensors) -> None:
        """Refuse, from now on, other tensors in the place of weights; `local` has the rows that are updated."""
        self._slots = [Slot(member, local.part_of(member.sharded)) for member in self._group.members]

    def check_slots(self, *, memory: bool) -> None:
        """Raise where other tensors were put in the place of its weights, or where those have other `memory`."""
        for slot in self._slots:
            slot.check_memory() if memory else slot.check()

    @property
    def length(self) -> int:
        """Bytes of the message with all its weights."""
        mine = sum(one.padded_count * one.sharded.element_size() for one in self._group.members)
        return mine * self.workers

    def keep(self, inside: bool) -> None:
        """Keep its weights from a forward pass to the next, as it is to, `inside` the pass of a batch.

        In a call of the loop's own they are freed behind it: what it does next, it does to rows that are updated and saved.
        """
        if self._keeps:
            self._module.set_reshard_after_forward(not inside, recurse=False)

    def arm(self, *, reduces: bool, keeps: bool = False) -> None:
        """Announce whether the coming backward pass ends with a reduction, or only adds, and whether weights stay after it."""
        self._reduces, self._is_armed = reduces, True
        self._module.set_reshard_after_backward(not keeps, recurse=False)
        self.missing = []

    def disarm(self) -> None:
        """Let a backward pass that a loop makes for itself add nothing: its gradients belong to no step."""
        self._reduces = self._is_armed = False

    def finish_reductions(self) -> None:
        """Reduce now what could not leave during the pass: a parameter group that the pass went through more than once."""
        if self._reduces and not self.reduced and any(one.gathered is not None for one in self.trained):
            self._uses = 0
            self._after_backward()

    def gather(self) -> None:
        """Gather its weights now, if they are not here yet."""
        self._group.gather()
        self._note()

    def _note(self) -> None:
        """Remember how often the whole parameters were written to when they were gathered first, and where they lie.

        torch's own copies into them do not count.
        """
        if self._sampled is not None and (self._sums is not None or not self.looks):
            return  # this pass has done so
        whole = self._gathered()
        if self._samples is None:
            self._marks = [(write_count(one), place_of(one)) for one in whole]
            self._samples = Samples(whole)
            self._watch_gradients()
        if self._sampled is None:
            self._sampled = self._samples.take()
        if self.looks:
            self._sums = sums_of(whole)

    def _watch_gradients(self) -> None:
        """Have the gradients of passes that are no step's be known for lost where they reach the gathered weights."""
        for member in self.trained:

            def lose(whole: Tensor, member: fsdp.GroupedParam = member) -> None:
                if not self._is_armed:
                    lose_gradient(member, whole)

            # One that was told not to train by now is refused where its layer has been passed.
            if member.gathered is not None and member.gathered.requires_grad:
                member.gathered.register_post_accumulate_grad_hook(lose)  # type: ignore[no-untyped-call]

    def check(self, when: str) -> None:
        """Raise if a pass has written to a gathered parameter, or told it to train: the next gathering undoes it."""
        gathered = [member.gathered for member in self._group.members]
        for member, whole, mark in zip(self._group.members, gathered, self._marks, strict=False):
            if whole is None or (write_count(whole), place_of(whole)) != mark:
                refuse_writes(member.name, when)
        if self._changed is not None:
            refuse_writes(self._changed, when)
        self._check_switched(gathered, f"{when}: ")

    def _gathered(self) -> list[nn.Parameter]:
        return [whole for member in self._group.members if (whole := member.gathered) is not None]

    def _before_reshard(self) -> None:
        (sums, self._sums), (sampled, self._sampled) = (self._sums, None), (self._sampled, None)
        if self._group.is_unsharded:
            changed: list[int] = []
            if sums is not None:
                changed = differing(sums, sums_of(self._gathered()))
            elif sampled is not None and self._samples is not None:
                changed = self._samples.changed(sampled)
            if changed:
                self._changed = self._group.members[changed[0]].name
        self._reshard()

    def _check_switched(self, gathered: list[nn.Parameter | None], when: str) -> None:
        """Raise where a pass has told a parameter to train, or not to: the next gathering undoes it."""
        for member, whole, trains in zip(self._group.members, gathered, self._trains, strict=True):
            if whole is not None and trains != whole.requires_grad:
                raise InputError(
                    f"{when}requires_grad of {member.name} was changed in the middle of a step. fsdp trains what required "
                    "gradients when the model was prepared; use --strategy ddp to change that between two steps."
                )

    def close(self) -> None:
        """Release gathered weights, so that the next pass gathers them anew on all workers alike; count its uses from here.

        Workers must be alike in what was noted of passes before, too: one that is empty in a step has none there to end it.
        """
        self._group.forget_forward()
        self._module.reshard()
        self._uses = 0
        self.reduced = False

    def abandon(self) -> None:
        """Forget a message with weights that is in flight."""
        self._group.forget_gather()

    def join_gather(self) -> None:
        """Take part in gathering the weights without any use for them."""
        held = [part for member in self._group.members for part in member.message]
        if len({part.dtype for part in held}) > 1:
            held = [part.view(torch.uint8) for part in held]
        group, comm = self._group.process_group, self._gather
        count = sum(part.numel() for part in held)
        message = comm.allocate((count * group.size(),), dtype=held[0].dtype, device=self.device)
        mine = message[group.rank() * count : (group.rank() + 1) * count]
        torch.cat(held, out=mine)
        work = comm(message, mine, group)
        if work is not None:
            work.wait()

    def flat(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Lay whole gradients out as a message: for each worker its rows of every parameter."""
        made = torch.zeros(self.workers, self.chunk, dtype=self.type, device=self.device)
        whole = [
            self._nothing(member) if one is None else one
            for member, one in zip(self.trained, gradients, strict=True)
        ]
        foreach.chunk_cat(whole, 0, self.workers, out=made)
        return made.view(-1)

    def split(self, output: Tensor) -> list[Tensor]:
        """Cut what came for this worker into its rows of every parameter."""
        parts = torch.split(output, [member.padded_count for member in self.trained])
        sizes = [member.sharded_size for member in self.trained]
        return [part[: size.numel()].view(size) for size, part in zip(sizes, parts, strict=True)]

    def _nothing(self, member: fsdp.GroupedParam) -> Tensor:
        # Minus zero is what adds nothing to anything, a minus zero included.
        gathered = member.gathered
        dtype = self.type if gathered is None else gathered.dtype
        return torch.full(member.whole_size, -0.0, dtype=dtype, device=self.device)

    def _watch_inputs(self, inputs: list[Tensor]) -> None:
        """Have the gradients leave when those of the inputs are complete: a pass has then come through this module.

        An input that others are given too (the encoder's output, in every block of a decoder) is complete when it has come
        through all of them, and only then do their gradients leave: added up in the order of one process.

        A leaf's own gradient is there before those of the weights that it met: autograd accumulates into leaves first. Where
        all inputs are leaves, the gradients leave at the end of the pass.
        """
        computed = [one for one in inputs if not one.is_leaf]
        if self.name and computed:  # the gradients of what belongs to no block are complete at the very end
            register_multi_grad_hook(computed, self._after_backward)

    def _before_backward(self, *args: Any) -> None:
        check_order("fsdp")
        self._pre_backward(*args)

    def _before_forward(self, *args: Any) -> Any:
        check_transforms("fsdp")
        if self.name and self._group.is_unsharded:
            # Its gradients leave before those of what was put in the place of its weights are there.
            self.check_slots(memory=False)
        if torch.is_grad_enabled() and autograd.graph_task() == -1:
            self._uses += 1
        made = self._pre_forward(*args)
        self._note()
        return made

    def _after_backward(self, *_: Any) -> None:
        # A loss may use what belongs to no block before and behind the model's own pass, so its gradients are complete only
        # when no node is left; torch asks then once more.
        if not self.name and autograd.current_node() is not None:
            return
        gathered = [member.gathered for member in self._group.members]
        self._check_switched(gathered, "")  # torch would reduce gradients that nobody has made room for
        # A parameter group that was used more than once in a pass is complete only at the end of it.
        leaves = self._reduces and self._uses <= 1
        self._module.set_requires_gradient_sync(leaves, recurse=False)
        if leaves and not self.reduced:
            whole = [one for one, trains in zip(gathered, self._trains, strict=True) if trains]
            refuse_rows([None if one is None else one.grad for one in whole], "fsdp")
            for member, one in zip(self.trained, whole, strict=True):
                if one is not None and one.grad is None:
                    self.missing.append(member)
                    one.grad = self._nothing(member)
        if self._is_armed:
            self._post_backward()
            return
        # Below fp32 torch would keep them elsewhere, for the next pass to add to.
        there = [one for one in gathered if one is not None]
        kept = [one.grad for one in there]
        for one in there:
            one.grad = None
        self._post_backward()
        for one, gradient in zip(there, kept, strict=True):
            one.grad = gradient


class _Gather(fsdp.AllGather):
    """Gathering in a way of our own, that those who follow can be told of."""

    def __init__(self, param_group: ParamGroup, listener: Listener) -> None:
        self._param_group, self._listener = param_group, listener

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the weights of all workers."""
        self._param_group.check_slots(memory=True)
        return self._listener.outlive(
            lambda: self._listener.gather.room(int(*size), dtype, device),
            lambda: torch.zeros(*size, dtype=dtype, device=device),
        )

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather the weights of a parameter group."""
        start = partial(
            self._listener.gathers, self._param_group, output_tensor, input_tensor, group, later=async_op
        )
        wait = self._listener.outlive(start, lambda: None)
        return None if wait is None else _Outlived(wait, output_tensor, self._listener)


class _Outlived(dist.Work):
    """A message that ends in zeros where the group breaks in a step that is then discarded."""

    def __init__(self, wait: Wait, message: Tensor, listener: Listener) -> None:
        super().__init__()
        self._wait, self._message, self._listener = wait, message, listener

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the rows of all others."""

        limit = () if timeout is None else (timeout,)
        return bool(self._listener.outlive(partial(self._wait, *limit), self._give_up))

    def _give_up(self) -> bool:
        self._message.data = torch.zeros_like(self._message)  # not in memory that others may read
        return True


class _Reduce(fsdp.ReduceScatter):
    """Additions of our own in the place of torch's."""

    def __init__(self, param_group: ParamGroup, listener: Listener) -> None:
        self._param_group, self._listener = param_group, listener

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for all gradients of a parameter group, which are asked for first, or for this worker's rows of them."""
        if int(*size) == self._param_group.chunk:
            return torch.empty(*size, dtype=dtype, device=device)
        return self._listener.room(self._param_group)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,  # noqa: ARG002
        op: Any,  # noqa: ARG002
        async_op: bool = False,  # noqa: ARG002
    ) -> dist.Work | None:
        """Add the gradients of a parameter group up over all workers."""
        self._param_group.reduced = True
        with spans.of[spans.REDUCTION]:
            self._listener.reduces(self._param_group, input_tensor, output_tensor)
        return None


def whole_tensors(messages: Sequence[Tensor], members: Sequence[fsdp.GroupedParam]) -> list[Tensor]:
    """Put whole tensors together from the rows of all workers, one message from each.

    Each in memory of its own: numbers that lie apart (one row for each worker) have a norm with another last bit.
    """
    counts = [member.padded_count for member in members]
    columns = zip(*(torch.split(message, counts) for message in messages), strict=True) if members else ()
    return [
        torch.cat(column)[: member.whole_size.numel()].view(member.whole_size)
        for member, column in zip(members, columns, strict=True)
    ]


def shard_model(
    model: nn.Module, blocks: Mapping[str, nn.Module], mesh: DeviceMesh, tuning: Tuning, listener: Listener
) -> list[ParamGroup]:
    """Shard a model in place, block by block, and give its parameter groups in the model's order."""
    _check(model, blocks)
    # A last linear layer over more than two dimensions returns a view: in every step of every transformer.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")
    low = _TYPES.get(tuning.fsdp_dtype)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low and torch.float32),
        **({"offload_policy": CPUOffloadPolicy()} if tuning.offload else {}),
    }
    if low is not None:
        # Statistics stay in fp32, and their layers take weights of that type only.
        exact = {**options, "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
        for module in model.modules():
            if isinstance(module, NormWithStatistics) and module.affine and module not in blocks.values():
                fully_shard(module, **exact)
    # From the inside out: a block inside a block travels alone.
    for block in sorted(blocks.values(), key=lambda one: sum(1 for _ in one.modules())):
        fully_shard(block, reshard_after_forward=tuning.reshard, **options)
    fully_shard(model, **options)
    param_groups: list[ParamGroup] = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            refuse_copies(model.get_submodule(name), "fsdp")
            for group in fsdp.groups_of(model.get_submodule(name)):
                param_groups.append(
                    ParamGroup(len(param_groups), name, module, group, listener, reshard=tuning.reshard)
                )
    return param_groups


def _check(model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Refuse what cannot be cut into rows, or belongs to two parameter groups."""
    # Several models are gathered together, before each batch.
    if isinstance(model, nn.ModuleDict | nn.ModuleList) and not isinstance(model, Models):
        raise InputError(
            f"fsdp gathers weights when a module is called, and nobody calls an nn.{type(model).__name__}. Give it a class "
            "whose forward calls its members (self.student, self.teacher), or use ddp."
        )
    refuse_scripted(model.named_modules(), "fsdp", "put a part in the place of its weights")
    owners: dict[int, tuple[str, str]] = {}
    types: dict[str, tuple[str, torch.dtype]] = {}
    names = sorted(blocks, key=len, reverse=True)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        param_group = next((block for block in names if name.startswith(f"{block}.")), "")
        first, owner = owners.setdefault(id(parameter), (name, param_group))
        if owner != param_group:
            raise InputError(
                f"{first} and {name} are one parameter, but belong to two parameter groups ({owner or 'the model'} and "
                f"{param_group or 'the model'}) that fsdp gathers at different times. Name other blocks in block_modules(), or "
                "use ddp."
            )
        if parameter.numel() == 0:
            raise InputError(
                f"{name} has the shape {tuple(parameter.shape)}, which leaves fsdp nothing to shard. Leave it out, or use ddp."
            )
        if parameter.dim() == 0:
            raise InputError(
                f"{name} is a single number without a dimension, which fsdp cannot cut into rows. "
                "Make it nn.Parameter(torch.ones(1)), or use ddp."
            )
        if not parameter.is_contiguous():
            raise InputError(
                f"{name} does not lie row by row in memory (its strides are {tuple(parameter.stride())}), so fsdp cannot cut it "
                "into rows. Make it contiguous(), or use ddp."
            )
        if parameter.requires_grad:
            other, dtype = types.setdefault(param_group, (name, parameter.dtype))
            if dtype != parameter.dtype:
                raise InputError(
                    f"{other} is {dtype} and {name} is {parameter.dtype}, but fsdp gathers them together. "
                    "Use one type, name them in block_modules() as different blocks, or use ddp."
                )
