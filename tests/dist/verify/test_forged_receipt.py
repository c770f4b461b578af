"""Whoever changes a receipt is found out, field by field; what nobody can recompute is listed as such in the documentation."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.cli import main as command_line
from paceline.documents import HASH_OF_NOTHING
from paceline.errors import InputError, PacelineError
from paceline.records import ledger
from paceline.records.receipt import Receipt, RunSegment
from paceline.verify.receipts.audit import audit
from paceline.verify.receipts.rerun import SegmentReplay, verify_receipt

TASK = """
import torch
from tests.contract.tasks import Classify

class Scheduled(Classify):
    '''Dropout, AdamW, a learning rate that falls over the whole run, and a norm that clips.'''

    max_grad_norm = 0.05

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.lr = lr

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def scheduler(self, optimizer, total_steps):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total_steps)
"""
PLAIN = """
from torch.utils.data import IterableDataset
from tests.contract.tasks import Classify

class Rows(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return iter(self.rows)

class Listed(Classify):
    '''A stream of a known length, whose order is that of a list.'''

    def __init__(self) -> None:
        super().__init__(samples=16)

    def train_data(self):
        return Rows(list(super().train_data()))
"""
OTHER: dict[str, Any] = {
    "generation": 1,
    "step": 1,
    "epoch": 1,
    "step_of_epoch": 1,
    "strategy": "ps",
    "workers": 3,
    "exactness": "numeric",
    "stream": True,
    "samples": 60,
    "shuffle": False,
    "repeats": 2,
    "order_seed": 4,
    "uneven": True,
    "precision": "bf16",
    "compile": True,
    "micro_batch": 1,
    "sync_batchnorm": True,
    "tuning": {"bucket_mb": 3.0},
    "max_grad_norm": 0.01,
    "horizon": 7,
    "task": "digits",
    "settings": {"lr": "0.5"},
    "sources": {"task.py": "0" * 64},
    "device": "cuda",
    "device_name": "another",
    "threads": 2,
    "versions": {"torch": "2.9.1"},
    "paceline_sha256": "0" * 64,
    "name": "other",
    "seed": 4,
    "shards": 2,
    "batch_size": 4,
    "checkpoints": {},
}
"""Another value for each fact that is fixed by something else in the folder, or by the bits themselves."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forged")
    (folder / "task.py").write_text(TASK)
    asked = "--workers 2 --shards 4 --steps 6 --save-every 3 --seed 3 --threads 1 --device cpu --out".split()
    call = ["train", f"{folder / 'task.py'}:Scheduled", *asked, str(folder / "run"), "--json"]
    assert command_line._command(call) == 0
    assert audit(folder / "run").holds
    return folder / "run"


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def informational() -> set[str]:
    """Return the fields that the documentation says nobody can check."""
    text = (Path(__file__).parents[3] / "docs/receipts.md").read_text()
    found = re.search(r"^Informational, because nothing else fixes them: (.*?)\.$", text, re.MULTILINE)
    assert found is not None
    return set(re.findall(r"`(\w+)`", found[1]))


def noticed(folder: Path) -> bool:
    """Return whether an audit, or else a re-run, says that something is not as it was."""
    try:
        if not audit(folder).holds:
            return True
        report = verify_receipt(SegmentReplay(folder=folder))
    except PacelineError:
        return True
    return not report.holds or bool(report.differences)


def test_every_fact_is_tried_or_listed() -> None:
    facts = {one.name for one in (*fields(RunSegment), *fields(Receipt))} - {"history"}
    assert facts == OTHER.keys() | informational()
    assert not OTHER.keys() & informational()


@pytest.mark.parametrize("name", OTHER)
def test_a_fact_that_is_changed_wherever_it_stands_is_noticed(copy: Path, name: str) -> None:
    before = Receipt.read(copy)
    if name in {one.name for one in fields(RunSegment)}:
        after = replace(before, history=(replace(before.last, **{name: OTHER[name]}),))
    else:
        after = replace(before, **{name: OTHER[name]})
    assert after != before
    after.write(copy)
    assert noticed(copy)


