"""Everything of this room that a message may ask for: a worker has loaded it before the first call arrives."""

from paceline.remote import (
    autograd,
    counted_references,
    dispatch,
    gradients,
    pipeline,
    reference_report,
)

__all__ = [
    "autograd",
    "counted_references",
    "dispatch",
    "gradients",
    "pipeline",
    "reference_report",
]
