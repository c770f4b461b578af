"""`paceline predict`: the outputs of a run that was trained, one row for each sample."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.generated import Given, takes
from paceline.cli.options import AsJson, Threads
from paceline.cli.outcome import print_json, report
from paceline.training import folder
from paceline.training.options import RunOptions

OPTIONS = ("strategy", "workers", "servers", "device", "num_workers")
"""Options of `paceline train` that change how a run is computed and not what it is."""
_AS_RUN = "Default: the run's."
_WORDS = {
    "strategy": f"Any of paceline train's, such as single, ddp or fsdp. {_AS_RUN}",
    "workers": f"Processes on each machine; for dp the threads of its one process. {_AS_RUN}",
    "device": f"auto, cpu or cuda. {_AS_RUN}",
    "servers": f"Processes beside the workers that hold parameters. {_AS_RUN}",
}


@takes(RunOptions, only=OPTIONS, words=_WORDS)
def predict(
    given: Given,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run of paceline train.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="The .safetensors or .npy file to write.")
    ],
    threads: Threads = None,
    json_: AsJson = False,
) -> int:
    """Write what a run's newest weights predict for the task's predict_data(): one row for each sample, in their order."""
    from paceline.checkpoint.manifest import Manifest, newest_readable
    from paceline.cli.asked import Asked
    from paceline.launch import api
    from paceline.launch.console import Console
    from paceline.observe.progress import open_progress
    from paceline.training.prediction_file import check_path

    check_path(out)
    RunOptions.read(given)  # before it is looked for a run
    before = folder.read_spec(run)
    # The run is resumed where it stands, so it takes no step.
    step = newest_readable(run, Manifest.read)[1].position["number"]
    said = {**given, "out": run, "resume": True, "predict": out, "steps": step}
    said |= {} if threads is None else {"threads": threads}
    _, asked = Asked.for_command("predict", None, {}, said)
    outcome = api.start(
        api.TRAINER,
        (asked.spec,),
        {},
        asked.options,
        threads=asked.threads,
        console=Console(open_progress()),
        record=before,  # it is gone on with as it was begun, also where this process is killed
    )
    status = report(outcome)
    if outcome.results and outcome.failure is None:
        _show(outcome.results[0], run, as_json=json_)
    return status


def _show(result: dict[str, Any], run: Path, *, as_json: bool) -> None:
    made = result["predictions"]
    facts = {"run": str(run), "step": result["steps"], "weights_sha256": result["weights_sha256"]}
    if as_json:
        print_json({**made, **facts})
    else:
        sys.stdout.write(
            f"{made['path']}: {made['rows']:,} rows, predicted by {run} at step {facts['step']}\n"
        )
