"""The loop: `Run`, `Step`, the trainer of a Task. Names load on first use, so a launcher can read options without torch."""

from paceline import lazy

__all__ = ["Run", "RunOptions", "Step"]

__getattr__, __dir__ = lazy.names(
    __name__,
    {
        "Run": "paceline.training.run",
        "RunOptions": "paceline.training.options",
        "Step": "paceline.training.step",
    },
)