def test_facts_that_no_bit_depends_on_are_noticed(tmp_path: Path) -> None:
    """A task without a schedule and without an order of its own: only what else was written down tells of them."""
    (tmp_path / "task.py").write_text(PLAIN)
    asked = "--workers 1 --shards 2 --steps 2 --seed 3 --threads 1 --device cpu --out".split()
    whole = tmp_path / "run"
    assert command_line._command(["train", f"{tmp_path / 'task.py'}:Listed", *asked, str(whole)]) == 0
    before = Receipt.read(whole)
    assert (before.last.stream, before.last.samples, before.last.horizon) == (True, 16, 100)
    assert audit(whole).holds
    for name, other in (("horizon", 7), ("horizon", None), ("stream", False)):
        replace(before, history=(replace(before.last, **{name: other}),)).write(whole)
        assert any(f"says {name}" in problem for problem in audit(whole).problems), name
    replace(before, history=(replace(before.last, order_seed=4),)).write(whole)
    report = verify_receipt(SegmentReplay(folder=whole))
    assert not report.holds
    assert any("says order_seed 4, and the same task has 3 here" in fault for fault in report.faults)


def test_a_fact_at_the_top_alone_contradicts_the_rest(copy: Path) -> None:
    path = copy / "receipt.json"
    document = json.loads(path.read_text())
    for name in document.keys() - {one.name for one in fields(Receipt)}:  # those stand there alone
        for other in ("another", None):
            path.write_text(json.dumps(document | {name: other}))
            if document[name] == other:
                continue
            with pytest.raises(InputError, match=r"was changed|has format|is not a receipt"):
                Receipt.read(copy)
    path.write_text(json.dumps(document | {"unheard_of": 1}))
    with pytest.raises(InputError, match="nothing in a receipt is called 'unheard_of'"):
        Receipt.read(copy)


def test_a_forged_hash_is_found(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy / "receipt.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"weights_sha256": "0" * 64}))
    assert command_line._command(["audit", str(copy)]) == 2
    assert "weights_sha256 at its top is '00000" in capsys.readouterr().err
    document["checkpoints"]["6"]["weights_sha256"] = document["weights_sha256"] = "0" * 64
    path.write_text(json.dumps(document))
    assert command_line._command(["audit", str(copy)]) == 1
    assert "and the receipt says 000000000000" in capsys.readouterr().out


@pytest.mark.parametrize("empty", [HASH_OF_NOTHING, "", None])
def test_the_hash_of_nothing_is_refused(
    copy: Path, empty: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy / "receipt.json"
    document = json.loads(path.read_text())
    document["checkpoints"]["3"]["weights_sha256"] = empty
    path.write_text(json.dumps(document))
    for command in (["audit", str(copy)], ["verify", "--receipt", str(copy)]):
        assert command_line._command(command) == 2
        assert "weights_sha256" in capsys.readouterr().err


def test_the_chain_of_every_checkpoint_is_followed(copy: Path) -> None:
    receipt = Receipt.read(copy)
    receipt.saved(3, replace(receipt.checkpoints[3], chain="0" * 64)).write(copy)
    assert any("chain of samples at step 3" in problem for problem in audit(copy).problems)


def test_weights_that_were_changed_with_their_file_s_hash(copy: Path) -> None:
    """The files' hashes in a manifest are made anew; the hash of the weights is not."""
    from safetensors.torch import load_file, save_file

    from paceline.checkpoint.durable import hash_file
    from paceline.checkpoint.manifest import Manifest

    place = copy / "checkpoints/step-6"
    part = place / "part-0.safetensors"
    tensors = {name: value + 1 for name, value in load_file(part).items()}
    save_file(tensors, part)
    manifest = Manifest.read(place)
    replace(manifest, files={**manifest.files, part.name: hash_file(part)}).write(place)
    problems = audit(copy).problems
    assert any("its weights have the hash" in problem and "its manifest" in problem for problem in problems)
    report = verify_receipt(SegmentReplay(folder=copy, strategy="single"))
    assert not report.holds
    assert all(one.holds for one in report.compared)


def test_records_that_no_process_made_are_no_part_of_the_run(copy: Path) -> None:
    path = ledger.paths(copy)[ledger.Origin(1, 0)]
    sound = path.read_bytes()
    garbage = np.random.default_rng(0).bytes(4 * ledger.RECORD.itemsize)
    path.write_bytes(sound + garbage)
    assert any("4 records that belong to no start" in problem for problem in audit(copy).problems)
    path.write_bytes(sound + bytes(ledger.RECORD.itemsize) + 2 * garbage)
    assert any("8 records after one that was never" in problem for problem in audit(copy).problems)
