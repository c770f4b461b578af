"""The reference run, the comparison step by step, and the diagnosis where they differ. Names load on first use.

`paceline.verify(task, workers=(1, 2))` is the way in from Python.
"""

from paceline import lazy

__all__ = ["Report", "VerifyRequest", "verify"]

lazy.call(__name__, "paceline.in_python.verifying", "verify")
__getattr__, __dir__ = lazy.names(
    __name__,
    {
        "Report": "paceline.verify.report",
        "VerifyRequest": "paceline.verify.proof.request",
        "verify": "paceline.verify.proof.check",
    },
)
