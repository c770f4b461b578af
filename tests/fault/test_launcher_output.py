"""Whoever reads a launcher's output may pause, and its disk may be full: the run goes on, and says once what is lost."""

import contextlib
import os
import re
import subprocess

import pytest

from paceline.launch.base import Outcome
from paceline.launch.failures import WorkerFailure
from paceline.launch.run_folder import RunFolder
from tests.dist.launch.processes import PACELINE, started

NOISY = """
import time, torch, paceline
class Noisy(paceline.Task):
    batch_size = 4
    def __init__(self, noise: int = 0, nap: float = 0.0): self.noise, self.nap = noise, nap
    def model(self): return torch.nn.Linear(2, 1)
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.001)
    def train_data(self): return list(torch.ones(400, 2))
    def loss(self, model, batch):
        print("x" * self.noise)
        time.sleep(self.nap)
        return paceline.Loss.mean(model(batch).sum(-1))
"""
STEPS = 60


def train(noise, *more, workers=2):
    steps = ("--set", f"noise={noise}", "--steps", str(STEPS))
    return (*PACELINE, "train", "task.py:Noisy", "--workers", str(workers), *steps, *more)


@contextlib.contextmanager
def small_disk(path, size="1m", *options):
    """A disk of its own in a folder; skips where none may be mounted."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)  # noqa: S607


def read(path):
    return path.read_text() if path.exists() else ""


def test_a_reader_that_pauses_does_not_stop_the_run_and_is_told_how_much_it_missed(tmp_path):
    (tmp_path / "task.py").write_text(NOISY)
    command = train(50_000, "--out", "run")
    with started(*command, folder=tmp_path) as run:  # nobody reads its pipe, as behind a stopped pager
        run.wait_until(lambda: f'"step":{STEPS},' in read(tmp_path / "run" / "events.jsonl"))
        status, out, err = run.end()
    assert status == 0, err
    (said,) = re.findall(r"note: (\d+) lines of output were dropped", err)
    shown = len(re.findall("x{50000}\n", out))
    assert shown < STEPS
    assert int(said) >= 1
    assert len(re.findall("x{50000}\n", read(tmp_path / "run" / "logs" / "rank-0.log"))) == STEPS


def test_a_reader_that_never_comes_back_does_not_keep_the_workers(tmp_path):
    (tmp_path / "task.py").write_text(NOISY)
    with started(*train(50_000, "--out", "run"), folder=tmp_path) as run:
        run.wait_until(lambda: not run.forked() and (tmp_path / "run" / "checkpoints").exists())
        assert (tmp_path / "run" / "checkpoints" / f"step-{STEPS}").is_dir()


def test_a_reader_that_went_away_ends_the_run_without_more_output(tmp_path):
    (tmp_path / "quiet.py").write_text("import time\nprint('one'); print('two'); time.sleep(600)\n")
    read_end, write_end = os.pipe()
    os.close(read_end)
    with subprocess.Popen(
        [*PACELINE, "run", "quiet.py"], cwd=tmp_path, stdout=write_end, stderr=subprocess.PIPE
    ) as run:
        os.close(write_end)
        _, err = run.communicate(timeout=100)
    assert (run.returncode, b"Traceback" in err) == (1, False)


def test_a_full_disk_costs_output_and_not_the_run(tmp_path):
    (tmp_path / "task.py").write_text(NOISY)
    with (
        small_disk(tmp_path / "small"),
        started(*train(60_000, "--out", "small/run"), folder=tmp_path) as run,
    ):
        status, _, err = run.end()
        events = read(tmp_path / "small" / "run" / "events.jsonl")
    # Without room for the last checkpoint a run fails, in words; it has taken all its steps.
    assert (status, "Traceback" in err) == (1, False), err
    assert f"All {STEPS} steps were taken" in err
    assert err.count("logs/rank-") == 1
    assert "cannot be written (No space left on device). The run goes on" in err
    assert '"kind":"run_started"' in events


def test_room_that_comes_back_is_used(tmp_path):
    (tmp_path / "task.py").write_text(NOISY)
    with small_disk(tmp_path / "small", "2m"):
        filling = tmp_path / "small" / "filling"
        with started(*train(2000, "--out", "small/run", "--set", "nap=0.1"), folder=tmp_path) as run:
            run.wait_until(lambda: '"kind":"step"' in read(tmp_path / "small" / "run" / "events.jsonl"))
            with contextlib.suppress(OSError), filling.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            while "cannot be written" not in (line := run.process.stderr.readline()):
                assert line, "the run ended without a word about the disk"
            filling.unlink()
            status, _, err = run.end()
        assert status == 0, err
        assert len(re.findall("x{2000}\n", read(tmp_path / "small" / "run" / "logs" / "rank-0.log"))) == STEPS


@pytest.mark.parametrize(
    ("limit", "workers", "words"),
    [(24, "2", "2 workers need about 56 open files"), (16, "1", "1 worker needs about 50 open files")],
)
def test_too_few_open_files_are_one_line(limit, workers, words, tmp_path):
    shell = ("bash", "-c", f'ulimit -n {limit}; exec "$@"', "-")
    with started(
        *shell, *PACELINE, "train", "digits", "--workers", workers, "--steps", "1", folder=tmp_path
    ) as run:
        status, _, err = run.end()
    assert (status, len(err.splitlines()), "Traceback" in err) == (2, 1, False), err
    assert words in err
    assert sorted(tmp_path.iterdir()) == []


def test_a_temporary_folder_that_is_full_costs_only_what_needs_it(tmp_path):
    with small_disk(tmp_path / "small", "1m", "nr_inodes=2"):
        (tmp_path / "small" / "last").touch()
        environment = os.environ | {"TMPDIR": str(tmp_path / "small")}
        command = [*PACELINE, "train", "digits", "--steps", "1", "--out", str(tmp_path / "run")]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr


FINISHED = Outcome(results=(1,))
REFUSED = Outcome(results=(), failure=WorkerFailure(rank=0, host="here", kind="input", message="no"))


@pytest.mark.parametrize("outcome", [FINISHED, REFUSED], ids=["finished", "refused"])
def test_a_full_disk_at_the_end_of_a_run_costs_its_spec_alone(outcome, tmp_path, capsys):
    with small_disk(tmp_path / "small", "256k") as disk:
        with RunFolder(disk / "run", {"of": "the run that is there"}) as made:
            (made.path / "checkpoints" / "step-4").mkdir(parents=True)
            made.finish(FINISHED)
        spec = disk / "run" / "spec.json"
        with RunFolder(disk / "run", {"asked": "now"}) as made:
            if outcome is FINISHED:
                spec.unlink()
            with contextlib.suppress(OSError), (disk / "full").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            made.finish(outcome)
        said = capsys.readouterr().err
        assert "spec.json cannot be written (No space left on device), so --resume" in said
        assert said.count("\n") == 1
        left = {one.name for one in (disk / "run").iterdir()}
        assert left == {"checkpoints", "logs"} | ({"spec.json"} if outcome is REFUSED else set())
        assert outcome is FINISHED or "asked" in spec.read_text(), "the file is whole"
