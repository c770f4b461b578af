"""Process groups and work handles that are written in Python: the names by which torch 2.11 and 2.13 call into them.

torch 2.13 renamed four operations and calls the new names from Python and the old or new ones from C++; 2.11 knows only the
old names. Whoever inherits from `PythonProcessGroup` writes each operation once, under the name of 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.futures import Future

Work = distributed_c10d.Work
"""The base of `PythonWork`, under the name that 2.11 and 2.13 both have it."""


class PythonWork(Work):
    """An operation in flight whose every question is answered in Python."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True when the operation is done, or raise what went wrong; no `timeout` means the group's own."""
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Return whether the operation has ended, well or not."""
        raise NotImplementedError

    def get_future(self) -> Future[Any]:
        """Return torch's future of the resulting tensors."""
        raise NotImplementedError

    def source_rank(self) -> int:
        """Return the rank that a message came from."""
        raise NotImplementedError

    def _source_rank(self) -> int:
        return self.source_rank()


class PythonProcessGroup(dist.ProcessGroup):
    """A process group of one backend that carries tensors of every device."""

    backend_name = ""
    """The name that the backend is registered under."""

    def __init__(self, rank: int, size: int) -> None:
        # Without a store: this constructor alone makes a group that Python's methods may override.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._coalesced: list[Work] | None = None
        self._name = self._description = ""

    @property
    def group_name(self) -> distributed_c10d.GroupName:
        """The name that torch gave this group; the C++ half keeps names with backends in C++ alone."""
        return distributed_c10d.GroupName(self._name)

    @property
    def group_desc(self) -> str:
        """What torch says the group is for."""
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    def getBackendName(self) -> str:  # noqa: N802  (torch's spelling)
        """Return the name that the backend is registered under."""
        return self.backend_name

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:  # noqa: A002
        """Gather everybody's tensor into one."""
        raise NotImplementedError

    def all_gather_single_coalesced(
        self,
        output_lists: list[Tensor],
        input_list: list[Tensor],
        opts: Any = None,
    ) -> Work:
        """Gather several tensors."""
        raise NotImplementedError

    def reduce_scatter_single(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> Work:  # noqa: N803
        """Combine everybody's tensor and keep this rank's part."""
        raise NotImplementedError

    def reduce_scatter_single_coalesced(
        self,
        outputTensors: list[Tensor],  # noqa: N803
        inputTensors: list[Tensor],  # noqa: N803
        opts: Any = None,
    ) -> Work:
        """Combine several tensors and keep this rank's parts."""
        raise NotImplementedError

    def all_to_all_single(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Send each rank its part of one tensor."""
        raise NotImplementedError

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long an operation may take."""
        raise NotImplementedError

    def together(self, works: Sequence[Work]) -> Work:
        """Return one handle for several operations in flight."""
        raise NotImplementedError

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:  # noqa: A002
        return self.all_gather_single(output, input, opts)

    def allgather_into_tensor_coalesced(
        self, output_lists: list[Tensor], input_list: list[Tensor], opts: Any = None
    ) -> Work:
        """Gather several tensors: the name of 2.11."""
        return self.all_gather_single_coalesced(output_lists, input_list, opts)

    def _reduce_scatter_base(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> Work:  # noqa: N803
        return self.reduce_scatter_single(outputTensor, inputTensor, opts)

    def reduce_scatter_tensor_coalesced(
        self,
        outputTensors: list[Tensor],  # noqa: N803
        inputTensors: list[Tensor],  # noqa: N803
        opts: Any = None,
    ) -> Work:
        """Combine several tensors and keep this rank's parts: the name of 2.11."""
        return self.reduce_scatter_single_coalesced(outputTensors, inputTensors, opts)

    def alltoall_base(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Send each rank its part of one tensor: the name of 2.11."""
        return self.all_to_all_single(
            output_tensor, input_tensor, output_split_sizes, input_split_sizes, opts
        )

    def _start_coalescing(self, device: Any) -> None:  # noqa: ARG002
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Work:  # noqa: ARG002
        works, self._coalesced = self._coalesced or [], None
        return self.together(works)

    def handed_out(self, work: Work) -> Work:
        """Return a handle to the caller, noted where torch coalesces what is started now."""
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


def register(name: str, make: Any, devices: list[str]) -> None:
    """Make torch know a backend; `make(options, _)` is called for each group, with its ranks among `options`."""
    if name.upper() not in distributed_c10d.Backend._plugins:
        dist.Backend.register_backend(name, make, extended_api=True, devices=devices)


def premul_factor(op: Any) -> float | Tensor | None:
    """Return what ReduceOp.PREMUL_SUM multiplies with before it adds; None for every other operation."""
    made: Any = dist.ReduceOp(op) if isinstance(op, dist.ReduceOp.RedOpType) else op
    factor: float | Tensor | None = made.__getstate__()[1]
    return factor
