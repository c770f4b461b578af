"""Where the time of a step goes: a table of a few steps, and a Chrome trace of a few more (`--profile`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import get_ident
from time import perf_counter

import torch

from paceline.observe import Event, Note, Profiled
from paceline.observe.sentences import profile_table
from paceline.training.folder import PROFILE
from paceline.training.options import RunOptions
from paceline.world import World, spans

WARM_UP, MEASURED, TRACED = 3, 5, 3
"""Steps before anything is measured, steps of the table, and steps of the trace: tracing slows what it looks at."""
TRACE, TABLE = "trace.json", "table.txt"
OTHER = "other"


class NoProfile:
    """Nobody asked; also the surface that a real one has."""

    measures = False
    """Whether it is to be told of each step."""

    def after_step(self) -> None:
        """Count a step that is done, and begin or end measuring."""

    def end(self) -> None:
        """Write what there is: no more steps come."""

    def close(self) -> None:
        """Release what is measured, where a run ends early."""


class StepProfile(NoProfile):
    """The profile of one worker's steps, written once."""

    measures = True

    def __init__(self, folder: Path, device: torch.device, emit: Callable[[Event], None]) -> None:
        self._folder, self._device, self._emit = folder, device, emit
        self._steps = 0
        self._timeline: _Timeline | None = None
        self._measured = 0
        self._profiler: torch.profiler.profile | None = None
        self._done = False

    def after_step(self) -> None:
        """Count a step that is done, and begin or end measuring."""
        if self._done:
            return
        self._steps += 1
        if self._timeline is not None and self._profiler is None:
            self._measured += 1
        if self._steps == WARM_UP:
            self._timeline = _Timeline(self._device)
            spans.set_measure(self._timeline.span)
        elif self._steps == WARM_UP + MEASURED:
            self._trace()
        elif self._steps == WARM_UP + MEASURED + TRACED:
            self.end()

    def end(self) -> None:
        """Write what there is: no more steps come."""
        if self._done or not self._steps:
            return
        if not self._measured:
            text = f"--profile measured nothing: the first {WARM_UP} steps warm up, and the run took {self._steps}"
            self._emit(Note(text=text))
        elif self._timeline is not None:
            if self._profiler is None:
                self._timeline.stop()
            self._write(self._timeline)
        self.close()

    def close(self) -> None:
        """Release what is measured, where a run ends early."""
        if self._timeline is not None and not self._done:
            spans.set_measure(None)
            if self._profiler is not None:
                self._profiler.stop()
        self._timeline = self._profiler = None
        self._done = True

    def _trace(self) -> None:
        if self._timeline is not None:
            self._timeline.stop()
        spans.set_measure(_traced)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def _write(self, timeline: _Timeline) -> None:
        host, device = (
            {name: seconds / self._measured for name, seconds in found.items()}
            for found in timeline.seconds()
        )
        trace = self._folder / TRACE
        event = Profiled(
            steps=self._measured,
            host_s=host,
            device_s=device,
            path="" if self._profiler is None else str(trace),
        )
        try:
            self._folder.mkdir(exist_ok=True)
            (self._folder / TABLE).write_text(profile_table(event) + "\n")
            if self._profiler is not None:
                profiler, self._profiler = self._profiler, None
                profiler.stop()
                partial = trace.with_suffix(".partial.json")
                profiler.export_chrome_trace(str(partial))
                partial.replace(trace)
        except (OSError, RuntimeError) as error:  # torch raises the latter where a file cannot be written
            self._emit(Note(text=f"the profile could not be written into {self._folder}: {error}"))
        self._emit(event)


class _Timeline:
    """The moments at which a worker turned to something else, on its host and on its GPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._thread = get_ident()
        self._names: list[str] = []
        """What is going on, the outermost first."""
        self._moments: list[tuple[str, float, torch.cuda.Event | None]] = []
        """What began when."""
        self._turn()

    def span(self, name: str) -> AbstractContextManager[object]:
        """Return the context of a span; those of other threads are not told from what the training one does meanwhile."""
        return self._spanned(name) if get_ident() == self._thread else nullcontext()

    @contextmanager
    def _spanned(self, name: str) -> Iterator[None]:
        depth = len(self._names)
        self._names.append(name)
        self._turn()
        try:
            yield
        finally:
            del self._names[depth:]  # one that was left by an error ends with the one around it
            self._turn()

    def stop(self) -> None:
        """Mark the end of what is measured."""
        self._turn()

    def _turn(self) -> None:
        event = None
        # While a step is captured nothing is computed: such an event would have no time, and raise where it is asked for it.
        if self._is_cuda and not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        self._moments.append((self._names[-1] if self._names else OTHER, perf_counter(), event))

    def seconds(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the seconds of each span on the host, and on the GPU where there is one."""
        host, device = (dict.fromkeys((*spans.SPANS, OTHER), 0.0) for _ in range(2))
        if self._is_cuda:
            torch.cuda.synchronize()
        for (name, since, began), (_, until, ended) in zip(self._moments, self._moments[1:], strict=False):
            host[name] += until - since
            if began is not None and ended is not None:
                device[name] += began.elapsed_time(ended) / 1e3
        return host, device if self._is_cuda else {}


def _traced(name: str) -> AbstractContextManager[object]:
    traced: AbstractContextManager[object] = torch.profiler.record_function(f"paceline: {name}")
    return traced


def open_profile(options: RunOptions, world: World, emit: Callable[[Event], None]) -> NoProfile:
    """Return the profile of a run: of rank 0, where one was asked for."""
    if not options.profile or options.out is None or world.rank != 0:
        return NoProfile()
    return StepProfile(options.out / PROFILE, world.device, emit)
