"""Contracts on process groups, DDP, DTensor, fully_shard and RPC: a group of one worker will do."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.unit.compat.contracts import alone, as_if_two, leans_on

_GROUPS = "torch.distributed.distributed_c10d"
_FSDP = "torch.distributed.fsdp._fully_shard"


@leans_on(
    f"{_GROUPS}._world",
    f"{_GROUPS}._get_default_group",
    f"{_GROUPS}._new_process_group_helper",
    f"{_GROUPS}._set_pg_timeout",
)
def test_a_group_is_named_by_its_members() -> None:
    from paceline.compat import process_groups

    with alone() as whole:
        made = process_groups.new_group("ours", [0], timedelta(seconds=20))
        assert made.group_name == "ours"
        assert (dist.get_world_size(made), dist.get_process_group_ranks(made)) == (1, [0])
        process_groups.set_timeout(made, timedelta(seconds=10))
        assert process_groups.is_formed(made)
        dist.destroy_process_group(made)
        assert not process_groups.is_formed(made)
        assert process_groups.is_formed(whole)
    assert not process_groups.is_formed(whole)
    process_groups.count_groups_anew()
    with alone() as again:
        assert again.group_name == "0"


@leans_on(f"{_GROUPS}._abort_process_group")
def test_a_group_can_be_aborted() -> None:
    from paceline.compat import process_groups

    assert callable(process_groups.abort)


@leans_on("torch._C._distributed_c10d._dump_fr_trace")
def test_the_flight_recorder_tells_what_is_pending() -> None:
    from paceline.compat.process_groups import flight_record

    with alone():
        dist.all_reduce(torch.ones(1))
        last = flight_record()[-1]
    assert last["profiling_name"].partition(":")[2] == "all_reduce"
    assert {"retired", "is_p2p", "collective_seq_id", "p2p_seq_id", "process_group"} <= last.keys()


@leans_on(
    "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    "torch._C._distributed_c10d.Reducer._rebuild_buckets",
)
def test_ddp_leaves_parameters_out_and_rebuilds_its_buckets() -> None:
    from paceline.compat import ddp

    with alone():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        ddp.leave_out(model, ["0.weight", "0.bias"])
        wrapped = DistributedDataParallel(model)
        assert set(wrapped.parameters_to_ignore) == {"0.weight", "0.bias"}  # type: ignore[arg-type]
        wrapped(torch.ones(1, 2)).sum().backward()
        ddp.rebuild_buckets(wrapped.reducer)


@leans_on("torch.distributed.tensor._utils.compute_local_shape_and_global_offset")
def test_bounds_of_a_dtensor() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    from paceline.compat.dtensor import local_bounds

    with alone() as group:
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("rows",))
        made = distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)])
        assert local_bounds(made) == ((0, 0), (3, 2))


@leans_on(
    "torch.distributed.tensor.DTensor._op_dispatcher",
    "torch.ops.aten._local_scalar_dense",
    "torch.distributed.tensor.DTensor:_local_tensor",
    "torch.distributed.tensor.DTensor:_custom_op_handlers",
)
def test_an_operator_on_a_dtensor_can_be_taken_over() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    from paceline.compat import dtensor, tensors

    with alone() as group:
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("rows",))
        made = distribute_tensor(torch.ones(1), mesh, [Shard(0)])
        assert tensors.has_local_part(made)
        assert tensors.local_part(made).data_ptr() == made.to_local().data_ptr()
        handlers = dtensor.operator_handlers()
        seen: list[Any] = []

        def refuse(operator: Any, args: Any, kwargs: Any) -> None:
            seen.extend((operator, len(args), kwargs))
            raise KeyError("refused")

        handlers[dtensor.TO_NUMBER] = refuse
        try:
            made.item()
        except KeyError:
            pass
        finally:
            del handlers[dtensor.TO_NUMBER]
        assert seen == [dtensor.TO_NUMBER, 1, {}]
        assert made.to_local().item() == 1
    assert not tensors.has_local_part(torch.ones(1))


@leans_on(
    "torch._C._dispatch_get_all_op_names",
    "torch.multiprocessing.reductions.StorageWeakRef",
    "torch.ops.aten.select.int:_schema.returns",
)
def test_every_operator_on_a_dtensor_can_be_seen_and_passed_on() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    from paceline.compat import dispatch, dtensor, tensors

    known = {str(one) for one in dispatch.aten_operators()}
    assert known >= {"aten.select.int", "aten.slice.Tensor", "aten.detach.default", "aten.mul_.Tensor"}
    assert [one.alias_info is not None for one in dispatch.returns_of(torch.ops.aten.select.int)] == [True]
    assert any(torch.Tag.pointwise in one.tags for one in dispatch.overloads("abs"))
    assert dispatch.overloads("no such operator") == []
    with alone() as group:
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("rows",))
        made = distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)])
        table, seen = dtensor.operator_handlers(), []

        def see(operator: Any, args: Any, kwargs: Any) -> Any:
            seen.append(str(operator))
            del table[operator]
            return operator(*args, **kwargs)

        wanted = [torch.ops.aten.detach.default, torch.ops.aten.slice.Tensor, torch.ops.aten.mul_.Tensor]
        table.update(dict.fromkeys(wanted, see))
        made.data[1:3].mul_(2)
        assert seen == [str(one) for one in wanted]
        assert not set(wanted) & set(table)
    storage = torch.ones(2).untyped_storage()
    reference = tensors.weak_storage(storage)
    assert not reference.expired()
    del storage
    assert reference.expired()


def _nodes(made: torch.Tensor) -> list[str]:
    """Return the names of all nodes behind a tensor."""
    names, waiting = [], [made.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            names.append(node.name())
            waiting += [before for before, _ in node.next_functions]
    return names


@leans_on(
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup.pre_forward",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup.pre_backward",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup.post_backward",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup.reshard",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup._register_post_backward_hook",
    "torch.distributed.fsdp._common_utils:collect_grad_tensors (2.11: tree_flatten of torch.utils._pytree)",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup:_all_gather_process_group",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup:_all_gather_result",
    f"{_FSDP}._fsdp_state.FSDPState._lazy_init",
    f"{_FSDP}._fsdp_state.FSDPState:_fsdp_param_groups (2.11: _fsdp_param_group)",
    f"{_FSDP}._fsdp_api.AllGather",
    f"{_FSDP}._fsdp_api.ReduceScatter",
)
def test_moments_and_messages_of_a_sharded_model() -> None:
    from paceline.compat import fsdp

    sent: list[str] = []

    class Gather(fsdp.AllGather):
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
            sent.append(f"gather {input_tensor.numel()}")
            output_tensor.zero_()

    class Reduce(fsdp.ReduceScatter):
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(
            self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
        ) -> None:
            sent.append(f"reduce {op}")
            output_tensor.zero_()

    def noted(moment: str, group: fsdp.Group) -> None:
        def call(*args: Any) -> Any:
            sent.append(moment)
            return original(*args)

        original = group.replace(moment, call)

    with as_if_two() as world:
        model = _sharded(world)
        (group,) = fsdp.groups_of(model)
        assert isinstance(model, FSDPModule)
        model.set_custom_all_gather(Gather())
        model.set_custom_reduce_scatter(Reduce())
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
        for moment in ("pre_forward", "pre_backward", "post_backward", "reshard"):
            noted(moment, group)
        fsdp.find_root(model)
        model.set_requires_gradient_sync(True, recurse=False)
        model.set_reshard_after_backward(True, recurse=False)
        assert (group.process_group.size(), group.device.type, group.reduce_dtype) == (2, "cpu", None)
        assert not group.is_unsharded
        model(torch.ones(1, 2)).sum().backward()
        order = [one for one in sent if one != "reshard"]
        assert order == ["pre_forward", "gather 3", "pre_backward", "post_backward", "reduce RedOpType.SUM"]
        assert "reshard" in sent
        seen: list[torch.Tensor] = []
        group.watch_inputs(seen.extend)
        given = torch.ones(1, 2, requires_grad=True)
        made = model(given)
        # What comes in goes on as it is: no node of torch's between it and the layer.
        assert [one is given for one in seen] == [True]
        assert "RegisterPostBackward" not in str(_nodes(made))
        group.gather()
        assert group.is_unsharded
        model.reshard()
        assert not group.is_unsharded
        group.forget_gather()
        assert all(one.sharded.grad is not None for one in group.members)


@leans_on(
    f"{_FSDP}._fsdp_common.TrainingState",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup:comm_ctx.post_forward_order",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup:_post_forward_indices",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup:_training_state",
    f"{_FSDP}._fsdp_state.FSDPState:_training_state",
    f"{_FSDP}._fsdp_state.FSDPState:_state_ctx.iter_forward_root",
)
def test_a_forward_pass_without_a_way_back_is_forgotten() -> None:
    from paceline.compat import fsdp

    sent: list[str] = []

    class Gather(fsdp.AllGather):
        def __init__(self, name: str) -> None:
            self.name = name

        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
            sent.append(self.name)

    def passed() -> list[str]:
        """Go forward and back, and return the layers that were gathered and those that were left, in that order."""
        sent.clear()
        model(torch.ones(1, 2)).sum().backward()
        return list(sent)

    def noted(name: str, group: fsdp.Group) -> None:
        def leave() -> None:
            sent.append(f"left {name}")
            original()

        original = group.replace("post_backward", leave)

    def forget() -> None:
        for group in groups:
            group.forget_forward()
        for layer in model:
            layer.reshard()  # type: ignore[operator]

    with as_if_two() as world:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for name, module in (*model.named_children(), ("", model)):
            sharded = fully_shard(module, mesh=_mesh(world))
            sharded.set_custom_all_gather(Gather(name))
        groups = [group for layer in model for group in fsdp.groups_of(layer)]
        fsdp.find_root(model)
        for name, group in zip("01", groups, strict=True):
            noted(name, group)
        given = torch.ones(1, 2, requires_grad=True)
        alone = passed()
        model(given)
        assert passed() != alone, "torch forgets it by itself now"
        model(given)
        forget()
        assert passed() == alone
        handle = model[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with suppress(ZeroDivisionError):
            model(given)
        handle.remove()
        forget()
        assert not groups[1].is_unsharded
        assert passed() == alone


@leans_on(
    f"{_FSDP}._fsdp_param.ShardedState",
    f"{_FSDP}._fsdp_param.FSDPParam:_orig_size",
    f"{_FSDP}._fsdp_param.FSDPParam:_param_fqn",
    f"{_FSDP}._fsdp_param.FSDPParam:_unsharded_param",
    f"{_FSDP}._fsdp_param.FSDPParam:_sharded_post_forward_param",
    f"{_FSDP}._fsdp_param.FSDPParam:_module_info",
    f"{_FSDP}._fsdp_param.FSDPParam._setattr_on_modules",
)
def test_the_record_of_a_sharded_parameter() -> None:
    from paceline.compat import fsdp

    with alone() as world:
        model = _sharded(world)
        (group,) = fsdp.groups_of(model)
        fsdp.find_root(model)
        weight, bias = group.members
        assert (weight.name, bias.name) == ("weight", "bias")
        assert (weight.whole_size, weight.sharded_size, weight.padded_count) == ((2, 2), (2, 2), 4)
        assert weight.places() == [(model, "weight")]
        assert weight.sharded is weight.in_use is model.weight
        assert weight.gathered is None
        assert [one.numel() for one in weight.message] == [4]
        seen: list[bool] = []
        weight.before_replacing(lambda: seen.append(weight.in_use is model.weight))
        group.gather()
        assert weight.in_use is weight.gathered is model.weight
        group.forget_gather()
        model.reshard()  # type: ignore[operator]
        assert weight.sharded is model.weight
        assert seen == [True, True]


@leans_on(
    "torch.distributed._composable.contract.REGISTRY_KEY",
    "torch.distributed._composable.contract.STATE_KEY",
    "torch.distributed._composable_state._module_state_mapping",
    f"{_FSDP}._fsdp_param.FSDPParam:_post_load_hook_handle",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup:_module_to_pre_save_state_dict_hook_handle",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup:_module_to_pre_load_state_dict_hook_handle",
    f"{_FSDP}._fsdp_state.FSDPState:_pre_forward_hook_handle",
    f"{_FSDP}._fsdp_state.FSDPState:_post_forward_hook_handle",
)
def test_a_sharded_module_becomes_plain_again() -> None:
    from paceline.compat import fsdp, modules

    with alone() as world:
        plain, model = nn.Linear(2, 2), _sharded(world)
        fsdp.strip(model)
        assert type(model) is nn.Linear
        flags = {"_fsdp_use_orig_params", "_is_fsdp_managed_module"}  # which `fully_shard` sets again
        assert vars(model).keys() - flags == vars(plain).keys()
        assert not any(vars(model)[table] for table in modules.HOOK_TABLES)
        assert not any(value for key, value in vars(model).items() if "state_dict" in key)
        assert type(fully_shard(model, mesh=_mesh(world))).__name__ == "FSDPLinear"


@leans_on("torch.nn.Parameter:_fsdp_orig_uid")
def test_what_is_noted_on_a_sharded_parameter() -> None:
    from paceline.compat import fsdp

    with alone() as world:
        layer = nn.Linear(2, 2)
        weight = layer.weight
        vars(weight)["rate"] = 3
        fully_shard(layer, mesh=_mesh(world))
        assert fsdp.notes_on(weight) == {"rate": 3}


def _mesh(world: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(world, "cpu", mesh_dim_names=("rows",))


def _sharded(world: dist.ProcessGroup) -> nn.Linear:
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=_mesh(world))
    return model
