"""Says what a job's result is worth beside the reference's: same bits, within the stated bound, in the band, or wrong."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paceline.verify.proof.bounds import bound
from tests.zoo.cells import Verdict

BAND = 0.25
"""How far the loss of a statistical run may be from the reference's, as a part of it."""
Result = dict[str, Any]


def judge(reference: Result, ranks: list[Result], level: str, *, precision: str = "fp32") -> Verdict:
    """Compare what every rank of a run ended with, with what one process did."""
    first = ranks[0]
    if first["exactness"] != level:
        return Verdict("WRONG", f"the run calls itself {first['exactness']}, not {level}")
    if any(other["weights"] != first["weights"] for other in ranks):
        return Verdict("WRONG", "the workers end with different weights")
    if first["steps"] != reference["steps"]:
        return Verdict("WRONG", f"{first['steps']} steps, not {reference['steps']}")
    if reference.get("samples") != first.get("samples") and reference.get("samples") is not None:
        return Verdict("WRONG", f"{first['samples']} samples, not {reference['samples']}")
    if not all(bool(torch.isfinite(_real(tensor)).all()) for tensor in first["model"].values()):
        return Verdict("WRONG", "a weight is not finite")
    return {"bitwise": _bits, "numeric": _bound, "statistical": _band}[level](reference, first, precision)


def judge_plain(reference: Result, made: Result, precision: str = "fp32") -> Verdict:
    """Compare a run of one shard with a textbook loop: the same bits, or what rounding explains."""
    return _metrics(reference, made, bound(made["steps"], precision)) or (
        Verdict("same") if made["weights"] == reference["weights"] else _within(reference, made, precision)
    )


def _bits(reference: Result, made: Result, precision: str) -> Verdict:
    if made["weights"] != reference["weights"]:
        how_far, name = _distance(reference["model"], made["model"])
        return Verdict("WRONG", f"weights differ by {how_far:.1e}, most of all {name}")
    for kind in ("optimizer", "metrics", "loss"):
        if made[kind] != reference[kind]:
            return Verdict("WRONG", f"{kind}: {_short(made[kind])}, not {_short(reference[kind])}")
    return Verdict("same")


def _bound(reference: Result, made: Result, precision: str) -> Verdict:
    verdict = _within(reference, made, precision)
    wrong = _metrics(reference, made, bound(made["steps"], precision))
    return verdict if wrong is None or not verdict.good else wrong


def _metrics(reference: Result, made: Result, allowed: float) -> Verdict | None:
    """Return what is wrong with the metrics; a count of right answers may tip, a loss must not."""
    for name, value in reference["metrics"].items():
        if "loss" in name and not math.isclose(value, made["metrics"][name], rel_tol=10 * allowed):
            return Verdict("WRONG", f"{name} is {made['metrics'][name]}, not {value}")
    return None


def _band(reference: Result, made: Result, precision: str) -> Verdict:
    wanted, found = (result["metrics"]["loss"] for result in (reference, made))
    apart = abs(found - wanted) / abs(wanted)
    return Verdict("band" if apart <= BAND else "WRONG", f"loss {100 * apart:.1f} % from one process's")


def _within(reference: Result, made: Result, precision: str) -> Verdict:
    how_far, name = _distance(reference["model"], made["model"])
    allowed = bound(made["steps"], precision)
    if how_far > allowed:
        return Verdict(
            "WRONG", f"weights differ by {how_far:.1e}, above the bound {allowed:.1e}, most of all {name}"
        )
    return Verdict("within", f"{how_far:.1e} (bound {allowed:.1e})")


def _distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> tuple[float, str]:
    """Return the relative difference of all tensors as one vector, and the name with the largest part in it."""
    if left.keys() != right.keys():
        return math.inf, f"{min(left.keys() ^ right.keys())} (only one of them has it)"
    apart = {name: float((_real(left[name]) - _real(right[name])).norm()) for name in left}
    size = math.sqrt(sum(float(_real(tensor).norm()) ** 2 for tensor in left.values()))
    worst = max(apart, key=lambda name: apart[name])
    return math.sqrt(sum(value**2 for value in apart.values())) / size, worst


def _real(tensor: Tensor) -> Tensor:
    plain = tensor.to_dense() if tensor.is_sparse else tensor
    return (torch.view_as_real(plain) if plain.is_complex() else plain).double()


def _short(value: Any) -> str:
    return value[:10] if isinstance(value, str) else str(value)
