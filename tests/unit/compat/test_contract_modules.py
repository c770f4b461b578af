"""Contracts on modules, optimizers and loaders."""

from __future__ import annotations

import functools
import gc
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.unit.compat.contracts import leans_on


@leans_on("torch.nn.Module:_parameters", "torch.nn.Module:_buffers", "torch.nn.Module:_modules")
def test_tables_of_a_module_are_live() -> None:
    from paceline.compat import modules

    layer, other = nn.BatchNorm1d(2, affine=False), nn.Linear(1, 1)
    whole = nn.Sequential(layer, layer)
    assert modules.parameters_of(layer) == {"weight": None, "bias": None}
    assert [*modules.buffers_of(layer)] == ["running_mean", "running_var", "num_batches_tracked"]
    assert [*modules.children_of(whole).values()] == [layer, layer]
    assert [vars(layer)[name] for name in modules.MEMBERS] == [
        modules.parameters_of(layer),
        modules.buffers_of(layer),
        modules.children_of(layer),
    ]
    modules.children_of(whole)["1"] = other
    modules.parameters_of(other)["bias"] = None
    assert whole[1] is other
    assert other.bias is None


@leans_on("torch.nn.Module:_non_persistent_buffers_set")
def test_buffers_that_are_not_saved() -> None:
    from paceline.compat.modules import unsaved_buffers_of

    layer = nn.Module()
    layer.register_buffer("kept", torch.ones(1))
    layer.register_buffer("left", torch.ones(1), persistent=False)
    assert unsaved_buffers_of(layer) == {"left"}


@leans_on(
    "torch.nn.Module:_forward_hooks",
    "torch.nn.Module:_forward_pre_hooks",
    "torch.nn.Module:_backward_hooks",
    "torch.nn.Module:_backward_pre_hooks",
    "torch.nn.Module:_forward_hooks_with_kwargs",
    "torch.nn.Module:_forward_hooks_always_called",
    "torch.nn.Module:_forward_pre_hooks_with_kwargs",
)
def test_tables_of_hooks() -> None:
    from paceline.compat import modules

    layer = nn.Linear(1, 1)
    assert not modules.is_hooked(layer)
    assert not any(vars(layer)[table] for table in modules.HOOK_TABLES)
    layer.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
    layer.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    layer.register_full_backward_hook(lambda *_: None)
    layer.register_full_backward_pre_hook(lambda *_: None)
    assert modules.is_hooked(layer)
    assert all(len(vars(layer)[table]) == 1 for table in modules.HOOK_TABLES)
    known = {name for name in vars(nn.Module()) if "hooks" in name and "state_dict" not in name}
    assert known == set(modules.HOOK_TABLES)


@leans_on(
    "torch.nn.modules.module._global_forward_pre_hooks",
    "torch.nn.modules.module._global_forward_hooks",
    "torch.nn.modules.module._global_backward_pre_hooks",
    "torch.nn.modules.module._global_backward_hooks",
)
def test_hooks_on_all_modules() -> None:
    from torch.nn.modules import module

    from paceline.compat.modules import hooked_everywhere

    put = (
        module.register_module_forward_pre_hook,
        module.register_module_forward_hook,
        module.register_module_full_backward_pre_hook,
        module.register_module_full_backward_hook,
    )
    before = hooked_everywhere()
    assert not any(before)
    for place, register in enumerate(put):
        handle = register(lambda *_: None)  # type: ignore[operator]
        try:
            assert [number for number, there in enumerate(hooked_everywhere()) if there] == [place]
        finally:
            handle.remove()


@leans_on(
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.modules.batchnorm._NormBase",
    "torch.nn.modules.dropout._DropoutNd",
)
def test_bases_of_layers() -> None:
    from paceline.compat.modules import BatchNorm, Dropout, NormWithStatistics

    assert issubclass(nn.BatchNorm2d, BatchNorm)
    assert issubclass(nn.SyncBatchNorm, BatchNorm)
    assert issubclass(nn.InstanceNorm1d, NormWithStatistics)
    assert issubclass(BatchNorm, NormWithStatistics)
    assert issubclass(nn.Dropout, Dropout)


