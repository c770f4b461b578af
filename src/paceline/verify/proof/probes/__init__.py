"""The probes, from cause to symptom: each looks at the evidence for one fault and names it, or clears it."""

from paceline.verify.proof.probes.diagnosis import diagnose

__all__ = ["diagnose"]
