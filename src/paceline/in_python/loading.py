"""`paceline.load`: the model of a run, with the weights of one of its checkpoints, whatever strategy saved them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import option_fields
from paceline.checkpoint.extra_state import read_extra_state
from paceline.checkpoint.manifest import MANIFEST, Manifest, committed, newest_readable
from paceline.checkpoint.parts import StoredTensors
from paceline.checkpoint.read import unusable, verified
from paceline.errors import CheckpointError, InputError
from paceline.in_python.source import AnyTaskOrNone, texts_of
from paceline.launch.in_python import errors_in_keywords
from paceline.ranges import STEPS_TAKEN
from paceline.training import folder as run_folder
from paceline.training.script import script, started_here

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.task import Task


def load(
    folder: str | Path,
    *,
    step: int | None = None,
    task: AnyTaskOrNone = None,
    settings: Mapping[str, Any] | None = None,
    average: bool | None = None,
) -> nn.Module:
    """Return the trained model of a run on the CPU, in eval mode; `.train()` makes it ready to go on with.

    `folder` is that of the run, of which the newest whole checkpoint is read, or that of `step`; or the folder of one checkpoint.
    The model is made by the run's own task, which is imported here. Give `task` (a class, an instance, or text as on the command
    line) where the run does not say which it was: it was sent as a value from a notebook, or the run was a loop of your own.
    Of a task with an `Average` these are the averages where they are what it evaluates, unless `average` says otherwise.
    """
    with errors_in_keywords():
        place = option_fields.folder("folder", folder)
        step = None if step is None else STEPS_TAKEN.read("step", step)
        if average is not None and not isinstance(average, bool):
            raise InputError(f"average is {average!r}, but must be True, False or None.")
        path, manifest = _find(place, step)
        made = _make(_task(_run_of(place), task, settings))
        _fill(made, path, manifest, average)
        return made.cpu().eval()


def _find(place: Path, step: int | None) -> tuple[Path, Manifest]:
    """Return the checkpoint that is asked for, whole."""
    if (place / MANIFEST).exists() or re.fullmatch(r"step-[0-9]+", place.name):
        if step is not None and place.name != f"step-{step}":
            raise InputError(f"{place} is one checkpoint. Give the folder of the run with step={step}.")
        path = place
    elif step is None:
        path, manifest, passed_over = newest_readable(place, verified)
        for damaged, reason in passed_over.items():
            warnings.warn(f"passed over {damaged}: {reason}", stacklevel=3)
        return path, manifest
    else:
        path = place / run_folder.CHECKPOINTS / f"step-{step}"
    if not path.is_dir():
        there = ", ".join(one.name.removeprefix("step-") for one in committed(path.parent))
        raise CheckpointError(
            f"there is no checkpoint at {path}. "
            + (f"Those that are kept there are of steps {there}." if there else "Give the folder of a run.")
        )
    try:
        return path, verified(path)
    except CheckpointError as error:
        raise unusable(path, error) from error


def _run_of(place: Path) -> Path:
    """Return the folder of the run that a folder is, or is a checkpoint of."""
    return place.parent.parent if place.parent.name == run_folder.CHECKPOINTS else place


def _task(run: Path, given: Any, settings: Mapping[str, Any] | None) -> Task:
    """Make the task of a run, or the one that is given."""
    from paceline.task import Task
    from paceline.tasks.names import resolve
    from paceline.training.reference import arguments, check_task, load_task

    if isinstance(given, Task):
        _ = texts_of(settings, given)
        return given
    spec = run_folder.read_spec(run)
    texts = {**spec.get("settings", {}), **texts_of(settings, given)}
    if isinstance(given, type) and issubclass(given, Task):
        made = given(**arguments(given, texts))
        check_task(made)
        return made
    reference = spec.get("task") if given is None else resolve(given)[0] if isinstance(given, str) else None
    if reference:
        here = _of_this_script(reference)
        return load_task(reference, texts) if here is None else here(**arguments(here, texts))
    if given is not None:
        raise InputError(f"task is {given!r:.40}, but must be a Task class, an instance of one, or text.")
    raise InputError(
        f"{run} does not say which task made its model: it was sent as a value, or the run was a loop of your own. "
        "Give paceline.load(..., task=...)."
    )


def _of_this_script(reference: str) -> type[Task] | None:
    """Return the class where it is one of the script that runs here: to import it would run it once more."""
    path, _, name = reference.rpartition(":")
    there = started_here(path) if path and script() is not None else None
    return None if there is None else vars(there).get(name)


def _make(task: Task) -> nn.Module:
    """Make the model without touching this process's random numbers."""
    import copy

    from torch import nn

    from paceline.world import seeds

    name = f"{type(task).__name__}.model()"
    try:
        with seeds.preserved():
            # The task, or whatever its model() is written in, may hold it or a part of it: that stays as it is.
            made: Any = copy.deepcopy(task.model())
    except Exception as error:
        raise InputError(
            f"the model cannot be made here: {name} raised {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(made, nn.Module):
        raise InputError(f"{name} returned a {type(made).__name__}, not a torch.nn.Module.")
    return made


def _fill(model: nn.Module, path: Path, manifest: Manifest, average: bool | None) -> None:
    """Put the weights of a checkpoint into a model."""
    from paceline.strategies.buffers.unsaved import put_unsaved

    with StoredTensors(path, manifest) as parts:
        held: dict[str, Tensor] = dict(parts.weights(average))
        buffers = read_extra_state(path).get("buffers", {})
    try:
        model.load_state_dict(held)
    except RuntimeError as error:
        lines = [" ".join(line.split()) for line in str(error).splitlines()[1:]]
        raise CheckpointError(
            f"the weights in {path} are not those of the model that the task makes here: {' '.join(lines) or error}"
        ) from error
    put_unsaved(model, buffers)
