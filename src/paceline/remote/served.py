"""Everything of this room that a message may name: a worker has loaded it before the first call arrives."""

from paceline.remote import (
    autograd,
    counted_references,
    dispatch,
    failures,
    object_store,
    pipeline,
    proxy,
    reference_report,
)

__all__ = [
    "autograd",
    "counted_references",
    "dispatch",
    "failures",
    "object_store",
    "pipeline",
    "proxy",
    "reference_report",
]
