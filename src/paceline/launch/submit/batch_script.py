"""The batch script of a job: SLURM's options, one launcher on each node, what is done when time is up. Imports no torch."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

from paceline.errors import InputError
from paceline.launch.submit import beginning
from paceline.launch.submit.durations import for_slurm
from paceline.launch.submit.request import SubmitRequest

SECRET = "secret"  # noqa: S105  (a file's name)
LOGS = "logs"
NOTICE_S = 30
"""How long before the end of the time a job is told, beside --grace: SLURM looks at it twice a minute."""

_BODY = """\
run={run}
python={python}
job=$SLURM_JOB_ID
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt {most} ]; then
  echo "error: this job was queued again {most} times (--max-requeues), and its run is not done. Look at what ends it above;" \\
    "paceline submit --resume goes on from its last checkpoint." >&2
  exit 1
fi
cd {folder} || exit 1
{environment}
# Ends the training after its step, with a checkpoint; where it has not begun, all of it at once.
stop() {{ "$python" -m paceline stop "$run" || scancel --signal=TERM "$SLURM_JOB_ID"; }}
trap 'told=yes again=yes; stop' USR1               # SLURM: the time is nearly up
trap 'told=yes again= cancelled=yes; stop' USR2    # paceline cancel
trap 'told=yes again= cancelled=' TERM             # scancel, or preemption, after which SLURM queues the job again by itself

{beginning}
{meeting}
srun {srun} \\
  {train} $resume < /dev/null &
step=$!
told=yes
while [ "$told" ]; do  # a signal ends the wait; the step may have ended while its trap ran
  told=
  wait "$step"
  status=$?
done

if [ "$again" ] && [ "$status" -eq 143 ]; then  # 143: ended as it was told to, with what it has saved
  scontrol requeue "$SLURM_JOB_ID"
elif [ "$cancelled" ]; then
  scancel "$SLURM_JOB_ID"
fi
exit "$status"
"""


def batch_script(request: SubmitRequest, *, python: str, folder: Path, extra: tuple[str, ...] = ()) -> str:
    """Return the script; `folder` is where the command of the training runs, `extra` are more options of sbatch."""
    if not request.options.elastic:
        raise InputError(
            "a job on SLURM saves a checkpoint when its time is up, which its workers cannot with --no-elastic. Leave it out."
        )
    several = request.nodes[1] > 1
    srun = ["--ntasks-per-node=1", f"--cpus-per-task={request.cores}", "--kill-on-bad-exit=0", "--wait=0"]
    train = request.train(("PYTHON", "-m", "paceline"), out="RUN", meeting="MEETING")
    places = {"PYTHON": '"$python"', "RUN": '"$run"', "MEETING": '"$leader:$port"'}
    body = _BODY.format(
        run=shlex.quote(str(request.out)),
        python=shlex.quote(python),
        most=request.submit.max_requeues,
        folder=shlex.quote(str(folder)),
        environment=f'export PACELINE_SECRET_FILE="$run/{SECRET}"\n' if several else "",
        beginning=beginning.text(resume=request.options.resume),
        meeting='leader=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\nport=$((15000 + SLURM_JOB_ID % 15000))\n'
        if several
        else "",
        srun=" ".join([*srun, "--label", "--no-kill"] if several else srun),
        train=" ".join(places.get(word) or shlex.quote(word) for word in train),
    )
    head = [f"#SBATCH {_quoted(one)}" for one in (*_options(request), *extra)]
    return "\n".join(["#!/bin/bash", "# Written by `paceline submit`.", *head, "", body])


def _quoted(option: str) -> str:
    """Return an option of sbatch as a line of a script has it; a value with spaces has quotes."""
    name, equals, value = option.partition("=")
    if re.fullmatch(r"[\w./:,@%+=-]*", value):
        return option
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'


def _options(request: SubmitRequest) -> list[str]:
    submit, (fewest, most) = request.submit, request.nodes
    notice = math.ceil(request.options.grace) + NOTICE_S
    if submit.seconds is not None and submit.seconds <= notice:
        raise InputError(
            f"--time {submit.time} is too short: a job is told to save {notice} s before its end (--grace "
            f"{request.options.grace:g} and {NOTICE_S} s). Give more time, or less --grace."
        )
    log = str(request.out / LOGS).replace("%", "%%")
    found = [
        f"--job-name={request.name}",
        f"--nodes={fewest}" if fewest == most else f"--nodes={fewest}-{most}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={request.cores}",
        f"--output={log}/slurm-%j.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{notice}",
    ]
    found += ["--no-kill"] if most > 1 else []
    found += [f"--gpus-per-node={submit.gpus_per_node}"] if submit.gpus_per_node else []
    found += [f"--time={for_slurm(submit.seconds)}"] if submit.seconds is not None else []
    found += [f"--partition={submit.partition}"] if submit.partition else []
    found += [f"--account={submit.account}"] if submit.account else []
    return found
