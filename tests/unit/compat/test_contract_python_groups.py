"""Contracts on process groups that are written in Python: which of their methods torch calls, from Python and from C++."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.compat import process_groups, python_process_group
from paceline.compat.python_process_group import PythonProcessGroup, PythonWork
from tests.unit.compat.contracts import leans_on

_GROUPS = "torch.distributed.distributed_c10d"
_NAME = "paceline_contract"


class Done(PythonWork):
    """An operation that was over when it began."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._tensors)
        return future

    def source_rank(self) -> int:
        return 0


class Alone(PythonProcessGroup):
    """A group of one, which notes what it was called by."""

    backend_name = _NAME

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.calls: list[str] = []

    def _done(self, name: str, outputs: Any, inputs: Any) -> Done:
        self.calls.append(name)
        for output, value in zip(outputs, inputs, strict=True):
            output.detach().copy_(value.view_as(output))
        return Done(list(outputs))

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self.handed_out(self._done("allreduce", tensors, tensors))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self._done("broadcast", tensors, tensors)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        return self._done("allgather", output_tensors[0], input_tensors)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:  # noqa: A002
        return self._done("all_gather_single", [output], [input])

    def all_gather_single_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        return self._done("all_gather_single_coalesced", output_lists, input_list)

    def reduce_scatter_single(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> Any:  # noqa: N803
        return self._done("reduce_scatter_single", [outputTensor], [inputTensor])

    def reduce_scatter_single_coalesced(self, outputTensors: Any, inputTensors: Any, opts: Any = None) -> Any:  # noqa: N803
        return self._done("reduce_scatter_single_coalesced", outputTensors, inputTensors)

    def all_to_all_single(
        self,
        output_tensor: Any,
        input_tensor: Any,
        output_split_sizes: Any,
        input_split_sizes: Any,
        opts: Any = None,
    ) -> Any:
        return self._done("all_to_all_single", [output_tensor], [input_tensor])

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        return self._done("recv_anysource", tensors, tensors)

    def together(self, works: Any) -> Any:
        self.calls.append(f"together {len(works)}")
        return Done([])


def _formed() -> Alone:
    python_process_group.register(_NAME, lambda options, _: Alone(), ["cpu"])
    dist.init_process_group(_NAME, store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert isinstance(group, Alone)
    return group


@leans_on(
    f"{_GROUPS}.Backend._plugins",
    "torch.distributed.ProcessGroup._set_group_name",
    "torch.distributed.ProcessGroup._set_group_desc",
    "torch.distributed.ProcessGroup._start_coalescing",
    "torch.distributed.ProcessGroup._end_coalescing",
    "torch.distributed.ProcessGroup._allgather_base",
    "torch.distributed.ProcessGroup._reduce_scatter_base",
    f"{_GROUPS}._coalescing_manager",
    f"{_GROUPS}.Work._source_rank",
)
def test_torch_calls_a_group_in_python_by_one_name_or_the_other() -> None:
    group = _formed()
    try:
        assert (group.name(), group.group_name, dist.get_backend()) == (_NAME, "0", _NAME)
        one, other = torch.ones(3), torch.empty(3)
        process_groups.all_gather_single(other, one)
        process_groups.reduce_scatter_single(other, one)
        dist.all_to_all_single(other, one)
        assert dist.irecv(other)._source_rank() == 0
        with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu")):
            dist.all_reduce(one)
    finally:
        dist.destroy_process_group()
    assert group.calls[:4] == [
        "all_gather_single",
        "reduce_scatter_single",
        "all_to_all_single",
        "recv_anysource",
    ]
    assert group.calls[-1].startswith("together")


@leans_on("torch.distributed._functional_collectives", f"{_GROUPS}.Work.get_future")
def test_torch_calls_a_group_in_python_from_its_own_engines() -> None:
    from torch.distributed import _functional_collectives as functional

    group = _formed()
    try:
        model = DistributedDataParallel(nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        assert {"broadcast", "allgather", "allreduce"} <= set(group.calls)
        group.calls.clear()
        # 2.13 renamed these two, and warns.
        gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
        scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
        for made in (
            gather(torch.ones(3), 0, group),
            scatter(torch.ones(3), "sum", 0, group),
            functional.all_to_all_single(torch.ones(3), None, None, group),
        ):
            assert torch.equal(functional.wait_tensor(made), torch.ones(3))
    finally:
        dist.destroy_process_group()
    assert group.calls == [
        "all_gather_single_coalesced",
        "reduce_scatter_single_coalesced",
        "all_to_all_single",
    ]


@leans_on("torch.distributed._make_nccl_premul_sum")
def test_what_a_sum_is_multiplied_with_is_told() -> None:
    assert python_process_group.premul_factor(dist._make_nccl_premul_sum(0.5)) == 0.5
    assert python_process_group.premul_factor(dist.AllreduceOptions().reduceOp) is None
    assert python_process_group.premul_factor(dist.ReduceOp.SUM) is None
