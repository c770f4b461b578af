"""The receipt on the disk: what was written is read back, however often workers came and went."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InputError
from paceline.records.receipt import FIRST_LINK, NAME, Point, Receipt, RunSegment

START = RunSegment(
    generation=0,
    step=0,
    epoch=0,
    step_of_epoch=0,
    strategy="ddp",
    workers=3,
    processes=3,
    exactness="bitwise",
    stream=False,
    samples=45,
    shuffle=True,
    order_seed=5,
    precision="fp32",
    compile=False,
    micro_batch=None,
    num_workers=0,
    find_unused_parameters=False,
    sync_batchnorm=False,
    transport_asked="auto",
    max_grad_norm=None,
    horizon=None,
    task="task.py:Task",
    settings={"rate": "0.1"},
    sources={"task.py": "0" * 64},
    device="cpu",
    device_name="a processor",
    threads=1,
    versions={"torch": "2.13.0"},
    paceline_sha256="1" * 64,
)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "step": st.integers(0, 9),
        "workers": st.integers(1, 4),
        "processes": st.integers(1, 4),
        "shares": st.sampled_from([None, (1, 3), (2, 1, 1)]),
        "max_grad_norm": st.sampled_from([None, 0.1]),
        "settings": st.sampled_from([{}, {"rate": "0.1"}, {"rate": "0.2", "width": "3"}]),
        "versions": st.sampled_from([{"torch": "2.13.0"}, {"torch": "2.11.0"}]),
    },
)


def receipt(*starts: RunSegment, **facts: Any) -> Receipt:
    return Receipt(name="task", seed=5, shards=4, batch_size=10, history=starts, **facts)


@given(st.lists(CHANGES, max_size=6))
def test_every_start_is_read_back_in_full(changes: list[dict[str, Any]]) -> None:
    starts = [START]
    for change in changes:
        starts.append(replace(starts[-1], **change, generation=len(starts)))
    point = Point(weights_sha256="2" * 64, chain=None)
    written = receipt(*starts, checkpoints={4: point, 12: point}, finished=True)
    with tempfile.TemporaryDirectory() as folder:
        written.write(Path(folder), durable=False)
        assert Receipt.read(Path(folder)) == written
        document = json.loads((Path(folder) / NAME).read_text())
    assert document["workers"] == starts[-1].workers
    assert document["history"][0]["task"] == START.task


def test_a_regroup_takes_a_short_line(tmp_path: Path) -> None:
    starts = [replace(START, generation=place, step=3 * place, workers=place % 3 + 1) for place in range(400)]
    receipt(START).write(tmp_path)
    one = (tmp_path / NAME).stat().st_size
    receipt(*starts).write(tmp_path)
    assert (tmp_path / NAME).stat().st_size < one + 400 * 64
    assert Receipt.read(tmp_path).history == tuple(starts)


def test_a_receipt_of_another_time(tmp_path: Path) -> None:
    receipt(START).write(tmp_path)
    document = json.loads((tmp_path / NAME).read_text())
    (tmp_path / NAME).write_text(json.dumps(document | {"format": 3}))
    with pytest.raises(InputError, match="has format 3, and this version of paceline reads up to 2"):
        Receipt.read(tmp_path)


def test_of_two_starts_at_one_step_the_later_one_counts() -> None:
    """A regroup that came to nothing is followed by another."""
    starts = [replace(START, generation=place, step=step) for place, step in enumerate((0, 5, 5, 5, 8, 7))]
    assert [(start.step, start.generation) for start in receipt(*starts).segments] == [
        (0, 0),
        (5, 3),
        (7, 5),
    ]


def test_the_chain_is_known_up_to_the_last_checkpoint_that_has_one() -> None:
    point = Point(weights_sha256="2" * 64, chain="ab" * 32)
    assert receipt(START).linked == (0, FIRST_LINK)
    broken = replace(point, chain=None)
    assert receipt(START, checkpoints={4: point, 9: broken}).linked == (4, bytes.fromhex("ab" * 32))
