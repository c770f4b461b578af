"""The call that a worker makes to run a script under watch, and to bring home what was seen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.launch.job import ScriptCall
from paceline.verify.script.script_trace import ScriptTrace

if TYPE_CHECKING:
    from paceline.launch.workers.context import Worker


@dataclass(frozen=True, kw_only=True)
class WatchedScript:
    """Run a script as `paceline run` does, with hooks around torch."""

    script: ScriptCall
    folder: str
    """Where the first rank writes down the tensors of the first steps."""
    scale: int = 1
    """By how much the batches of every DataLoader are enlarged."""

    def __call__(self, worker: Worker) -> ScriptTrace:
        """Run it to its end and give what was seen."""
        from paceline.verify.script.watching import ScriptWatch

        watch = ScriptWatch(worker.identity.rank, Path(self.folder))
        watch.install(self.scale)
        try:
            self.script(worker)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        return watch.trace
