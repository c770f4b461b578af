"""`MpiProcessGroup`: torch's process group on two communicators of MPI.

Operations start at once, in the order of the calls, and end beside the training (`progress.py`). Ranks of the group of all
workers are those of MPI_COMM_WORLD; any other group is made by its members alone.
"""

from __future__ import annotations

import functools
import zlib
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from paceline.compat import python_process_group
from paceline.compat.python_process_group import PythonProcessGroup, PythonWork, Work
from paceline.errors import InputError
from paceline.world.mpi import library, operations
from paceline.world.mpi.operations import Comms
from paceline.world.mpi.progress import MpiError, Operation, OperationsInFlight, Steps
from paceline.world.mpi.reductions import MpiReduction, choose

NAME = "mpi4py"
"""The backend's name in torch, which has an `mpi` of its own that no wheel brings."""


@functools.lru_cache(maxsize=1)
def progress() -> OperationsInFlight:
    """Return what drives this process's operations."""
    made = OperationsInFlight()
    library.before_leaving(made.close)
    return made


class MpiWork(PythonWork):
    """Operations in flight; all but coalesced ones are one."""

    def __init__(self, several: Sequence[Operation], came_from: list[int] | None = None) -> None:
        super().__init__()
        self.operations = several
        self._came_from = came_from

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True when they are done, or raise what went wrong."""
        for one in self.operations:
            if timeout and timeout.total_seconds() > 0:
                one.limit(timeout.total_seconds())
            progress().wait(one)
            if one.error is not None:
                raise one.error
        return True

    def is_completed(self) -> bool:
        """Return whether they have ended."""
        return all(progress().has_ended(one) for one in self.operations)

    def is_success(self) -> bool:
        """Return whether they have ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return what went wrong."""
        return next((one.error for one in self.operations if one.error is not None), None)

    def result(self) -> list[Tensor]:
        """Return the tensors that they wrote."""
        return [tensor for one in self.operations for tensor in one.results]

    def synchronize(self) -> None:
        """Wait: what is done is done for every stream."""
        self.wait()

    def get_future(self) -> Future[Any]:
        """Return torch's future of the tensors."""
        if len(self.operations) == 1:
            return self.operations[0].future()
        futures = [one.future() for one in self.operations]
        results = self.result()
        return torch.futures.collect_all(futures).then(lambda all_of_them: _checked(all_of_them, results))

    def source_rank(self) -> int:
        """Return the rank that a message came from."""
        if not self._came_from:
            raise MpiError("only a message that has come has a source rank. Wait for it first.")
        return self._came_from[0]


def _checked(collected: Future[list[Future[Any]]], results: list[Tensor]) -> list[Tensor]:
    for one in collected.value():
        one.value()  # raises what went wrong
    return results


