"""`paceline.verify`: prove on a task that several workers compute what one process computes. The command asks the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paceline.compat import python
from paceline.errors import InputError
from paceline.in_python.source import AnyTask, source_of, texts_of
from paceline.in_python.training import check_names
from paceline.launch.clean_up import check_call
from paceline.launch.in_python import OF_TASK, errors_in_keywords, in_words, read_keywords, signature
from paceline.strategies import several
from paceline.training.script import check_importing
from paceline.verify.proof.asked import STEPS, WITHOUT_EFFECT, request_of
from paceline.verify.proof.request import VerifyRequest
from paceline.verify.report import Report


def verify(
    task: AnyTask,
    *,
    strategy: str | Iterable[str] = VerifyRequest.strategies,
    workers: int | Iterable[int] = VerifyRequest.workers,
    steps: int = STEPS,
    settings: Mapping[str, Any] | None = None,
    threads: int | None = None,
    hash_seed: bool = VerifyRequest.hash_seed,
    resume: bool = VerifyRequest.resume,
    **options: Any,
) -> Report:
    """Compare runs of a task with one process, step by step and bit by bit; return what `paceline verify` prints.

    `report.holds` says whether every promise holds; shown, it is the table of the command. `strategy` and `workers` may be
    several, ("ddp", "fsdp") or (1, 2, 4). `resume` also saves in mid-run and goes on with another strategy or number of workers;
    `hash_seed` also repeats the first steps in a fresh process. `options` are those of `paceline.train`.
    """
    check_importing()
    with errors_in_keywords(_words):
        given: Mapping[str, Any] = options
        check_names("verify", given, ("settings", "threads", "hash_seed"))
        idle = next((name for name in WITHOUT_EFFECT if name in given), None)
        if idle is not None:
            raise InputError(
                f"{idle} is no option of verify: its runs are made and left in folders of their own."
            )
        if not isinstance(strategy, Iterable):
            raise InputError(f"strategy is {strategy!r}, but must be text, or several of them.")
        source = source_of(task)
        if source.in_script:
            check_call(python.frame(1))
        said = read_keywords(given) | {"settings": texts_of(settings, task), "steps": steps}
        request = request_of(
            said,
            task=source.reference,
            name=source.name,
            shipped=source.shipped,
            launcher=source.launcher,
            strategies=several(strategy) if isinstance(strategy, str) else tuple(strategy),
            workers=tuple(workers) if isinstance(workers, Iterable) else (workers,),
            threads=threads,
            hash_seed=hash_seed,
            resume=resume,
        )
        from paceline.verify.proof.check import verify as check
        from paceline.world import seeds

        with seeds.preserved():
            return check(request)


def _words(text: str) -> str:
    return in_words(text.replace("--hash-seed", "hash_seed"))  # which is an option of verify alone


verify.__signature__ = signature(verify, OF_TASK, WITHOUT_EFFECT)  # type: ignore[attr-defined]
