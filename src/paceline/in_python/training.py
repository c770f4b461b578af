"""`paceline.train` and `paceline.resume`: what `paceline train` does, as a call that returns the result."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Unpack

from paceline import option_fields
from paceline.compat import python
from paceline.errors import InputError, UnknownNameError, WorkerFailedError
from paceline.in_python.console import TaskConsole
from paceline.in_python.result import Result, TemporaryFolder
from paceline.in_python.source import AnyTask, AnyTaskOrNone, Source, source_of, texts_of
from paceline.launch import api
from paceline.launch.base import Outcome
from paceline.launch.clean_up import check_call
from paceline.launch.clusters import entering
from paceline.launch.in_python import (
    OF_STARTING,
    OF_TASK,
    errors_in_keywords,
    in_words,
    keywords,
    read_keywords,
    signature,
)
from paceline.launch.keywords import TrainOptions
from paceline.launch.resumed import options_over, spec_over
from paceline.observe.events import Note
from paceline.tasks.names import task_of
from paceline.training import folder as run_folder
from paceline.training.script import check_importing
from paceline.world import env

BESIDE = ("settings", "threads", "progress")


def train(
    task: AnyTask,
    *,
    settings: Mapping[str, Any] | None = None,
    threads: int | None = None,
    progress: bool = True,
    **options: Unpack[TrainOptions],
) -> Result:
    """Train a task and return its numbers, its history and the way to its weights: what `paceline train` does, to the same bits.

    `task` is a class (`settings` are arguments of its constructor), an instance, or text as on the command line: "digits",
    "file.py:Class", "package.module:Class". `options` are those of `paceline train` by their names in Python: workers=4,
    strategy="fsdp", shards=8, steps=100, out="runs/mine", save_every=50; `inspect.signature(paceline.train)` shows all of them.
    Without `out` the run lies in a temporary folder, which goes with the result. `progress=False` shows nothing but notes.

    Wrong input raises `paceline.InputError`, in one line; code of the task that fails raises `paceline.WorkerFailedError`, with
    the worker's own traceback as a note. An interrupt (Ctrl-C, the stop button of a kernel) finishes the step, saves, and raises
    KeyboardInterrupt. Started by torchrun, mpirun or srun, this process is one of the workers, and `workers` does not count.
    """
    __tracebackhide__ = True
    check_importing()
    with errors_in_keywords(in_words), entering.entered(rendezvous=options.get("rendezvous")):
        return _Training(task, settings, options, threads=threads, progress=progress).run(python.frame(1))


def resume(
    folder: str | Path,
    *,
    task: AnyTaskOrNone = None,
    settings: Mapping[str, Any] | None = None,
    threads: int | None = None,
    progress: bool = True,
    **options: Unpack[TrainOptions],
) -> Result:
    """Go on with the run in a folder, with every option that it had; those that are given again hold from here on.

    `steps` and `epochs` count from the beginning of the run. Another strategy or number of workers is welcome, to the same bits.
    The task is the run's own; give `task` again where it was sent as a value (an instance, or a class of a notebook).
    """
    __tracebackhide__ = True
    check_importing()
    with errors_in_keywords(in_words), entering.entered(rendezvous=options.get("rendezvous")):
        for name in ("out", "resume"):
            if name in options:
                raise InputError(
                    f"{name} is no option of resume: the run goes on in the folder that is given first."
                )
        given: dict[str, Any] = {"out": option_fields.folder("folder", folder), "resume": True, **options}
        return _Training(task, settings, given, threads=threads, progress=progress).run(python.frame(1))


train.__signature__ = signature(train, OF_TASK)  # type: ignore[attr-defined]
resume.__signature__ = signature(resume, OF_TASK, ("out", "resume"))  # type: ignore[attr-defined]


class _Training:
    """One call: what it was given, read; then carried out."""

    def __init__(
        self,
        task: Any,
        settings: Mapping[str, Any] | None,
        given: Mapping[str, Any],
        *,
        threads: int | None,
        progress: bool,
    ) -> None:
        check_names("train", given, BESIDE)
        said = read_keywords(given) | {"settings": texts_of(settings, task)}
        out = said.get("out")
        if said.get("resume") and out is None:
            raise InputError("--resume needs the folder of the run to resume. Give --out.")
        if task is None and not said.get("resume"):
            raise InputError(
                'there is no task to train. Give a class, an instance, or text as "file.py:Class".'
            )
        before = run_folder.read_spec(out) if said.get("resume") and out is not None else {}
        self.task, self.settings = task, settings
        self.source = _source(task, before, out)
        self.temporary: TemporaryFolder | None = None
        if out is None:
            out = self._place(said)
        try:
            self.options, notes = options_over(said, before, out)
            run_folder.check_resumed(self.options)
            shipped = self.source.shipped
            self.spec = spec_over(
                self.source.reference, self.source.name, said, before, shipped, self.source.launcher
            )
        except BaseException:
            self._drop()
            raise
        self.threads = threads if threads is not None else before.get("threads")
        self.out, self.notes = out, notes
        self.console = TaskConsole(progress=progress)

    def _place(self, said: Mapping[str, Any]) -> Path:
        """Return the run folder of a run that was given none: all processes of one must come to the same."""
        if env.identity() is not None or said.get("rendezvous") is not None:
            return run_folder.new_folder(self.source.name)
        self.temporary = TemporaryFolder()
        return self.temporary.path

    def _drop(self) -> None:
        if self.temporary is not None:
            self.temporary.remove()

    def run(self, caller: FrameType) -> Result:
        """Train, and return the result or raise what went wrong."""
        __tracebackhide__ = True
        try:
            outcome = self._start(caller)
            if outcome.interrupted is not None:
                self._leave(outcome)
            results = outcome.value()
        except InputError:
            self._drop()
            raise
        except BaseException as error:
            if self.temporary is not None:
                self.temporary.keep()
            if self.temporary is not None and isinstance(error, WorkerFailedError):
                self.console.line(
                    f"the output of every rank is in {self.out / 'logs'} until this process ends"
                )
            raise
        launched = {"restarts": outcome.restarts, "errors": [asdict(one) for one in outcome.errors]}
        return Result.of(
            {**results[0], **launched} if results else {},
            self.options,
            self.source.name,
            made_by=(self.task, self.settings),
            temporary=self.temporary,
            led_by=outcome.led_by,
        )

    def _start(self, caller: FrameType) -> Outcome:
        identity = env.identity()
        if identity is None and self.source.in_script:
            check_call(caller)
        for text in self.notes if identity is None or identity.rank == 0 else ():
            self.console.event(Note(text))
        return api.start(
            api.TRAINER,
            (self.spec,),
            {},
            self.options,
            threads=self.threads,
            console=self.console,
            record={**self.spec.record(), "threads": self.threads},
        )

    def _leave(self, outcome: Outcome) -> NoReturn:
        """Report what an interrupt has left, and pass it on."""
        __tracebackhide__ = True
        saved = outcome.saved_at
        left = "" if saved is None else f" The newest checkpoint is of step {saved}; {self._way_on()}."
        self.console.line(f"interrupted: all workers have ended.{left}")
        if outcome.interrupted == signal.SIGTERM:
            signal.raise_signal(signal.SIGTERM)  # now it does what it would have done without us
        raise KeyboardInterrupt

    def _way_on(self) -> str:
        again = ", task=...)" if self.source.shipped is not None else ")"
        kept = "" if self.temporary is None else " while this process lives"
        return f"paceline.resume({str(self.out)!r}{again} goes on from there{kept}"


def _source(task: Any, before: Mapping[str, Any], out: Path | None) -> Source:
    """Return where workers find the task: the one that is given, or the run's own."""
    if task is not None:
        return source_of(task)
    known = task_of(before)
    if known is None:
        raise InputError(
            f"{out} does not say which task it trains: it was sent as a value, the run was a loop of your own, or there is no "
            "run. Give task= again."
            if before
            else f"there is no run in {out}. Start one with paceline.train(task, out={str(out)!r})."
        )
    reference, name = before["task"], before.get("name", known)
    return Source(reference, name)


def check_names(function: str, given: Mapping[str, Any], beside: tuple[str, ...]) -> None:
    """Raise where a keyword is none of a training's."""
    known = keywords(OF_TASK)
    for name in given:
        if name in OF_STARTING:
            raise InputError(
                f"{name} is no option of {function}: it would start this script anew for each worker. Start the script with "
                "torchrun, mpirun or srun, which it joins by itself, or use the command paceline train."
            )
        if name not in known:
            raise UnknownNameError("option", name, [*known, *beside])