class MpiProcessGroup(PythonProcessGroup):
    """A group of ranks of MPI."""

    backend_name = NAME

    def __init__(self, comms: Comms, timeout: timedelta) -> None:
        super().__init__(comms.rank, comms.size)
        self._comms = comms
        self._timeout_s = timeout.total_seconds()
        self._turns: deque[Operation] = deque()
        self._mine: set[Operation] = set()
        self._closed = False

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long an operation may take."""
        self._timeout_s = timeout.total_seconds()

    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        """Broadcast the root's tensor."""
        values = _listed(tensors)
        root = _root(opts)
        return self._start(
            "broadcast", (operations.broadcast(self._comms, one, root) for one in values), values, opts
        )

    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        """Combine everybody's tensors, for everybody."""
        values = _listed(tensors)
        ways = [_reduction(opts, one) for one in values]
        each = (operations.all_reduce(self._comms, one, way) for one, way in zip(values, ways, strict=True))
        return self._start(
            "all_reduce", each, values, opts, steps=1 if all(way.by_mpi for way in ways) else 2
        )

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        """Combine several tensors."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, *_: Any) -> Work:
        """Combine everybody's tensor at the root: a part of `opts`, or given in its place and followed by `op`."""
        (value,) = _listed(tensors)
        way = _reduction(opts if op is None else op, value)
        steps = operations.reduce(self._comms, value, way, _root(opts))
        return self._start("reduce", [steps], [value], opts)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Gather all tensors on every rank."""
        (value,) = _listed(input_tensors)
        outputs = _nested(output_tensors)
        return self._start("all_gather", [operations.all_gather(self._comms, outputs, value)], outputs, opts)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> Work:
        """Gather several tensors; there is one list of outputs for each rank."""
        each = (
            operations.all_gather(self._comms, outputs, value)
            for outputs, value in zip(zip(*output_lists, strict=True), input_list, strict=True)
        )
        return self._start("all_gather", each, [one for outputs in output_lists for one in outputs], opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:  # noqa: A002
        """Gather everybody's tensor into one."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, output_lists: list[Tensor], input_list: list[Tensor], opts: Any = None
    ) -> Work:
        """Gather several tensors."""
        each = (
            operations.all_gather_single(self._comms, output, value)
            for output, value in zip(output_lists, input_list, strict=True)
        )
        return self._start("all_gather", each, list(output_lists), opts)

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, *_: Any) -> Work:
        """Collect everybody's tensor at the root."""
        (value,) = _listed(input_tensors)
        outputs = _nested(output_tensors)
        root = _root(opts)
        if self._comms.rank == root and len(outputs) != self._comms.size:
            raise InputError(f"gather on {self._comms.size} ranks needs as many outputs, not {len(outputs)}.")
        return self._start("gather", [operations.gather(self._comms, outputs, value, root)], outputs, opts)

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None, *_: Any) -> Work:
        """Scatter to each rank one of the root's tensors."""
        (output,) = _listed(output_tensors)
        values = _nested(input_tensors)
        root = _root(opts)
        if self._comms.rank == root and len(values) != self._comms.size:
            raise InputError(f"scatter on {self._comms.size} ranks needs as many tensors, not {len(values)}.")
        return self._start("scatter", [operations.scatter(self._comms, output, values, root)], [output], opts)

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None, *_: Any) -> Work:
        """Combine the lists item by item and keep this rank's."""
        (output,) = _listed(output_tensors)
        values = _nested(input_tensors)
        steps = operations.reduce_scatter(self._comms, output, values, _reduction(opts, output))
        return self._start("reduce_scatter", [steps], [output], opts)

    def reduce_scatter_single(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> Work:  # noqa: N803
        """Combine everybody's tensor and keep this rank's part."""
        return self.reduce_scatter_single_coalesced([outputTensor], [inputTensor], opts)

    def reduce_scatter_single_coalesced(
        self,
        outputTensors: list[Tensor],  # noqa: N803
        inputTensors: list[Tensor],  # noqa: N803
        opts: Any = None,
    ) -> Work:
        """Combine several tensors and keep this rank's parts."""
        each = [
            operations.reduce_scatter_single(self._comms, output, value, _reduction(opts, output))
            for output, value in zip(outputTensors, inputTensors, strict=True)
        ]
        return self._start("reduce_scatter", each, list(outputTensors), opts)

    def all_to_all_single(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Send each rank its part of one tensor."""
        steps = operations.all_to_all_single(
            self._comms, output_tensor, input_tensor, output_split_sizes or (), input_split_sizes or ()
        )
        return self._start("all_to_all", [steps], [output_tensor], opts)

    def alltoall(self, output_tensor: Any, input_tensor: Any, opts: Any = None) -> Work:
        """Send item i to rank i."""
        outputs = _listed(output_tensor)
        steps = operations.all_to_all(self._comms, outputs, _listed(input_tensor))
        return self._start("all_to_all", [steps], outputs, opts)

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Work:  # noqa: N803
        """Send to one rank."""
        (value,) = _listed(tensors)
        return self._start("send", [operations.send(self._comms, value, dstRank, tag)], [value])

    def recv(self, tensors: Any, srcRank: int | None, tag: int = 0) -> Work:  # noqa: N803
        """Receive from one rank."""
        (value,) = _listed(tensors)
        came_from: list[int] = []
        steps = operations.receive(self._comms, value, srcRank, tag, came_from)
        return self._start("recv", [steps], [value], came_from=came_from)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receive from any rank."""
        return self.recv(tensors, None, tag)

    def barrier(self, opts: Any = None) -> Work:
        """Wait for everybody."""
        return self._start("barrier", [operations.barrier(self._comms)], [], opts)

    def together(self, works: Sequence[Work]) -> Work:
        """Return one handle for several operations in flight."""
        return MpiWork([one for work in works if isinstance(work, MpiWork) for one in work.operations])

    def abort(self) -> None:
        """End everything in flight in this group with an error."""
        self._closed = True
        library.abandon()
        progress().fail(self._mine.__contains__, MpiError("the group was aborted"))

    def shutdown(self) -> None:
        """Release the communicators, once nothing in flight has a step left to start on them; the rest ends by itself."""
        if self._closed:
            return
        self._closed = True
        for one in list(self._turns):
            progress().wait(one)
        if library.is_healthy():
            self._comms.free()

    def _start(
        self,
        name: str,
        several: Any,
        results: list[Tensor],
        opts: Any = None,
        *,
        steps: int = 1,
        came_from: list[int] | None = None,
    ) -> Work:
        if self._closed:
            raise MpiError(f"{name}: this group is closed.")
        given = getattr(opts, "timeout", None)
        limit = given.total_seconds() if given is not None and given.total_seconds() > 0 else self._timeout_s
        each: list[Steps] = list(several)
        made = Operation(
            f"{name} of {self._comms.size} ranks",
            each[0] if len(each) == 1 else operations.together(each),
            results,
            limit,
            self._turns if steps > 1 else None,
        )
        self._mine = {one for one in self._mine if not one.ended} | {made}
        progress().start(made)
        return self.handed_out(MpiWork([made], came_from))


def register() -> str:
    """Make torch know the backend, and return its name there."""
    library.load()
    python_process_group.register(NAME, _make, ["cpu", "cuda"])
    return NAME


def _make(options: Any, _: Any) -> MpiProcessGroup:
    """Make one group; torch calls this on its members alone."""
    mpi = library.load()
    world = mpi.COMM_WORLD
    ranks = list(options.global_ranks_in_group)
    if not ranks:
        if (options.group_rank, options.group_size) != (world.Get_rank(), world.Get_size()):
            raise InputError(
                f"the backend mpi needs ranks that MPI has started: this is rank {options.group_rank} of {options.group_size}, "
                f"and rank {world.Get_rank()} of {world.Get_size()} to MPI. Start it with mpirun -n {options.group_size}, or "
                "choose another one: --backend gloo."
            )
        first = world.Dup()
    else:
        members = world.Get_group().Incl(ranks)
        # Groups that are made at the same time by different threads differ in their names.
        first = world.Create_group(members, zlib.crc32(str(options.group_id).encode()) % 32767)
        members.Free()
    comms = Comms(mpi, first, first.Dup(), first.Get_rank(), first.Get_size())
    return MpiProcessGroup(comms, options.timeout)


def _root(opts: Any) -> int:
    """Return the root, which torch has in its options or gives in their place."""
    return opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)


def _reduction(opts: Any, tensor: Tensor) -> MpiReduction:
    op = getattr(opts, "reduceOp", opts)
    return choose(torch.distributed.ReduceOp.SUM if op is None or isinstance(op, int) else op, tensor.dtype)


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _nested(tensors: Any) -> list[Tensor]:
    """Return the one list in a list of lists, of which there is none where a rank takes no part."""
    given = list(tensors)
    return list(given[0]) if given and not isinstance(given[0], Tensor) else given
