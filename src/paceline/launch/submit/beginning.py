"""What a job's script asks of the run folder before it trains: a job goes on with what it began itself. Imports no torch."""

from __future__ import annotations

NAME = "begun-by"
"""The file of the run folder that names the job which began the run, or was told to resume it."""
_TEXT = """\
# The run is gone on with by the job that began it, or by one that was submitted with --resume.
saved=$(ls -d "$run"/checkpoints/step-* 2> /dev/null || true)
begun=$(cat "$run/{name}" 2> /dev/null || true)
resume={resume}
if [ -n "$resume" ]; then
  :
elif [ "$begun" = "$job" ]; then
  if [ -n "$saved" ]; then
    resume=--resume
  else
    rm -rf "$run/events.jsonl" "$run/ledger"  # lost before its first checkpoint: it begins anew
  fi
elif [ -n "$begun$saved" ] || [ -e "$run/events.jsonl" ]; then
  echo "error: $run holds a run that this job did not begin. Choose another --out, or submit with --resume to go on with it." >&2
  exit 2
fi
mkdir -p "$run"
echo "$job" > "$run/{name}.partial"
mv "$run/{name}.partial" "$run/{name}"
"""


def text(*, resume: bool) -> str:
    """Return the lines of shell, for `$run` and `$job`, that set `$resume`; `resume` is whether the user asks for it."""
    return _TEXT.format(name=NAME, resume="--resume" if resume else "")
