"""What is written for a batch system, and what is refused before anything is submitted."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.errors import InputError
from paceline.launch.control import owned
from paceline.launch.submit import durations, record, slurm
from paceline.launch.submit.progress import read_progress
from paceline.launch.submit.record import JobRecord
from paceline.world import env


@pytest.fixture
def submit(monkeypatch, capsys, tmp_path):
    """Call `paceline submit` in a folder of its own, and give its status and what it prints."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["paceline", "submit", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main.run()
        return ended.value.code, *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("text", "expected", "slurms"),
    [
        ("2h", 7200, "02:00:00"),
        ("90m", 5400, "01:30:00"),
        ("1d12h", 129600, "1-12:00:00"),
        ("1H30M", 5400, "01:30:00"),
        ("45s", 45, "00:00:45"),
    ],
)
def test_lengths_of_time(text, expected, slurms):
    assert durations.seconds("--time", text) == expected
    assert durations.for_slurm(expected) == slurms


@pytest.mark.parametrize(
    "text", ["", "2", "h", "2 hours", "-2h", "30m2h", "0h", "999999d", "2h\n#SBATCH --x"]
)
def test_what_is_no_length_of_time(text):
    with pytest.raises(InputError, match="--time"):
        durations.seconds("--time", text)


def script_of(submit, *arguments):
    status, out, err = submit("digits", "--on", "slurm", "--dry-run", *arguments)
    assert (status, err) == (0, "")
    checked = subprocess.run(["/bin/bash", "-n"], input=out, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", out, re.MULTILINE))
    return out, options


def test_the_script_of_several_nodes(submit, tmp_path):
    text, options = script_of(
        submit,
        *"--nodes 4 --gpus-per-node 8 --time 2h --shards 64 --steps 9 --set lr=0.1 --no-rebalance".split(),
    )
    assert options["nodes"] == "4"
    assert options["gpus-per-node"] == "8"
    assert options["time"] == "02:00:00"
    assert options["signal"] == "B:USR1@60"  # --grace and half a minute
    assert {"requeue", "no-kill"} <= options.keys()
    assert options["output"].startswith(f"{tmp_path}/runs/digits-")
    (train,) = re.findall(r"-m paceline train .*", text)
    for words in (
        "--workers 8",
        "--steps 9",
        "--set lr=0.1",
        "--no-rebalance",
        '--nodes 4 --rendezvous "$leader:$port"',
    ):
        assert words in train
    assert 'export PACELINE_SECRET_FILE="$run/secret"' in text
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_comes_back_again_and_again_gives_up(submit):
    text, _ = script_of(submit, "--max-requeues", 3)
    head = text.partition("\ncd ")[0] + "\necho goes on\n"
    for count, said in (("0", "goes on\n"), ("3", "goes on\n"), ("4", "")):
        ended = subprocess.run(
            ["/bin/bash", "-c", head],
            env={"SLURM_RESTART_COUNT": count, "SLURM_JOB_ID": "7"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ended.stdout, ended.returncode) == (said, 0 if said else 1)
        assert bool(said) or "error: this job was queued again 3 times (--max-requeues)" in ended.stderr


def test_one_node_needs_no_meeting_point_and_no_secret(submit):
    text, options = script_of(submit, "--workers", 2, "--grace", 100.5, "--threads", 3)
    assert options["signal"] == "B:USR1@131"
    assert options["cpus-per-task"] == "6"
    assert "time" not in options
    assert "rendezvous" not in text
    assert "SECRET" not in text


def test_a_range_of_nodes_and_more_options_of_sbatch(submit):
    _, options = script_of(
        submit,
        "--nodes",
        "2:4",
        "--shards",
        8,
        "--sbatch=--constraint=h100",
        "--sbatch=--comment=two words",
        "--partition",
        "gpu",
    )
    assert (options["nodes"], options["constraint"], options["partition"]) == ("2-4", "h100", "gpu")
    assert options["comment"] == '"two words"'


def test_a_folder_with_any_name_and_a_task_in_a_file(submit, tmp_path):
    (tmp_path / "my task.py").write_text("")
    status, out, _ = submit("my task.py:Task", "--on", "slurm", "--dry-run", "--out", "it's 100 % $HOME")
    assert status == 0
    shown = subprocess.run(
        ["/bin/bash", "-c", out.partition("# Ends")[0] + 'printf "%s|" "$run" "$PWD"'],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    assert shown.stdout == f"{tmp_path}/it's 100 % $HOME|{tmp_path}|"
    assert f"train '{tmp_path}/my task.py:Task' " in out
    assert f'--output="{tmp_path}/it\'s 100 %% $HOME/logs/slurm-%j.log"' in out
    assert "--job-name=paceline-it-s-100-HOME\n" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits"], "--on is missing"),
        (["digits", "--on", "lsf"], "unknown --on 'lsf'"),
        (["--on", "slurm"], "Missing argument 'task'. See paceline submit --help."),
        (["digts", "--on", "slurm"], "Did you mean 'digits'?"),
        (["digits", "--on", "slurm", "--set", "widht=1"], "Did you mean 'width'?"),
        (["digits", "--on", "kubernetes", "--dry-run", "--set", "widht=1"], "Did you mean 'width'?"),
        (["digits", "--on", "slurm", "--time", "two"], "--time 'two' is no length of time"),
        (
            ["digits", "--on", "slurm", "--time", "1m"],
            "--time 1m is too short: a job is told to save 60 s before",
        ),
        (["digits", "--on", "slurm", "--nodes", "4:2"], "--nodes 4:2 is no number of machines"),
        (["digits", "--on", "kubernetes", "--dry-run", "--nodes", "0:2"], "--nodes 0:2 is no number"),
        (["digits", "--on", "slurm", "--nodes", "0"], "--nodes 0 is no number of machines"),
        (["digits", "--on", "slurm", "--nodes", "4", "--workers", "9"], "36 workers for 8 shards"),
        (["digits", "--on", "slurm", "--partition", "a b"], "--partition 'a b' is no such name"),
        (["digits", "--on", "slurm", "--sbatch", "constraint"], "is no option of sbatch"),
        (["digits", "--on", "slurm", "--rendezvous", "a:1"], "--rendezvous is for the job to decide"),
        (["digits", "--on", "slurm", "--resume"], "--resume needs the folder"),
        (["digits", "--on", "kubernetes"], "add --dry-run"),
        (["digits", "--on", "kubernetes", "--dry-run", "--kind", "pod"], "unknown --kind 'pod'"),
        (
            ["digits", "--on", "kubernetes", "--dry-run", "--claim", "My_Claim"],
            "no name that Kubernetes takes",
        ),
        (
            ["digits", "--on", "kubernetes", "--dry-run", "--nodes", "2", "--no-elastic"],
            "which --no-elastic does not survive",
        ),
        (["digits", "--on", "slurm", "--no-elastic"], "which its workers cannot with --no-elastic"),
        (["digits", "--on", "slurm", "--nodes", "2", "--no-elastic"], "Leave it out."),
        (
            ["digits", "--on", "slurm", "--out", "a\nscancel --me #"],
            "'a\\nscancel --me #' has signs that cannot",
        ),
        (["digits", "--on", "slurm", "--dry-run", "--out", "a\nb"], "cannot be printed"),
        (["digits", "--on", "kubernetes", "--dry-run", "--out", "a\u2028b"], "cannot be printed"),
    ],
)
def test_what_is_refused(arguments, message, submit, tmp_path):
    if "digits" in arguments and "--workers" in arguments:
        arguments = [*arguments, "--shards", "8"]
    status, out, err = submit(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_where_there_is_no_slurm_nothing_is_left(submit, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, err = submit("digits", "--on", "slurm", "--out", "run")
    assert (status, "there is no sbatch here" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []


def program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """Put a stand-in for sbatch into the PATH."""

    def make(text):
        program(tmp_path / "bin" / "sbatch", text)
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")

    return make


@pytest.mark.parametrize(
    "text",
    [
        "exec sleep 60",
        "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1",
        "kill -KILL $$",
    ],
)
def test_where_sbatch_does_not_answer_there_may_be_a_job(text, sbatch, submit, tmp_path, monkeypatch):
    sbatch(text)
    monkeypatch.setattr(slurm, "TIMEOUT_S", 0.5)
    status, _, err = submit("digits", "--on", "slurm", "--out", "run")
    assert (status, "So nobody knows whether there is a job. Look for paceline-run" in err) == (2, True)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"job.json", "job.sh", "logs"}
    status, _, err = submit("digits", "--on", "slurm", "--out", "run")
    assert (status, "was ended while it submitted run. So nobody knows" in err) == (2, True)


def test_ctrl_c_while_sbatch_runs_leaves_the_record(sbatch, tmp_path):
    sbatch("kill -INT $PPID; exit 130")  # a terminal interrupts both
    command = [sys.executable, "-m", "paceline", "submit", "digits", "--on", "slurm", "--out", "run"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 130
    found = record.find(tmp_path / "run")
    assert (found.name, found.id) == ("paceline-run", None)


def test_what_sbatch_refuses_is_taken_back(sbatch, submit, tmp_path):
    sbatch("echo 'invalid partition' >&2; exit 1")
    assert submit("digits", "--on", "slurm", "--nodes", 2, "--out", "a/run")[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_the_command_that_is_named_can_be_pasted(sbatch, submit):
    sbatch("echo 7")
    status, out, _ = submit("digits", "--on", "slurm", "--out", "the run")
    assert (status, out) == (0, "job 7 is submitted. `paceline status 'the run'` shows it.\n")


class Job:
    """A batch script that runs here, with stand-ins for SLURM's commands and for the `paceline stop` of its traps."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder = folder
        self.run = Path(re.findall(r"#SBATCH --output=\"?(.*)/logs/", script)[0].replace("\\\\", "\\"))
        for name in ("scontrol", "scancel"):
            program(folder / "bin" / name, f'echo {name} "$@" >> "{folder}/told"')
        program(folder / "bin" / "srun", f'echo "$@" > "{folder}/srun"')
        self.script = re.sub(r"^python=.*$", f"python={folder}/bin/python", script, flags=re.MULTILINE)

    def start(self, job: str = "7") -> "subprocess.Popen[str]":
        variables = {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": job}
        return subprocess.Popen(
            ["/bin/bash", "-c", self.script], env=variables, stderr=subprocess.PIPE, text=True
        )

    def trains(self, job: str = "7") -> tuple[int, bool | str]:
        """Run it; give its status, and whether it resumes or what it says."""
        (self.folder / "srun").unlink(missing_ok=True)
        started = self.start(job)
        _, err = started.communicate()
        said = (self.folder / "srun").read_text() if not err else ""
        return started.returncode, err or said.endswith(" --resume\n")


@pytest.fixture
def job(submit, tmp_path):
    def make(*arguments):
        status, out, err = submit("digits", "--on", "slurm", "--dry-run", *arguments)
        assert (status, err) == (0, "")
        return Job(tmp_path, out)

    return make


@pytest.mark.parametrize(("status", "told"), [(143, ["scontrol requeue 7"]), (0, []), (1, [])])
@pytest.mark.parametrize("quick", [True, False], ids=["ends-while-told", "ends-later"])
def test_the_status_is_that_of_the_step(status, told, quick, job, tmp_path):
    one = job("--out", "run")
    step, stop = tmp_path / "step", tmp_path / "stop"
    program(
        tmp_path / "bin" / "srun",
        f'echo $$ > "{step}"; until [ -e "{stop}" ]; do sleep 0.01; done; exit {status}',
    )
    told_to_end = f'touch "{stop}"; while kill -0 "$(cat {step})" 2> /dev/null; do sleep 0.01; done'
    program(
        tmp_path / "bin" / "python",
        told_to_end if quick else f'(sleep 0.2; touch "{stop}") > /dev/null 2>&1 &',
    )
    started = one.start()
    while not (step.exists() and step.read_text()):
        time.sleep(0.01)
    started.send_signal(signal.SIGUSR1)
    assert (started.communicate()[1], started.returncode) == ("", status)
    assert ((tmp_path / "told").read_text().splitlines() if told else told) == told
    assert (tmp_path / "told").exists() == bool(told)


@pytest.mark.parametrize("name", ["run", "a[1]*?", "it's 100 $HOME"])
def test_a_job_goes_on_with_what_it_began_and_with_nothing_else(name, job):
    one = job("--out", name)
    assert one.run.name == name
    remedy = "Choose another --out, or submit with --resume to go on with it."
    refused = (2, f"error: {one.run} holds a run that this job did not begin. {remedy}\n")
    assert one.trains() == (0, False)
    (one.run / "ledger").mkdir()
    (one.run / "events.jsonl").touch()
    assert one.trains() == (0, False)  # again, because nothing was saved
    assert {path.name for path in one.run.iterdir()} == {"begun-by"}
    (one.run / "events.jsonl").touch()
    (one.run / "checkpoints" / "step-5").mkdir(parents=True)
    assert one.trains() == (0, True)
    assert one.trains("8") == refused
    (one.run / "begun-by").unlink()  # trained by somebody else while the job was waiting
    assert one.trains() == refused
    assert (one.run / "events.jsonl").exists()
    told = job("--out", name, "--resume")
    assert told.trains("8") == told.trains("8") == (0, True)
    assert one.trains() == refused


def test_another_job_may_begin_where_one_has_ended_before_it_began(sbatch, submit, tmp_path):
    sbatch("echo 8")
    program(tmp_path / "bin" / "scontrol", "echo JobState=FAILED")
    (tmp_path / "run").mkdir()
    JobRecord(on="slurm", name="it", id="7").write(tmp_path / "run")
    (tmp_path / "run" / "begun-by").write_text("7\n")
    assert submit("digits", "--on", "slurm", "--out", "run")[0] == 0
    assert not (tmp_path / "run" / "begun-by").exists()


def test_a_folder_takes_one_job_at_a_time(tmp_path):
    JobRecord(on="slurm", name="it").claim(tmp_path)
    with pytest.raises(InputError, match="another command submits"):
        JobRecord(on="slurm", name="it").claim(tmp_path)
    with pytest.raises(InputError, match="nobody knows whether there is a job"):
        record.read(tmp_path)
    JobRecord(on="slurm", name="it", id="7").write(tmp_path)
    found, job = record.read(tmp_path)
    assert (found.name, job) == ("it", "7")
    found.retire(tmp_path)
    assert record.find(tmp_path) is None
    with pytest.raises(InputError, match="no job was submitted"):
        record.read(tmp_path)


def test_a_damaged_record_is_one_line(tmp_path):
    for wrong in ("", "[]", '{"on": 1}', '{"on": "slurm", "name": "x", "id": 7}', '{"more": 1}'):
        (tmp_path / record.NAME).write_text(wrong)
        with pytest.raises(InputError, match="cannot be read"):
            record.find(tmp_path)


@pytest.mark.parametrize("wrong", ["--me", "-uroot", "", "1,2", "7 8", "../x", "\u0667"])
def test_what_is_no_number_of_a_job_is_told_to_no_program_of_slurms(wrong, tmp_path):
    JobRecord(on="slurm", name="it", id=wrong).write(tmp_path)
    with pytest.raises(InputError, match="must be the number of a job"):
        record.read(tmp_path)


@pytest.mark.parametrize("said", ["", "hello"])
def test_where_sbatch_gives_no_number_there_may_be_a_job(said, sbatch, submit, tmp_path):
    sbatch(f"echo '{said}'")
    status, _, err = submit("digits", "--on", "slurm", "--out", "run")
    assert (status, "So nobody knows whether there is a job. Look for paceline-run" in err) == (2, True)
    assert record.find(tmp_path / "run").id is None


@pytest.mark.parametrize(
    ("said", "state", "restarts"),
    [
        ("JobId=7 JobState=RUNNING Restarts=2 Command=/a JobState=FAILED/job.sh", "RUNNING", 2),
        ("JobId=7 JobState=PENDING Restarts=N/A", "PENDING", 0),
        ("", "FORGOTTEN", 0),
    ],
)
def test_what_scontrol_says_of_a_job(said, state, restarts, tmp_path, monkeypatch):
    program(tmp_path / "bin" / "scontrol", f"echo '{said}'")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    found = slurm.state("7")
    assert (found.state, found.restarts) == (state, restarts)


def test_what_sbatch_prints_before_the_number_counts_for_nothing(sbatch, submit, tmp_path):
    sbatch("echo 'hello from a plugin'; echo '7;cluster'")
    assert submit("digits", "--on", "slurm", "--out", "run")[0] == 0
    assert record.find(tmp_path / "run").id == "7"


def test_the_secret_is_for_its_owner_alone(tmp_path):
    path = tmp_path / "secret"
    slurm._write_secret(path)
    text = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(text.strip()) == 64
    slurm._write_secret(path)  # a job that is submitted again has the same
    assert path.read_text() == text
    path.chmod(0o644)
    with pytest.raises(InputError, match="others may read the secret"):
        slurm._write_secret(path)


def test_the_status_of_a_run_that_was_not_submitted(tmp_path, monkeypatch, capsys):
    def status():
        monkeypatch.setattr("sys.argv", ["paceline", "status", str(tmp_path), "--json"])
        with pytest.raises(SystemExit) as ended:
            main.run()
        out, err = capsys.readouterr()
        return err if ended.value.code else (json.loads(out)["state"], json.loads(out)["step"])

    assert "holds no run, and no job was submitted for it" in status()
    (tmp_path / "spec.json").write_text("{}")
    with owned(tmp_path, "srun"):
        assert status() == ("RUNNING", None)
        (tmp_path / "events.jsonl").write_text('{"kind":"step","step":7}\n')
        assert status() == ("RUNNING", 7)
    assert status() == ("STOPPED", 7)
    (tmp_path / "launcher.json").write_text(json.dumps({"pid": 2**22 + 1, "host": env.host()}))  # was killed
    assert status() == ("STOPPED", 7)
    (tmp_path / "events.jsonl").write_text('{"kind":"step","step":8}\n{"kind":"run_finished"}\n')
    assert status() == ("COMPLETED", 8)


@pytest.mark.parametrize(
    "text", ["[" * 50_000, '{"kind":"step","step":true}', '{"kind":["step"],"step":3}', "1"]
)
def test_events_that_are_none_tell_nothing(text, tmp_path):
    (tmp_path / "events.jsonl").write_text(text + "\n")
    found = read_progress(tmp_path)
    assert (found.step, found.ended) == (None, None)


def test_events_that_are_no_file_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "events.jsonl")
    assert read_progress(tmp_path).step is None


def test_how_far_a_run_is(tmp_path):
    assert read_progress(tmp_path).step is None
    step = json.dumps({"kind": "step", "step": 7})
    (tmp_path / "events.jsonl").write_text(f'{{"kind":"run_started"}}\n{step}\n{{"kind":"no')
    (tmp_path / "checkpoints" / "step-5").mkdir(parents=True)
    found = read_progress(tmp_path)
    assert (found.step, found.saved, found.ended) == (7, 5, None)
    (tmp_path / "events.jsonl").write_text(f'{step}\n{{"kind":"run_finished"}}\n')
    assert read_progress(tmp_path).ended == "run_finished"
