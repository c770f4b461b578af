"""What outlives a run: checkpoints that are whole or absent, and the weights as one file. Names load on first use."""

from typing import TYPE_CHECKING

from paceline import lazy

if TYPE_CHECKING:
    from paceline.checkpoint.exporting import export
    from paceline.checkpoint.fingerprint import weights_sha256
    from paceline.checkpoint.read import load

__all__ = ["export", "load", "weights_sha256"]

__getattr__, __dir__ = lazy.names(
    __name__,
    {
        "export": "paceline.checkpoint.exporting",
        "load": "paceline.checkpoint.read",
        "weights_sha256": "paceline.checkpoint.fingerprint",
    },
)
