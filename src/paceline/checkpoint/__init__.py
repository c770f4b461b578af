"""What outlives a run: checkpoints that are whole or absent, and the weights as one file. Names load on first use."""

from typing import TYPE_CHECKING

from paceline import lazy

if TYPE_CHECKING:
    from paceline.checkpoint.compare import check_fits
    from paceline.checkpoint.contents import CheckpointMetadata
    from paceline.checkpoint.exporting import export
    from paceline.checkpoint.finding import Found, find_newest
    from paceline.checkpoint.fingerprint import digest, weights_sha256
    from paceline.checkpoint.pending_checkpoint import Fault
    from paceline.checkpoint.read import load
    from paceline.checkpoint.saver import Saver
    from paceline.checkpoint.store import Checkpoints
    from paceline.checkpoint.writing import Saved

__all__ = [
    "CheckpointMetadata",
    "Checkpoints",
    "Fault",
    "Found",
    "Saved",
    "Saver",
    "check_fits",
    "digest",
    "export",
    "find_newest",
    "load",
    "weights_sha256",
]

__getattr__, __dir__ = lazy.names(
    __name__,
    {
        "Checkpoints": "paceline.checkpoint.store",
        "Fault": "paceline.checkpoint.pending_checkpoint",
        "Found": "paceline.checkpoint.finding",
        "CheckpointMetadata": "paceline.checkpoint.contents",
        "Saved": "paceline.checkpoint.writing",
        "Saver": "paceline.checkpoint.saver",
        "check_fits": "paceline.checkpoint.compare",
        "digest": "paceline.checkpoint.fingerprint",
        "export": "paceline.checkpoint.exporting",
        "find_newest": "paceline.checkpoint.finding",
        "load": "paceline.checkpoint.read",
        "weights_sha256": "paceline.checkpoint.fingerprint",
    },
)
