"""How well a run does where it is saved, by a metric of the loop's: which checkpoints are its best."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.checkpoint.best import KEY, Score
from paceline.checkpoint.store import Checkpoints
from paceline.errors import InputError, PacelineError
from paceline.observe import Note
from paceline.recovery.membership import EVALUATE
from paceline.training.core import EngineCore
from paceline.training.user_loop.call_history import SAVE
from paceline.world import all_gather_object, broadcast_object


@dataclass(kw_only=True)
class Scoring:
    """The scores of one run, as one worker takes part in them."""

    core: EngineCore
    _last: tuple[int, Score] | None = field(default=None, init=False)
    """The step at which the run was scored last, and how; alike on all workers."""

    def admits(self, score: Score, checkpoints: Checkpoints) -> bool:
        """Return whether a score is among the best so far, alike on all workers; a checkpoint of here then says so."""
        state = self.core.state
        step = None if state.open_call is None else state.step
        if step is not None and step.result is None:
            raise InputError(
                f"run.save(best=...) was called before step.apply() of step {step.number}, and the checkpoint is written when "
                "the step ends, of other weights than were measured. Call it after step.apply()."
            )
        admitted: bool = self.core.recovery.together(
            EVALUATE, lambda: self._agree(score, checkpoints), called=SAVE
        )
        if not score.counts:
            state.emit(Note(text=f"{score} is no finite number, which is never the best: nothing is saved"))
        if admitted and not (step is not None and step.again):
            self._last = state.position.number, score
        return admitted

    def _agree(self, score: Score, checkpoints: Checkpoints) -> bool:
        """Return the answer of the first worker, which writes the checkpoints; all workers call it."""
        world = self.core.state.world
        everybody: list[str] = all_gather_object(world.comm, repr(score))
        for rank, theirs in enumerate(everybody[: world.size - world.mesh.servers]):
            if theirs != everybody[0]:
                raise InputError(
                    f"run.save(best=...) got {theirs} on rank {rank} and {everybody[0]} on rank 0, and a checkpoint has one. "
                    "Give what run.evaluate returns, or another number that is the same on all workers."
                )
        answer: bool | str | None = None
        if world.is_first:
            try:
                answer = checkpoints.admits(self.core.state.position.number, score)
            except PacelineError as error:
                answer = str(error)
        answer = broadcast_object(world.comm, answer)
        if isinstance(answer, str):
            raise InputError(answer)
        return bool(answer)

    def meta(self) -> dict[str, Any]:
        """Return what a checkpoint of here says of it, also where the run was saved here before it was resumed."""
        state = self.core.state
        if self._last is not None and self._last[0] == state.position.number:
            return {KEY: asdict(self._last[1])}
        saved = state.meta.get(KEY) if state.options.resume else None
        return {KEY: saved} if saved is not None and state.started_at == state.position.number else {}
