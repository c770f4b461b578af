"""The tasks in examples/ learn, and come to the same bits on one worker and on two; the documents run its scripts."""

import json
from pathlib import Path

import pytest

from tests.dist.cli.conftest import command, folder

__all__ = ["command", "folder"]
EXAMPLES = Path(__file__).parents[3] / "examples"
# What it is, options, and what holds of its evaluation after so few steps.
TABLE = {
    "image_classification.py:Images": (("--precision", "bf16", "--epochs", "2"), "accuracy", 0.6, 1.0),
    "pretrain_text.py:Pretrain": (("--steps", "12", "--max-grad-norm", "1"), "loss", 0.0, 4.0),
    "recommender_ps.py:Ratings": ((), "loss", 0.0, 0.5),
}
LAYOUTS = {
    "image_classification.py:Images": ("--strategy", "ddp"),
    "pretrain_text.py:Pretrain": ("--strategy", "fsdp"),
    "recommender_ps.py:Ratings": ("--strategy", "hybrid", "--servers", "1"),
}


@pytest.mark.parametrize("task", TABLE)
def test_an_example_learns_and_two_workers_come_to_the_bits_of_one(command, folder, task):
    options, metric, low, high = TABLE[task]
    results = []
    for layout in (("--strategy", "single"), ("--workers", "2", *LAYOUTS[task])):
        out = f"run-{len(results)}"
        ended = command("train", EXAMPLES / task, *options, *layout, "--threads", 1, "--out", out, "--json")
        assert ended.status == 0, ended.err
        results.append(json.loads(ended.out.splitlines()[-1]))
    one, two = results
    assert low < one["metrics"][metric] <= high
    assert (one["weights_sha256"], one["metrics"]) == (two["weights_sha256"], two["metrics"])
