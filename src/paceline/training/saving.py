"""When a run saves, and what becomes of it: one saver for its whole life, because a save may be under way between two calls."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paceline.errors import CheckpointError, DiskFaultError, InputError
from paceline.observe import Note
from paceline.training import folder, resuming
from paceline.training.membership import EVALUATE, SAVE
from paceline.training.nonfinite import check_weights
from paceline.training.position import Position
from paceline.training.recorder import NoRecords
from paceline.training.recovery import Recovery, RolledBackError

if TYPE_CHECKING:
    from paceline.training.run import Run


NO_FOLDER = "run.save needs a folder. Give out= to paceline.launch, or --out."


class Saving:
    """The checkpoints of one run, as one worker takes part in them."""

    def __init__(self, run: Run, recovery: Recovery, records: NoRecords) -> None:
        self._run, self._recovery, self._records = run, recovery, records
        out = run.options.out
        self._saver = None if out is None else resuming.open_saver(run.options, records, run.emit)
        self._saved_at: Position | None = None
        self._asked = False
        """Whether the loop has asked for a checkpoint in a body that has not ended."""

    def ask(self, called: str) -> None:
        """Have a checkpoint written when the body of the present step ends: what the body still does belongs to it.

        A checkpoint stands at the beginning of the next step, and a run that goes on from there does nothing of this body again.
        """
        if self._saver is None:
            raise InputError(NO_FOLDER)
        self._recovery.together(EVALUATE, lambda: None, called=called)
        self._asked = True

    def after_body(self, *, again: bool, due: bool, last: bool) -> None:
        """Write a checkpoint that is due, or that the body has asked for; one behind the `last` step comes by itself.

        A body that is run `again` asks for it again.
        """
        asked, self._asked = self._asked and not again, self._asked and last and not again
        if again or last:
            return
        if asked:
            with suppress(RolledBackError):
                self._run.save_due()
        elif due:
            self.on_the_way()

    def check_asked(self) -> None:
        """Raise where another call of `run.steps` begins, and the body that asked for a checkpoint has not ended."""
        if self._asked:
            raise InputError(
                "run.save() was called in the body of a loop that was then left with break, and what a run resumed from there "
                "would do next is not known. Call run.save() behind the loop; where its iterator has a name "
                "(it = run.steps(...)), call it.close() before."
            )

    def save(self, meta: dict[str, Any], *, last: bool = False, called: str | None = None) -> None:
        """Write a checkpoint of where the run stands, with all workers; `called` is the name by which the loop asks for it."""
        run, saver = self._run, self._saver
        if saver is None:
            raise InputError(NO_FOLDER)
        if called is not None:
            # Apart from the save itself, for which a slow disk is waited for ten times as long.
            self._recovery.together(EVALUATE, lambda: None, called=called)
        if run.options.resume:
            saver.checkpoints.own.add(run.started_at)

        def write() -> tuple[str, bool]:
            with run.guard.updating():  # workers that have gone their own ways are brought to one state
                return resuming.save(
                    run.replica,
                    run.options,
                    run.position,
                    run.world,
                    meta,
                    self._records,
                    saver,
                    run.loop_state,
                    run.outcomes,
                    last=last,
                    unless_saved=last and self._saved_at == run.position,
                )

        problem, disk = self._recovery.together(SAVE, write)
        if problem:
            raise (DiskFaultError if disk else CheckpointError)(problem)
        self._saved_at, self._asked = run.position, False

    def on_the_way(self) -> None:
        """Write a checkpoint that is due; a disk that fails does not end a run that can go on without it."""
        try:
            with suppress(RolledBackError):
                self._run.save_due()
        except DiskFaultError as error:
            text = f"{error} Training goes on; the next checkpoint is tried when it is due."
            self._run.emit(Note(text=text))

    def at_the_end(self) -> None:
        """Write the last checkpoint, unless there is one of this very step or nothing was done."""
        run = self._run
        saved = self._saved_at == run.position and not (self._asked or run.options.save_async)
        if self._saver is None and run.position.number > run.started_at:
            with suppress(RolledBackError):
                self._recovery.together(
                    SAVE, lambda: check_weights(run.replica, run.world, run.position.number)
                )
        if self._saver is not None and not saved and run.position.number > run.started_at:
            try:
                with suppress(RolledBackError):
                    run.save_due(last=True)
            except DiskFaultError as error:
                newest = folder.newest_step(run.options.out)
                left = (
                    "no checkpoint was saved"
                    if newest is None
                    else f"the newest checkpoint is of step {newest}"
                )
                raise DiskFaultError(
                    f"{error} All {run.position.number} steps were taken, but {left}; {run.options.out} is kept."
                ) from error

    def go_back(self, number: int) -> None:
        """Know that the run stands at an earlier step again."""
        if self._saved_at is not None and self._saved_at.number > number:
            self._saved_at = None
        self._asked = False

    def poll(self) -> None:
        """Hear of a save beside the training that has ended."""
        if self._saver is not None:
            self._saver.poll()

    def wait(self) -> None:
        """Let a checkpoint that is being written come to its end."""
        if self._saver is not None:
            self._saver.wait()

    def abandon(self) -> None:
        """Abandon the save in flight: the group is broken."""
        if self._saver is not None:
            self._saver.abandon()

    def close(self) -> None:
        """Let go of what saves."""
        if self._saver is not None:
            self._saver.close()
