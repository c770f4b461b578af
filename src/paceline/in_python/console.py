"""What a training shows in Python: the progress of the command, or notes alone, in the words of a call."""

from __future__ import annotations

from paceline.launch.console import Console
from paceline.launch.in_python import in_words
from paceline.observe.events import Event, RunFailed
from paceline.observe.progress import open_progress


class TaskConsole(Console):
    """A console that names keywords where a command names options."""

    def __init__(self, *, progress: bool) -> None:
        super().__init__(open_progress(words=in_words) if progress else None, notes=True)

    def event(self, event: Event) -> None:
        """Show one event; a failure is raised, and needs no line."""
        if not isinstance(event, RunFailed):
            super().event(event)

    def line(self, text: str) -> None:
        """Show a line of the launcher's own."""
        super().line(in_words(text))
