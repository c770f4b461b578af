"""What outlives a run: checkpoints that are whole or absent, and the weights as one file."""

from paceline.checkpoint.compare import check_fits
from paceline.checkpoint.durable import caused_by_disk
from paceline.checkpoint.export import ExportReport, export
from paceline.checkpoint.fingerprint import digest, weights_sha256
from paceline.checkpoint.read import Loaded, load
from paceline.checkpoint.store import Checkpoints

__all__ = [
    "Checkpoints",
    "ExportReport",
    "Loaded",
    "caused_by_disk",
    "check_fits",
    "digest",
    "export",
    "load",
    "weights_sha256",
]
