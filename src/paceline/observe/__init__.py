"""What a run says about itself and who hears it: events, sinks, progress. Nothing here imports torch."""

from paceline.observe.events import (
    CheckpointDamaged,
    CheckpointSaved,
    EpochFinished,
    Evaluated,
    Event,
    Logged,
    Note,
    Profiled,
    Regrouped,
    RunFailed,
    RunFinished,
    RunStarted,
    StepFinished,
    Straggling,
    WorkerLost,
    from_json,
    to_json,
)
from paceline.observe.progress import PlainProgress, Progress, TerminalProgress, open_progress
from paceline.observe.sinks import Fanout, JsonlSink, RelaySink, Sink
from paceline.observe.tensorboard import TensorBoardSink

__all__ = [
    "CheckpointDamaged",
    "CheckpointSaved",
    "EpochFinished",
    "Evaluated",
    "Event",
    "Fanout",
    "JsonlSink",
    "Logged",
    "Note",
    "PlainProgress",
    "Profiled",
    "Progress",
    "Regrouped",
    "RelaySink",
    "RunFailed",
    "RunFinished",
    "RunStarted",
    "Sink",
    "StepFinished",
    "Straggling",
    "TensorBoardSink",
    "TerminalProgress",
    "WorkerLost",
    "from_json",
    "open_progress",
    "to_json",
]
