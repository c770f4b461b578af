"""Everything of this room that a message may name: a worker has loaded it before the first call arrives."""

from paceline.remote import autograd, counted_references, dispatch, failures, holdings, kept, pipeline, proxy

__all__ = ["autograd", "counted_references", "dispatch", "failures", "holdings", "kept", "pipeline", "proxy"]
