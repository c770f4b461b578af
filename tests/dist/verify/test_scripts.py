"""Plain DDP scripts: a sound one is told so, and each well-known fault is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import InputError, WorkerFailedError
from paceline.verify.script.check import ScriptRequest, verify_script
from paceline.verify.script.report import ScriptReport

SCRIPT = str(Path(__file__).with_name("plain_ddp.py"))


def check(*arguments: str) -> ScriptReport:
    return verify_script(ScriptRequest(script=SCRIPT, arguments=list(arguments), workers=2, threads=1))


def test_a_sound_script() -> None:
    report = check()
    assert report.holds
    assert report.findings == []
    assert (report.found, report.steps) == ("numeric", (6, 6))
    assert 0 < report.relative < 1e-5
    assert any("6 optimizer steps" in text for text in report.observed)


def test_a_batch_that_grows_with_the_workers_is_compared_with_one_as_large() -> None:
    report = check("--batch", "local")
    assert report.holds
    assert report.steps == (6, 6)
    assert [finding.probe for finding in report.findings] == ["batch_of_world"]


@pytest.mark.parametrize(
    ("fault", "probe", "words"),
    [
        ("no sampler", "no_distributed_sampler", "each of 2 ranks read all 24"),
        ("no set_epoch", "same_order", "2 of 2 epochs"),
        ("unseeded", "unseeded_weights", "0.weight of rank 0 starts from other values"),
        ("unmasked weights", "initial_weights", "nor afterwards"),
        ("schedule", "schedule", "0.09 in one process and 0.081 on 2 workers"),
        ("schedule on one", "schedule", "on rank 0"),
        ("max_grad_norm", "clipped_early", "clip_grad_norm_ found another gradient of 0.weight"),
        ("hook", "clipped_early", "not linear"),
        ("constant", "scaled", "one process's times 0.5"),
    ],
)
def test_a_fault_is_named(fault: str, probe: str, words: str) -> None:
    report = check("--fault", fault)
    assert not report.holds
    first = next(finding for finding in report.findings if not finding.harmless)
    assert first.probe == probe, report.findings
    assert words in first.evidence


def test_weights_that_ddp_makes_agree_are_told_and_fail_nothing() -> None:
    report = check("--fault", "weights")
    assert report.holds
    assert [(finding.probe, finding.harmless) for finding in report.findings] == [("initial_weights", True)]


def test_padding_is_named() -> None:
    report = check("--samples", "21")
    assert report.found == "diverged"
    assert "padding" in [finding.probe for finding in report.findings]
    assert "21 samples on 2 ranks" in report.findings[0].evidence


def test_padding_is_not_blamed_for_what_it_cannot_do() -> None:
    report = check("--fault", "split")
    assert not report.holds
    told = [(one.probe, one.cause) for one in report.findings]
    assert told[0][0] == "parts_differ", told
    assert not any("pad" in cause for _, cause in told)


def test_unequal_batches_are_a_mean_of_means() -> None:
    report = check("--samples", "21", "--fault", "unequal")
    assert report.found == "diverged"
    first = report.findings[0]
    assert first.probe == "mean_of_means"
    assert "batches of 3, 2 samples" in first.evidence


def test_a_script_without_a_loader_is_known_by_the_rows_of_its_steps(tmp_path: Path) -> None:
    script = tmp_path / "drawn.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.randn(5, 3)).sum().backward()\n"
        "optimizer.step()\n"
        "dist.destroy_process_group()\n"
    )
    report = verify_script(ScriptRequest(script=str(script), workers=2))
    assert [finding.probe for finding in report.findings] == ["rows"]
    assert "10 rows by 2 workers together in step 0, and with 5 by one" in report.findings[0].evidence
    assert any(text.startswith("the samples: no DataLoader") for text in report.unobserved)


def test_a_script_that_fails_says_so_itself(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise KeyError('a fault of its own')\n")
    with pytest.raises(WorkerFailedError) as caught:
        verify_script(ScriptRequest(script=str(script), workers=2))
    assert "a fault of its own" in caught.value.trace


def test_a_script_that_learns_nothing(tmp_path: Path) -> None:
    script = tmp_path / "idle.py"
    script.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(InputError, match="made no optimizer step"):
        verify_script(ScriptRequest(script=str(script), workers=2))