@leans_on("torch.nn.init._no_grad_trunc_normal_")
def test_every_truncated_normal_goes_one_way() -> None:
    from paceline.compat import modules

    asked = []

    def fill(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        asked.append(tensor)
        return tensor

    one = torch.zeros(2)
    with modules.replaced_trunc_normal(fill):
        nn.init.trunc_normal_(one)
    assert [id(tensor) for tensor in asked] == [id(one)]
    nn.init.trunc_normal_(one)
    assert one.all()


@leans_on(
    "torch.optim.Optimizer:_optimizer_step_pre_hooks",
    "torch.optim.Optimizer:_optimizer_step_post_hooks",
    "torch.optim.optimizer._global_optimizer_pre_hooks",
    "torch.optim.optimizer._global_optimizer_post_hooks",
)
def test_hooks_on_a_step() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from paceline.compat.optim import step_hooks, step_pre_hooks

    optimizer = torch.optim.SGD([torch.ones(1)])
    before = len([*step_hooks(optimizer)])

    def hook(*_: object) -> None: ...

    handles = [
        optimizer.register_step_pre_hook(hook),
        optimizer.register_step_post_hook(hook),
        register_optimizer_step_pre_hook(hook),
        register_optimizer_step_post_hook(hook),
    ]
    found = [how for how, one in step_hooks(optimizer) if one is hook]
    assert [*step_pre_hooks(optimizer).values()] == [hook]
    for handle in handles:
        handle.remove()
    assert sorted(found) == [
        "register_optimizer_step_post_hook",
        "register_optimizer_step_pre_hook",
        "register_step_post_hook",
        "register_step_pre_hook",
    ]
    assert len([*step_hooks(optimizer)]) == before


@leans_on("torch.optim.Optimizer:_patch_step_function", "torch.optim.Optimizer:_optimizer_step_pre_hooks")
def test_hooks_run_for_an_optimizer_that_never_called_torchs_constructor() -> None:
    from paceline.compat.optim import ensure_hooks

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self._optimizer_step_pre_hooks = OrderedDict()
            self._optimizer_step_post_hooks = OrderedDict()
            self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    made = Wrapper(torch.optim.SGD([torch.ones(1)]))
    seen = []
    made.register_step_pre_hook(lambda *_: seen.append(1))
    made.step()
    assert not seen, "torch runs them itself: ensure_hooks may go"
    ensure_hooks(made)
    made.step()
    assert seen == [1]
    ensure_hooks(made)
    made.step()
    assert seen == [1, 1]


@leans_on("torch.optim.Optimizer:_patch_step_function")
def test_a_step_can_be_taken_past_its_hooks() -> None:
    from paceline.compat.optim import step_without_hooks

    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        weight = torch.ones(1, requires_grad=True)
        weight.grad = torch.ones(1)
        optimizer, seen = kind([weight], lr=0.1), []
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a step of its own on the optimizer
        optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append(1))  # type: ignore[misc]
        step_without_hooks(optimizer)
        assert weight.detach().item() < 1
        assert not seen


