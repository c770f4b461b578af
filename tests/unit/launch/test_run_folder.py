"""What a launch leaves of its folder: only files that it wrote itself ever go, and no folder that holds anything else."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from paceline.errors import InputError
from paceline.launch.base import Outcome
from paceline.launch.failures import WorkerFailure
from paceline.launch.run_folder import RunFolder, claim
from paceline.training import folder
from paceline.training.options import RunOptions

REFUSED = Outcome(results=(), failure=WorkerFailure(rank=0, host="here", kind="input", message="no"))
WRITTEN = (
    "logs/rank-0.log",
    "ledger/rank-0-from-0.bin",
    "tensorboard/events.out.tfevents.1.here",
    "profile/trace.json",
    "events.jsonl",
    "receipt.json",
    "workers.json",
)


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


def test_a_refused_run_takes_its_own_files_and_the_folders_that_it_made(tmp_path):
    with RunFolder(tmp_path / "sweep" / "deep" / "a", {}) as made:
        write(made.path, *WRITTEN)
        made.finish(REFUSED)
    assert list(tmp_path.iterdir()) == []


def test_logs_of_a_launch_without_a_folder_stay_where_it_failed_and_go_where_it_was_killed(capsys):
    code = Outcome(results=(), failure=WorkerFailure(rank=0, host="here", kind="code", message="no"))
    with RunFolder(None, {}) as made:
        write(made.path, "logs/rank-0.log")
        made.finish(code)
    kept = Path(capsys.readouterr().err.rpartition(" ")[2].strip())
    assert files(kept) == {"rank-0.log"}
    assert not made.path.exists()
    shutil.rmtree(kept.parent)
    reader, writer = os.pipe()
    killed = os.fork()
    if not killed:
        os.write(writer, str(RunFolder(None, {}).__enter__().path).encode())
        os._exit(0)
    os.waitpid(killed, 0)
    left = Path(os.read(reader, 1000).decode())
    os.close(reader)
    os.close(writer)
    assert left.exists()
    with RunFolder(None, {}):
        assert not left.exists()


def test_logs_that_cannot_be_kept_are_one_line_and_the_failure_stays(tmp_path, monkeypatch, capsys):
    code = Outcome(results=(), failure=WorkerFailure(rank=0, host="here", kind="code", message="no"))
    with RunFolder(None, {}) as made:
        shutil.rmtree(made.path / "logs")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        made.finish(code)
        assert "is lost: it cannot be moved" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        made.finish(code)
        assert "is lost: no folder can be made" in capsys.readouterr().err


def test_a_refused_run_leaves_what_others_put_beside_it_or_into_it_meanwhile(tmp_path):
    with RunFolder(tmp_path / "sweep" / "a", {}) as made:
        write(made.path, *WRITTEN)
        write(tmp_path, "sweep/b/checkpoints/step-3/part-0.safetensors", "sweep/a/notes.txt")
        write(tmp_path, "sweep/a/logs/mine.txt", "sweep/a/ledger/mine.bin")
        made.finish(REFUSED)
    assert files(tmp_path) == {
        "sweep/b/checkpoints/step-3/part-0.safetensors",
        "sweep/a/notes.txt",
        "sweep/a/logs/mine.txt",
        "sweep/a/ledger/mine.bin",
    }


def test_a_refused_run_leaves_what_lay_there_before(tmp_path):
    write(tmp_path, "out/logs/rank-0.log", "out/logs/theirs.log", "out/data.csv", "out/spec.json")
    before = files(tmp_path)
    with RunFolder(tmp_path / "out", {"new": 1}) as made:
        write(made.path, *WRITTEN)
        made.finish(REFUSED)
    assert files(tmp_path) == before
    assert (tmp_path / "out" / "spec.json").read_text() == "x"


def test_empty_folders_that_were_there_before_stay(tmp_path):
    (tmp_path / "sweep" / "a" / "logs").mkdir(parents=True)
    with RunFolder(tmp_path / "sweep" / "a", {}) as made:
        made.finish(REFUSED)
    assert [path.name for path in (tmp_path / "sweep" / "a").iterdir()] == ["logs"]


@pytest.mark.parametrize(
    "failure",
    [
        WorkerFailure(rank=0, host="here", kind="disk", message="the disk is full"),
        WorkerFailure(rank=0, host="here", kind="code", message="ValueError"),
        WorkerFailure(rank=0, host="here", kind="input", message="step 7 was left without apply", step=7),
    ],
)
def test_a_run_that_has_begun_keeps_everything_however_it_ends(tmp_path, failure):
    with RunFolder(tmp_path / "a", {}) as made:
        write(made.path, *WRITTEN)
        made.finish(Outcome(results=(), failure=failure))
    assert files(tmp_path / "a") == {*WRITTEN, "spec.json"}


STARTED, STEPPED = '{"kind":"run_started"}\n{"kind":"note"}\n', '{"kind":"step"}\n'


@pytest.mark.parametrize(
    ("events", "at_once", "kept"),
    [
        (STARTED, False, False),
        (STARTED, True, True),  # what was done may not have been written yet
        (STARTED + STEPPED, False, True),
        (STARTED + '{"ki', False, True),
    ],
)
def test_a_run_interrupted_before_its_first_step_leaves_the_folder_free(
    tmp_path, capsys, events, at_once, kept
):
    write(tmp_path / "a", "notes.txt")
    with RunFolder(tmp_path / "a", {}) as made:
        write(made.path, *WRITTEN)
        (made.path / "events.jsonl").write_text(events)
        made.finish(Outcome(results=(), interrupted=2, at_once=at_once))
    assert files(tmp_path / "a") == {"notes.txt", *((*WRITTEN, "spec.json") if kept else ())}
    assert ("no step was finished" in capsys.readouterr().err) is not kept


def test_a_checkpoint_or_another_runs_events_are_never_taken_away(tmp_path):
    for name, before in (("a", "checkpoints/step-4/x"), ("b", "events.jsonl")):
        write(tmp_path / name, before)
        with RunFolder(tmp_path / name, {}) as made:
            (made.path / "events.jsonl").write_text(STARTED)
            made.finish(Outcome(results=(), interrupted=2))
        assert files(tmp_path / name) == {before, "events.jsonl", "spec.json"}


def test_two_launches_never_share_a_folder(tmp_path):
    with RunFolder(tmp_path / "a", {"first": True}) as first:
        with pytest.raises(InputError, match=r"another launch is at work in .*a\. .*choose another --out"):
            RunFolder(tmp_path / "a", {"second": True}).__enter__()
        assert "first" in (tmp_path / "a" / "spec.json").read_text()
        first.finish(Outcome(results=()))
    with RunFolder(tmp_path / "a", {"second": True}):
        pass


@pytest.mark.parametrize("resume", [True, False])
def test_nobody_is_told_to_delete_a_run_that_is_in_progress(tmp_path, resume):
    out = tmp_path / "run"
    (out / "checkpoints").mkdir(parents=True)
    (out / "events.jsonl").touch()
    options = RunOptions(out=out, resume=resume)
    with pytest.raises(InputError, match=f"delete {out}"):
        folder.check(options)
    lock = claim(out)
    try:
        with pytest.raises(InputError, match="another launch is at work"):
            folder.check(options)
    finally:
        os.close(lock)


def test_a_folder_that_cannot_be_made_leaves_no_parents_behind(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot be written"):
        RunFolder(tmp_path / "file" / "below" / "deeper", {}).__enter__()
    with pytest.raises(InputError, match="cannot be written"):
        RunFolder(tmp_path / "new" / ("x" * 300), {}).__enter__()
    assert files(tmp_path) == {"file"}
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_cleared_under_a_launch_is_told_in_one_line(tmp_path):
    def clear():
        with RunFolder(tmp_path / "a", {}) as made:
            shutil.rmtree(made.path)
            (made.path / "workers.json").write_text("[]")

    with pytest.raises(InputError, match=r"spec\.json has vanished.*`if __name__ == \"__main__\":`\.$"):
        clear()


def test_a_refusal_in_a_folder_that_is_gone_is_the_one_that_is_told(tmp_path):
    write(tmp_path, "a/spec.json")
    with RunFolder(tmp_path / "a", {}) as made:
        shutil.rmtree(made.path)
        made.finish(REFUSED)
    assert files(tmp_path) == set()


def test_a_run_that_ends_well_can_be_gone_on_with(tmp_path):
    with RunFolder(tmp_path / "a", {"threads": 2}) as made:
        write(made.path, "checkpoints/step-3/part-0.safetensors")
        (made.path / "spec.json").unlink()
        made.finish(Outcome(results=(0,)))
    assert json.loads((tmp_path / "a" / "spec.json").read_text()) == {"threads": 2}
