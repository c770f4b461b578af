"""Compares what else lies in a run folder with its receipt: the weights of its checkpoints, and what the run was asked for."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

from paceline.checkpoint.manifest import Manifest
from paceline.errors import CheckpointError
from paceline.records.receipt import Receipt, RunSegment
from paceline.strategies.tuning import Tuning
from paceline.training.folder import CHECKPOINTS, read_spec

_META = ("strategy", "workers", "shards", "exactness", "seed", "batch_size", "task", "horizon", "stream")
"""What the manifest of a checkpoint says too."""


def check_kept(folder: Path, receipt: Receipt) -> tuple[list[int], list[str]]:
    """Return the steps whose checkpoints are there, and a line for each that is not what the receipt tells of.

    Every byte of the weights is read and hashed: neither the receipt nor the manifest is taken at its word.
    """
    steps, problems = [], []
    for step, path in _found(folder / CHECKPOINTS):
        if step in receipt.checkpoints:
            steps.append(step)
            problems += [f"the checkpoint of step {step}: {fault}" for fault in _faults(path, step, receipt)]
        elif step < receipt.steps:
            problems.append(f"the checkpoint of step {step} is there, and the receipt knows nothing of it")
    return steps, problems + _other_request(folder, receipt)


def _found(folder: Path) -> list[tuple[int, Path]]:
    named = [
        (re.fullmatch(r"step-(\d+)", path.name), path) for path in folder.glob("step-*") if path.is_dir()
    ]
    steps = sorted((int(found[1]), path) for found, path in named if found is not None)
    return sorted(dict(steps).items())  # of a step that was being replaced the new one, which comes last


def _faults(path: Path, step: int, receipt: Receipt) -> list[str]:
    from paceline.checkpoint import weights_sha256
    from paceline.checkpoint.parts import StoredTensors
    from paceline.checkpoint.read import verified

    try:
        manifest = verified(path)
        with StoredTensors(path, manifest) as parts:
            really = weights_sha256(parts.model)
    except CheckpointError as error:
        return [f"it cannot be read ({error})"]
    faults = []
    for whose, said in (
        ("its manifest", manifest.weights_sha256),
        ("the receipt", receipt.checkpoints[step].weights_sha256),
    ):
        if said != really:
            faults.append(f"its weights have the hash {really[:12]}, and {whose} says {said[:12]}")
    return faults + _other_terms(manifest, receipt)


def _other_terms(manifest: Manifest, receipt: Receipt) -> list[str]:
    """Return what the manifest of a checkpoint and the start that led to it do not agree on."""
    governing = [start for start in receipt.history if start.step <= manifest.step]
    said = [_said(start, receipt) for start in governing]
    faults = []
    for name in _META:
        theirs = manifest.meta.get(name)
        # No horizon is one too, in a manifest that speaks of it. An older one speaks of fewer things.
        spoken = theirs is not None or (name == "horizon" and name in manifest.meta)
        # Several starts may have begun before it; it was made by one of them.
        if spoken and said and all(one[name] != theirs for one in said):
            faults.append(f"its manifest says {name} {theirs}, and the receipt {said[-1][name]}")
    return faults


def _other_request(folder: Path, receipt: Receipt) -> list[str]:
    """Return what the run was asked for and its last start does not have.

    Only of a run that came to its end: a later attempt that failed may have left its own request behind.
    """
    spec = read_spec(folder) if receipt.finished else {}
    options = spec.get("options", {})
    asked = {name: options[name] for name in ("compile", "sync_batchnorm") if name in options}
    asked |= {"transport_asked": options["transport"]} if "transport" in options else {}
    asked |= {
        name: spec[name] for name in ("threads", "max_grad_norm", "settings") if spec.get(name) is not None
    }
    if "tuning" in options:
        plain = asdict(Tuning())
        asked["tuning"] = {name: one for name, one in options["tuning"].items() if one != plain.get(name)}
    there = vars(receipt.last)
    return [
        f"spec.json says {name} {wanted}, and the receipt {there[name]}"
        for name, wanted in asked.items()
        if there[name] != wanted
    ]


def _said(start: RunSegment, receipt: Receipt) -> dict[str, object]:
    fixed = {"seed": receipt.seed, "shards": receipt.shards, "batch_size": receipt.batch_size}
    return {**vars(start), **fixed, "task": receipt.name}
