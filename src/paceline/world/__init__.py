"""Who am I and whom can I talk to. Names load on first use: `env` alone must not drag in torch."""

from paceline import lazy

__all__ = [
    "CheckedComm",
    "Comm",
    "Identity",
    "LocalComm",
    "Pending",
    "PendingReduction",
    "ProcessGroupComm",
    "ReduceOp",
    "World",
    "all_gather_object",
    "alone",
    "broadcast_object",
    "connect",
]

__getattr__, __dir__ = lazy.names(
    __name__,
    {
        "CheckedComm": "paceline.world.checked",
        "Comm": "paceline.world.base",
        "Identity": "paceline.world.env",
        "LocalComm": "paceline.world.local",
        "Pending": "paceline.world.base",
        "PendingReduction": "paceline.world.base",
        "ProcessGroupComm": "paceline.world.process_group",
        "ReduceOp": "paceline.world.base",
        "World": "paceline.world.world",
        "all_gather_object": "paceline.world.objects",
        "alone": "paceline.world.join",
        "broadcast_object": "paceline.world.objects",
        "connect": "paceline.world.join",
    },
)
