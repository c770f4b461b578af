"""The options of `paceline submit` beside those of the training itself. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.errors import InputError
from paceline.launch.submit import durations
from paceline.option_fields import Options, option
from paceline.ranges import Range

SLURM, KUBERNETES = "slurm", "kubernetes"
SYSTEMS = (SLURM, KUBERNETES)
KINDS = ("job", "jobset", "trainjob")
IN_SLURM, IN_KUBERNETES = "SLURM", "Kubernetes"
"""The groups of the help."""
_WORD = re.compile(r"[A-Za-z0-9_.,:@+-]+")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""What Kubernetes takes as a name that is part of a host's name."""


@dataclass(frozen=True, kw_only=True)
class SubmitOptions(Options):
    """Where a job runs, on what, and for how long."""

    on: str | None = option(None, "slurm or kubernetes.", names=SYSTEMS, shown="")
    time: str | None = option(
        None,
        "The most time that the job may take: 2h, 90m, 1d12h.",
        shown="the system's own limit",
        metavar="TIME",
    )
    gpus_per_node: int = option(
        0, "GPUs of each machine, one for each worker.", within=Range(0, 64), shown="0"
    )
    cpus_per_node: int | None = option(
        None, "Cores of each machine.", within=Range(1, 4096), shown="one for each thread and loading process"
    )
    job_name: str | None = option(
        None, "What the job is called.", shown="the run folder's name", metavar="NAME"
    )
    max_requeues: int = option(
        100,
        "How often the job may be queued again, by itself or by SLURM, before it gives up.",
        IN_SLURM,
        within=Range(0, 100_000),
    )
    partition: str | None = option(None, "SLURM's partition.", IN_SLURM, shown="SLURM's own")
    account: str | None = option(None, "SLURM's account.", IN_SLURM, shown="SLURM's own")
    kind: str = option(
        "job",
        "job: an Indexed Job and its service; jobset: a JobSet; trainjob: Kubeflow's TrainJob and its runtime.",
        IN_KUBERNETES,
        names=KINDS,
    )
    image: str = option("paceline:latest", "The container's image; see the Dockerfile.", IN_KUBERNETES)
    claim: str = option(
        "paceline-runs",
        "The volume claim that holds the run folder, below /runs; all machines mount it.",
        IN_KUBERNETES,
    )
    namespace: str | None = option(None, "The namespace.", IN_KUBERNETES, shown="kubectl's own")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on is None:
            raise InputError(f"--on is missing: where is this job to run? Give one of {', '.join(SYSTEMS)}.")
        if self.time is not None:
            durations.seconds("--time", self.time)
        for name in ("partition", "account", "job_name", "image"):
            value = getattr(self, name)
            if value is not None and _WORD.fullmatch(value.replace("/", "")) is None:
                raise InputError(
                    f"--{name.replace('_', '-')} {value!r} is no such name. Give letters, digits and the signs _ . , : @ + -."
                )
        for name in ("claim", "namespace"):
            value = getattr(self, name)
            if value is not None and _LABEL.fullmatch(value) is None:
                raise InputError(
                    f"--{name} {value!r} is no name that Kubernetes takes. Give up to 63 small letters, digits and hyphens."
                )

    @property
    def seconds(self) -> int | None:
        """The time limit, where there is one."""
        return None if self.time is None else durations.seconds("--time", self.time)
