"""The reference run, the comparison step by step, and the diagnosis where they differ. Names load on first use."""

from paceline import lazy

__all__ = ["Report", "Request", "verify"]

__getattr__, __dir__ = lazy.names(
    __name__,
    {
        "Report": "paceline.verify.report",
        "Request": "paceline.verify.proof.request",
        "verify": "paceline.verify.proof.check",
    },
)
