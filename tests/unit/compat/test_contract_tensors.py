"""Contracts on tensors, autograd and operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.unit.compat.contracts import leans_on


@leans_on("torch.autograd.graph._engine_run_backward")
def test_the_engine_runs_from_given_starts() -> None:
    from paceline.compat.autograd import run_engine

    leaf = torch.ones(2, requires_grad=True)
    options = {"allow_unreachable": True, "accumulate_grad": False}
    (found,) = run_engine((leaf * 3,), (torch.ones(2),), False, False, (leaf,), **options)
    assert found.tolist() == [3, 3]
    assert leaf.grad is None
    run_engine((leaf * 3,), (torch.ones(2),), False, False, (), **{**options, "accumulate_grad": True})
    assert leaf.grad is not None


@leans_on("torch.autograd._engine_run_backward")
def test_passes_that_are_asked_for_tensors_can_be_watched() -> None:
    from paceline.compat.autograd import watch_passes

    seen = []

    def watch(run: Callable[[], Any], inputs: tuple[Any, ...], accumulates: bool) -> Any:
        seen.append((inputs, accumulates))
        return run()

    leaf = torch.ones(2, requires_grad=True)
    before = vars(torch.autograd)["_engine_run_backward"]
    end = watch_passes(watch)
    leaf.sum().backward()
    leaf.sum().backward(inputs=[leaf])
    (found,) = torch.autograd.grad(leaf.sum(), leaf)
    end()
    torch.autograd.grad(leaf.sum(), leaf)
    assert seen == [((leaf,), True), ((leaf,), False)]
    assert leaf.grad is not None
    assert (leaf.grad.tolist(), found.tolist()) == ([2, 2], [1, 1])
    assert vars(torch.autograd)["_engine_run_backward"] is before


@leans_on("torch._C._current_graph_task_id", "torch._C._current_autograd_node")
def test_a_backward_pass_has_a_number_and_a_node() -> None:
    from paceline.compat import autograd

    seen = []
    leaf = torch.ones(1, requires_grad=True)
    made = leaf * 2
    made.register_hook(lambda _: seen.append((autograd.graph_task(), autograd.current_node())))
    assert (autograd.graph_task(), autograd.current_node()) == (-1, None)
    made.backward()
    assert seen[0][0] >= 0
    assert seen[0][1] is not None


@leans_on("torch.autograd.graph.Node:_saved_other", "torch.autograd.graph.Node:_saved_self")
def test_a_node_keeps_its_operands() -> None:
    from paceline.compat.autograd import saved

    leaf = torch.ones(1, requires_grad=True)
    assert saved((leaf / 4).grad_fn, "other").item() == 4
    assert saved((leaf * torch.tensor(2.0)).grad_fn, "other").item() == 2
    assert saved((torch.tensor(2.0) * leaf).grad_fn, "self").item() == 2
    assert saved(leaf.sum().grad_fn, "other") is None


@leans_on("torch.autograd.graph.Node:_raw_saved_", "torch._C._autograd.SavedTensor.unpack_hook")
def test_a_node_shows_all_that_it_keeps_and_unpacks_none_of_it() -> None:
    from paceline.compat.autograd import all_saved

    leaf, factor = torch.ones(2, requires_grad=True), torch.full((2,), 2.0)
    made = leaf * factor
    factor.mul_(2)  # unpacked, it would be refused
    assert [one is factor for one in all_saved([made.grad_fn])[0]] == [True]
    ((place,), hooked, _) = all_saved([leaf[torch.tensor([1])].grad_fn])
    assert (place.item(), hooked) == (1, False)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one.clone(), lambda _: 1 / 0):
        made = leaf.exp()
    assert all_saved([made.grad_fn])[:2] == ([], True)
    several = torch.nn.functional.layer_norm(leaf.exp() * leaf[torch.tensor([0, 1])], (2,))
    assert len(all_saved([several.grad_fn, None])[0]) == 7
    squares = leaf.square().sum()
    squares.backward()
    assert all_saved([squares.grad_fn.next_functions[0][0]])[:2] == ([], False)


@leans_on("torch._C._storage_Use_Count", "torch.UntypedStorage:_cdata")
def test_holders_of_memory_are_counted() -> None:
    from paceline.compat.storage import holders

    tensor = torch.zeros(2)
    before = holders(tensor)
    view = tensor[:1]
    assert holders(tensor) != before
    del view
    assert holders(tensor) == before


@leans_on("torch.UntypedStorage:resizable")
def test_memory_that_numpy_may_write_to_cannot_be_resized() -> None:
    seen = torch.zeros(2)
    seen.numpy()
    given = [torch.from_numpy(np.zeros(2)), torch.frombuffer(bytearray(8), dtype=torch.float32), seen]
    assert not any(one.untyped_storage().resizable() for one in given)
    own = [torch.zeros(2), torch.stack(given[1:]), torch.tensor(np.zeros(2)), given[0].clone()]
    assert all(one.untyped_storage().resizable() for one in own)


@leans_on("torch.autograd.graph.Node:_saved_reduction")
def test_a_loss_keeps_its_reduction() -> None:
    from paceline.compat.autograd import saved

    leaf = torch.rand(3, requires_grad=True)
    found = {
        kind: saved(nn.functional.mse_loss(leaf, torch.ones(3), reduction=kind).grad_fn, "reduction")
        for kind in ("mean", "sum")
    }
    assert found == {"mean": 1, "sum": 2}


@leans_on("torch.Tensor._version")
def test_writes_are_counted() -> None:
    from paceline.compat.tensors import write_count

    one = torch.ones(1)
    before = write_count(one)
    one.add_(1)
    one.data.add_(1)
    assert write_count(one) == before + 1


@leans_on("torch._has_compatible_shallow_copy_type")
def test_data_of_a_tensor_becomes_that_of_one_of_its_kind() -> None:
    from paceline.compat.tensors import has_compatible_memory

    one = torch.ones(1)
    assert has_compatible_memory(one, one.double())
    assert not has_compatible_memory(one, one.to_sparse())


@leans_on("torch.Tensor._backward_hooks", "torch.Tensor._post_accumulate_grad_hooks")
def test_hooks_of_a_tensor_are_seen_and_shared() -> None:
    from paceline.compat import tensors

    one, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    assert not tensors.hooks_of(one)
    assert not tensors.post_accumulate_hooks_of(one)
    one.register_hook(lambda gradient: gradient * 5)
    tensors.share_hooks(one, other)
    other.sum().backward()
    assert other.grad is not None
    assert other.grad.item() == 5
    one.register_post_accumulate_grad_hook(lambda _: None)
    assert tensors.hooks_of(one)
    assert tensors.post_accumulate_hooks_of(one)


@leans_on("torch.UntypedStorage._cdata")
def test_a_storage_has_a_key_of_its_own() -> None:
    from paceline.compat.tensors import storage_key

    one, other = torch.ones(2), torch.ones(2, device="meta")
    assert storage_key(one.untyped_storage()) == storage_key(one[1:].untyped_storage())
    assert storage_key(other.untyped_storage()) != storage_key(one.untyped_storage())


@leans_on("torch.Tensor._make_wrapper_subclass", "torch._C.DisableTorchFunctionSubclass")
def test_a_subclass_has_no_memory_and_can_be_passed_by() -> None:
    from paceline.compat.tensors import make_wrapper, no_torch_function

    class Refusing(Tensor):
        @classmethod
        def __torch_function__(cls, *_: object) -> Tensor:  # type: ignore[override]
            raise RuntimeError("asked")

        __torch_dispatch__ = __torch_function__  # type: ignore[assignment]

    made = make_wrapper(Refusing, torch.Size([3]), dtype=torch.float64, device=torch.device("cpu"))
    with no_torch_function():
        assert (made.shape, made.dtype) == (torch.Size([3]), torch.float64)
    try:
        made.dtype  # noqa: B018
    except RuntimeError:
        return
    raise AssertionError("its class was not asked")


@leans_on("torch.Tensor._indices", "torch.Tensor._values")
def test_parts_of_a_sparse_tensor_that_is_not_coalesced() -> None:
    from paceline.compat.tensors import sparse_parts

    torch.sparse.check_sparse_tensor_invariants.disable()  # else torch 2.11 warns of what it does anyway
    indices, values = sparse_parts(
        torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (3,), check_invariants=False)
    )
    assert (indices.tolist(), values.tolist()) == ([[1, 1]], [2, 3])


@leans_on("torch._foreach_zero_")
def test_zero_grad_zeroes_gradients_as_one_list() -> None:
    from paceline.compat import foreach

    model, seen = nn.Linear(2, 2), list[Any]()

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **kwargs or {})

    for one in model.parameters():
        one.grad = torch.ones_like(one)
    with Watched():
        torch.optim.SGD(model.parameters(), lr=1.0, foreach=True).zero_grad(set_to_none=False)
    assert foreach.zero_ in seen
    assert all(one.grad is not None and not one.grad.any() for one in model.parameters())


@leans_on("torch._foreach_add_", "torch._foreach_mul_", "torch._foreach_copy_", "torch._foreach_norm")
def test_operations_on_lists() -> None:
    from paceline.compat import foreach

    held = [torch.ones(2), torch.ones(3)]
    foreach.add_(held, [torch.ones(2), torch.ones(3)], alpha=2.0)
    foreach.mul_(held, 2.0)
    foreach.mul_(held, torch.tensor(0.5))
    assert [one.tolist() for one in held] == [[3, 3], [3, 3, 3]]
    assert all(map(torch.equal, foreach.norm(held), map(torch.linalg.vector_norm, held)))
    foreach.copy_(held, [torch.zeros(2), torch.zeros(3)], non_blocking=True)
    assert not any(one.any() for one in held)


@leans_on("torch._chunk_cat")
def test_chunks_lie_side_by_side() -> None:
    from paceline.compat.foreach import chunk_cat

    made = torch.full((2, 3), 9.0)
    chunk_cat([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0])], 0, 2, out=made)
    assert made.tolist() == [[1, 2, 4], [3, 0, 0]]


@leans_on("torch.utils._foreach_utils._group_tensors_by_device_and_dtype")
def test_types_are_grouped() -> None:
    from paceline.compat.foreach import order_by_type

    groups = order_by_type([torch.float32, torch.float64, torch.float32])
    assert sorted(groups) == [[0, 2], [1]]


@leans_on(
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_iter",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_map_only",
)
def test_nests() -> None:
    from paceline.compat import pytree

    nest = {"a": [1, (2, None)], "b": 3.0}
    leaves, spec = pytree.tree_flatten(nest)
    assert leaves == pytree.tree_leaves(nest) == list(pytree.tree_iter(nest)) == [1, 2, None, 3.0]
    assert spec == pytree.tree_flatten({"a": [4, (5, None)], "b": 6})[1]
    assert pytree.tree_map(str, nest) == {"a": ["1", ("2", "None")], "b": "3.0"}
    assert pytree.tree_map_only(float, str, nest) == {"a": [1, (2, None)], "b": "3.0"}
    assert pytree.tree_map(type, [(1, 2)], is_leaf=lambda one: isinstance(one, tuple)) == [tuple]


@leans_on(
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._python_dispatch._get_current_dispatch_mode",
    "torch._ops.OpOverload:_schema",
)
def test_a_mode_sees_operators_and_what_they_say_of_themselves() -> None:
    from paceline.compat import dispatch

    seen = []

    class Mode(dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    one = torch.ones(1)
    with Mode() as mode:
        assert dispatch.current_mode() is mode
        one.copy_(one)
        with dispatch.no_modes():
            one.mul_(2)
    assert dispatch.current_mode() is None
    assert [dispatch.name_of(func) for func in seen] == ["aten::copy_"]
    first, second, *_ = dispatch.arguments_of(seen[0])
    assert (first.name, first.alias_info.is_write, second.name) == ("self", True, "src")
    assert second.alias_info is None


@leans_on("torch.utils._python_dispatch.is_traceable_wrapper_subclass")
def test_a_plain_tensor_wraps_nothing() -> None:
    from paceline.compat.dispatch import is_traceable_wrapper_subclass

    assert not is_traceable_wrapper_subclass(torch.ones(1))


@leans_on(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._functorch.get_interpreter_stack",
    "torch._C._functorch.TransformType",
)
def test_inside_of_a_transformed_function() -> None:
    from paceline.compat.dispatch import is_differentiated, is_transformed

    seen = []

    def square(value: Tensor) -> Tensor:
        seen.append((is_transformed(value), is_differentiated()))
        return value * value

    square(torch.ones(()))
    torch.func.vmap(square)(torch.ones(2))
    torch.func.grad(square)(torch.ones(()))
    assert seen == [(False, False), (True, False), (True, True)]


@leans_on("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu")
def test_attention_ends_in_a_named_operator() -> None:
    from paceline.compat import dispatch

    seen = []

    class Mode(dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(dispatch.name_of(func).removeprefix("aten::"))
            return func(*args, **(kwargs or {}))

    value = torch.rand(1, 2, 4, 8)
    with Mode():
        nn.functional.scaled_dot_product_attention(value, value, value)
    assert set(seen) & set(dispatch.ATTENTION)


@leans_on(
    "torch.ops.aten._scaled_dot_product_flash_attention",
    "torch.ops.aten._scaled_dot_product_efficient_attention",
    "torch.ops.aten._scaled_dot_product_cudnn_attention",
)
def test_attention_of_gpus_has_operators() -> None:
    from paceline.compat.dispatch import ATTENTION

    assert all(hasattr(torch.ops.aten, name) for name in ATTENTION)


@leans_on("torch.ops.aten._scaled_dot_product_cudnn_attention")
def test_attention_of_cudnn_takes_and_returns_what_we_think() -> None:
    taken = torch.ops.aten._scaled_dot_product_cudnn_attention.default._schema
    assert [one.name for one in taken.arguments] == [
        *("query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal"),
        *("return_debug_mask", "scale"),
    ]
    assert [one.name for one in taken.returns][:2] == ["output", "logsumexp"]


@leans_on("torch._subclasses.fake_tensor.FakeTensor", "torch._subclasses.fake_tensor.FakeTensorMode")
def test_a_fake_tensor_has_a_shape_and_no_memory() -> None:
    from paceline.compat.fake_tensors import FakeTensor, FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        made = torch.empty(10**9, 2) @ torch.empty(2, 10**9)
    assert isinstance(made, FakeTensor)
    assert made.shape == (10**9, 10**9)


@leans_on("json.encoder.c_make_encoder")
def test_json_is_written_as_the_encoder_of_the_library_writes_it() -> None:
    import json

    from paceline.compat.json_text import encode

    value = [None, True, -1.5, float("inf"), 2**70, 'a "b" \u00e9\n', {"T": ["float", [10], 0]}, []]
    assert encode(value) == json.dumps(value, separators=(",", ":")).encode()
    try:
        encode([object()])
    except TypeError:
        return
    raise AssertionError("it writes what JSON does not know")