@leans_on("torch.optim.Optimizer.step:_wrapped_by_lr_sched")
def test_a_step_that_a_schedule_has_wrapped_is_the_classs() -> None:
    from paceline.compat.optim import has_own_step

    optimizer = torch.optim.SGD([torch.ones(1)])
    assert not has_own_step(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "step" in vars(optimizer), "torch wraps it no more: has_own_step may be simpler"
    assert not has_own_step(optimizer)
    before = optimizer.step

    @functools.wraps(before)
    def step(*arguments: Any) -> Any:
        return before(*arguments)

    optimizer.step = step  # type: ignore[method-assign, assignment]
    assert has_own_step(optimizer)
    other = torch.optim.SGD([torch.ones(1)])
    other.step = lambda *_: None  # type: ignore[method-assign]
    assert has_own_step(other)


@leans_on("torch.optim.Optimizer:_opt_called")
def test_a_schedule_believes_that_a_step_was_made() -> None:
    from paceline.compat.optim import mark_stepped

    optimizer = torch.optim.SGD([torch.ones(1)])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    mark_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()
    other = torch.optim.SGD([torch.ones(1)])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.optim.lr_scheduler.StepLR(other, 1).step()
    assert any("before `optimizer.step()`" in str(one.message) for one in told)


@leans_on("torch.amp.GradScaler:_per_optimizer_states")
def test_a_scaler_tells_of_overflows() -> None:
    from paceline.compat.optim import overflows

    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    weight.grad = torch.full((1,), float("inf"))
    scaler.unscale_(optimizer)
    assert [one.item() for one in overflows(scaler, optimizer)] == [1.0]


@leans_on("torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers")
def test_workers_of_a_loader_can_be_ended() -> None:
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    from paceline.compat.data_loader import end_workers

    assert callable(_MultiProcessingDataLoaderIter._shutdown_workers)
    ended = []

    class Loading:
        def _shutdown_workers(self) -> None:
            ended.append(True)

    end_workers(Loading())  # type: ignore[arg-type]
    assert ended


@leans_on("torch.utils.data.dataloader._MultiProcessingDataLoaderIter:_workers")
def test_workers_of_a_loader_say_how_they_ended() -> None:
    from torch.utils.data import DataLoader

    from paceline.compat.data_loader import end_workers, lost_workers

    loading = iter(DataLoader([1, 2], num_workers=1, multiprocessing_context="fork"))  # type: ignore[arg-type]
    assert lost_workers(loading, 0.0) == []
    end_workers(loading)
    assert [(place, status) for place, _, status in lost_workers(loading, 1.0)] == [(0, 0)]


class Dying(list[int]):
    """Its loading process is killed while the other waits for it."""

    def __getitem__(self, index: Any) -> Any:
        import os
        import time

        time.sleep(0.5)
        os.kill(os.getpid(), 9)


def test_a_worker_of_a_loader_that_is_killed_meanwhile_is_told_of() -> None:
    from torch.utils.data import DataLoader

    from paceline.compat.data_loader import end_workers, lost_workers

    gc.freeze()  # a process group of another test, taken down as garbage there, would hang the process that is forked
    try:
        loading = iter(DataLoader(Dying([1]), num_workers=1, multiprocessing_context="fork"))  # type: ignore[arg-type]
    finally:
        gc.unfreeze()
    # torch's handler of SIGCHLD raises in the midst of the wait.
    assert [(place, status) for place, _, status in lost_workers(loading, 60.0)] == [(0, -9)]
    end_workers(loading)


@leans_on("torch.utils.data.DataLoader._index_sampler")
def test_indices_of_a_loader_can_be_watched() -> None:
    from paceline.compat.data_loader import watch_index_sampler

    kept = DataLoader._index_sampler
    seen: list[list[int]] = []

    def watch(_: object, sampler: list[list[int]]) -> list[list[int]]:
        seen.extend(sampler)
        return [[1], [0]]

    try:
        watch_index_sampler(watch)
        loaded = [batch.tolist() for batch in DataLoader([5, 6, 7], batch_size=2)]  # type: ignore[arg-type]
    finally:
        DataLoader._index_sampler = kept
    assert loaded == [[6], [5]]
    assert seen == [[0, 1], [2]]


@leans_on("torch.utils.data.dataloader._BaseDataLoaderIter")
def test_iterators_of_a_loader_can_be_watched() -> None:
    from paceline.compat.data_loader import end_workers, is_iterator, watch_iterators

    for workers in (0, 1):
        loader = DataLoader([1, 2], num_workers=workers)  # type: ignore[arg-type]
        before = iter(loader)
        begun: list[Any] = []
        advanced: list[Any] = []
        with watch_iterators(begun.append, advanced.append):
            assert next(before).item() == 1
            made = iter(loader)
            assert [one.item() for one in made] == [1, 2]
        assert next(before).item() == 2
        assert begun == [made]
        assert advanced == [before, made, made, made]
        assert is_iterator(before)
        assert not is_iterator(loader)
        for one in (before, made) if workers else ():
            end_workers(one)


@leans_on("torch.utils.data.dataloader._BaseDataLoaderIter")
def test_what_another_library_puts_around_them_meanwhile_stays() -> None:
    from paceline.compat.data_loader import watch_iterators

    kept = DataLoader.__iter__
    try:
        with watch_iterators(print, print):
            DataLoader.__iter__ = theirs = lambda _: iter(())  # type: ignore[method-assign,assignment,misc]
        assert DataLoader.__iter__ is theirs
    finally:
        DataLoader.__iter__ = kept  # type: ignore[method-assign]


@leans_on("sys._getframe")
def test_a_caller_that_unpacks_is_told_from_one_that_iterates() -> None:
    from paceline.compat import python

    seen = []

    class Pair:
        def __iter__(self) -> Iterator[int]:
            seen.append(python.unpacks(python.frame(1)))
            return iter((1, 2))

    for _ in range(100):  # the interpreter specialises what it has done often
        for first, second in [Pair()]:
            del first, second
        _, *_ = Pair()
        [first for first, _ in [Pair()]]
        for _ in Pair():
            pass
        [*Pair()]
        list(enumerate(Pair()))
    assert seen == 100 * [True, True, True, False, False, False]


@leans_on("atexit._run_exitfuncs", "threading._shutdown", "weakref.finalize._registry", "sys._getframe")
def test_the_end_of_the_interpreter() -> None:
    import subprocess
    import sys

    from paceline.compat import python

    assert python.frame(0).f_code.co_name == "test_the_end_of_the_interpreter"
    script = """
import atexit, os, threading, time, weakref
from paceline.compat import python
class Thing: ...
thing = Thing()
weakref.finalize(thing, print, "finalizer", flush=True)
python.forget_finalizers()
atexit.register(print, "exit", flush=True)
threading.Thread(target=lambda: (time.sleep(0.2), print("thread", flush=True))).start()
python.end_interpreter()
os._exit(0)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["thread", "exit"]
