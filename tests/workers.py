"""Runs a function in real worker processes on gloo and gives the results by rank."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch.distributed import TCPStore

from paceline.world import Identity, connect

_HOST = "127.0.0.1"
_LIMIT_S = 60.0


def run_workers(
    function: Callable[..., Any], workers: int, *args: Any, checked: bool = False, **kwargs: Any
) -> list[Any]:
    """Call the module-level `function(world, *args, **kwargs)` in each worker; raise what fails there."""
    context = multiprocessing.get_context("forkserver")
    # The first DDP in a process imports torch._dynamo, which takes seconds: once is enough.
    context.set_forkserver_preload(["torch", "torch._dynamo", "paceline.world.join"])
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    ends, processes = [], []
    for rank in range(workers):
        here, there = context.Pipe(duplex=False)
        job = (there, rank, workers, store.port, checked, function, args, kwargs)
        process = context.Process(target=_work, args=job, daemon=True)
        process.start()
        there.close()
        ends.append(here)
        processes.append(process)
    grace_s = 0.0
    try:
        results = _collect(ends)
        grace_s = 5.0
        return results
    finally:
        for process in processes:
            process.join(grace_s)
            process.kill()
            process.join()
            process.close()
        for end in ends:
            end.close()


def _collect(ends: list[Connection]) -> list[Any]:
    """Wait for every rank's answer; the first failure ends the waiting."""
    results: dict[int, Any] = {}
    waiting = {id(end): rank for rank, end in enumerate(ends)}
    while len(results) < len(ends):
        ready = wait([end for end in ends if id(end) in waiting], timeout=_LIMIT_S)
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} gave no answer in {_LIMIT_S:.0f} s")
        for end in ready:
            rank = waiting.pop(id(end))
            try:
                failed, value = pickle.loads(end.recv_bytes())  # noqa: S301 - from our own worker
            except EOFError:
                raise RuntimeError(f"rank {rank} died without a word") from None
            if failed:
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(ends))]


def _work(
    end: Connection,
    rank: int,
    workers: int,
    port: int,
    checked: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    torch.set_num_threads(1)
    try:
        identity = Identity(rank=rank, size=workers, local_rank=rank, local_size=workers)
        store = TCPStore(_HOST, port, is_master=False)
        world = connect(identity, store=store, device="cpu", timeout_s=20.0, checked=checked)
        result = (False, function(world, *args, **kwargs))
        world.close()
    except BaseException:  # noqa: BLE001 - the test raises it
        result = (True, traceback.format_exc())
    # Plain pickle copies tensors; the Connection's own would share memory that ends with this process.
    end.send_bytes(pickle.dumps(result))
    end.close()
