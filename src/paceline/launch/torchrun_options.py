"""torchrun's own options as `paceline run` takes them: each is done, or refused in one line. Imports no torch.

torchrun reads `PET_NAME` of the environment where an option is not given (Kubeflow sets them); so does this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from paceline.errors import InputError
from paceline.launch.nodes.rendezvous import Rendezvous
from paceline.launch.worker_output import WorkerOutput
from paceline.option_fields import Options, flag, option, shown
from paceline.ranges import COUNT_OR_NONE, PORT, SECONDS, Range
from paceline.world import interfaces

GROUP = "As torchrun has them"
STATIC, C10D = "static", "c10d"
STATIC_PORT = 29500
NO_ID = "none"
"""torchrun's own default of --rdzv-id: no name."""
_PET = "PET_"
_SIGNALS = frozenset(("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"))
"""torchrun's default of --signals-to-handle: nothing is to be done about it."""
_DEFAULTS = {
    "event_log_handler": "null",
    "duplicate_stdout_filters": "",
    "duplicate_stderr_filters": "",
    "logs_specs": "default",
}
"""What may be given of the options that are refused: the value that asks for nothing."""
_REFUSED = {
    "event_log_handler": "events of the launcher go nowhere else. Leave it out",
    "logs_specs": "each rank's output goes to logs/rank-N.log of the run folder. Use --log-dir, or leave it out",
    "duplicate_stdout_filters": "output is not filtered. Search logs/rank-N.log of the run folder instead",
    "duplicate_stderr_filters": "output is not filtered. Search logs/rank-N.log of the run folder instead",
    "numa_binding": "workers are not bound to cores. Bind the command (numactl), or leave it out",
    "local_addr": "workers listen where this machine reaches the others. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name another "
    "interface",
    "signals_to_handle": "SIGTERM and SIGINT end the script, others end this command as they are. Leave it out",
}
_IDLE = {
    "monitor_interval": "the end of a worker is seen at once",
    "start_method": "workers are forked from a server that has torch loaded, and begin with the script",
}
"""Options that change nothing here, and why."""


@dataclass(frozen=True, kw_only=True)
class TorchrunOptions(Options):
    """What torchrun can be given beside the script; None where it is not."""

    nproc_per_node: str | None = option(
        None, "Workers on each machine: a number, gpu, cpu or auto.", GROUP, metavar="N"
    )
    nnodes: str | None = option(None, "How many machines: N, or MIN:MAX where both are one.", GROUP)
    node_rank: int | None = option(
        None, "Which of them this is; 0 leads, and is --master-addr.", GROUP, Range(0, 9998)
    )
    standalone: bool = option(False, "This machine alone.", GROUP)
    rdzv_backend: str | None = option(None, "static or c10d.", GROUP)
    rdzv_endpoint: str | None = option(
        None, "Where several machines meet, as --rendezvous.", GROUP, metavar="HOST:PORT"
    )
    rdzv_id: str | None = option(
        None, "The name of the job, TORCHELASTIC_RUN_ID to the script; the same on all machines.", GROUP
    )
    rdzv_conf: str | None = option(None, "timeout, join_timeout or is_host.", GROUP, metavar="KEY=VALUE,...")
    master_addr: str | None = option(
        None, "The machine of --node-rank 0, where several meet.", GROUP, metavar="HOST"
    )
    master_port: int | None = option(
        None,
        "Its port; on one machine MASTER_PORT of the script. Default: 29500, or a free one.",
        GROUP,
        PORT,
    )
    max_restarts: int | None = option(
        None, "How often all workers are started over when one fails. Default: 0.", GROUP, COUNT_OR_NONE
    )
    role: str | None = option(None, "ROLE_NAME of the workers.", GROUP)
    log_dir: str | None = option(
        None, "Folder in which the run folder is made, as --out names one.", GROUP, metavar="PATH"
    )
    redirects: str | None = option(
        None,
        "Streams shown in the logs only: 0 to 3 (1 standard output, 2 standard error), or RANK:STREAMS,...",
        GROUP,
    )
    tee: str | None = option(None, "Streams shown behind the name of their worker.", GROUP)
    local_ranks_filter: str | None = option(
        None, "Show these workers' output alone.", GROUP, metavar="RANK,..."
    )
    shutdown_timeout: float | None = option(None, "As --grace.", GROUP, SECONDS)
    no_python: bool = option(False, "SCRIPT is a program, not a file of Python.", GROUP)
    run_path: bool = option(False, "Nothing else than without: a script runs inside the worker.", GROUP)
    virtual_local_rank: bool = option(False, "Refused: see docs/launching.md.", GROUP)
    monitor_interval: float | None = option(None, "Without effect.", GROUP, SECONDS)
    start_method: str | None = option(
        None, "Without effect.", GROUP, names=("spawn", "fork", "forkserver"), shown=""
    )
    event_log_handler: str | None = option(None, "Refused.", GROUP)
    logs_specs: str | None = option(None, "Refused.", GROUP)
    local_addr: str | None = option(None, "Refused.", GROUP)
    numa_binding: str | None = option(None, "Refused.", GROUP)
    signals_to_handle: str | None = option(None, "Refused, but for torchrun's own default.", GROUP)
    duplicate_stdout_filters: str | None = option(None, "Refused.", GROUP)
    duplicate_stderr_filters: str | None = option(None, "Refused.", GROUP)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_refused()
        if self.rdzv_backend not in (None, STATIC, C10D):
            raise InputError(
                f"--rdzv-backend {self.rdzv_backend} is none that machines meet by here. Use c10d or static."
            )
        if self.master_addr and self.rdzv_endpoint and self._endpoint_host != self.master_addr:
            raise InputError("--master-addr and --rdzv-endpoint both say where machines meet. Give one.")
        if self.role == "" or self.rdzv_id == "":
            raise InputError("--role and --rdzv-id are names. Give some text, or leave them out.")

    def _check_refused(self) -> None:
        if self.virtual_local_rank:
            raise InputError(
                "--virtual-local-rank: LOCAL_RANK says which device a worker has, so it is not made 0 for all. Leave it out, and "
                "use LOCAL_RANK in the script."
            )
        for name, why in _REFUSED.items():
            value = getattr(self, name)
            if value is None or value == _DEFAULTS.get(name):
                continue
            if name == "signals_to_handle" and {one.strip() for one in value.split(",")} <= _SIGNALS:
                continue
            raise InputError(f"{flag(name)} is not taken: {why}.")

    @classmethod
    def of(cls, given: Mapping[str, Any], environment: Mapping[str, str]) -> TorchrunOptions:
        """Return what was given on the command line, over what the environment has as torchrun's."""
        return cls(**{**_from_environment(environment), **given})

    # What follows from them.

    @property
    def single(self) -> bool:
        """Whether this machine is the only one."""
        return self.standalone or self._range[1] == 1

    @property
    def _range(self) -> tuple[int, int]:
        if self.nnodes is None:
            return 1, 1
        try:
            read = Rendezvous.parse("localhost", self.nnodes)
        except InputError as error:
            raise InputError(str(error).replace("--nodes", "--nnodes")) from None
        return read.min_nodes, read.max_nodes

    def output(self) -> WorkerOutput | None:
        """Return whose output is shown, and how; None where none of these options is given: then it is rank 0's."""
        if self.redirects is None and self.tee is None and self.local_ranks_filter is None:
            return None
        if not self.single:
            raise InputError(
                "--tee, --redirects and --local-ranks-filter are for one machine; with several, rank 0's output is shown, and "
                "each machine has its workers' in logs/rank-N.log of the run folder. Leave them out."
            )
        return WorkerOutput.read(
            self.role or "default", self.redirects or "0", self.tee or "0", self.local_ranks_filter
        )

    def variables(self) -> dict[str, str]:
        """Return what the script finds in its environment because of these options."""
        made = {"ROLE_NAME": self.role} if self.role else {}
        made |= {"TORCHELASTIC_RUN_ID": self.rdzv_id} if self.rdzv_id and self.rdzv_id != NO_ID else {}
        made |= {"TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts)} if self.max_restarts else {}
        return made

    def agreed(self) -> dict[str, str]:
        """Return what must be the same on all machines."""
        return {flag(name)[2:]: value for name in ("role", "rdzv_id") if (value := getattr(self, name))}

    def notes(self) -> list[str]:
        """Return, in words, which of the options change nothing."""
        idle = [
            f"{flag(name)} ({why})" for name, why in _IDLE.items() if getattr(self, name) not in (None, "")
        ]
        if self.node_rank and not self.single and self._is_c10d:
            idle.append("--node-rank (with --rdzv-backend c10d machines are numbered as they come)")
        return [f"note: without effect: {'; '.join(idle)}."] if idle else []

    @property
    def _is_c10d(self) -> bool:
        return self.rdzv_backend == C10D

    def meeting(self) -> Meeting:
        """Return where this machine meets others, in words of `--nodes` and `--rendezvous`."""
        configured = _configured(self.rdzv_conf)
        join = configured.pop("join_timeout", None) or configured.pop("timeout", None)
        configured.pop("timeout", None)
        host = configured.pop("is_host", "0").lower() in ("1", "true", "yes", "t", "y")
        if configured:
            raise InputError(
                f"--rdzv-conf {next(iter(configured))} means nothing here. Known: timeout, join_timeout, is_host."
            )
        join_timeout = None if join is None else SECONDS.read("--rdzv-conf timeout", _number(join))
        if self.single:
            self._check_here()
            return Meeting(join_timeout=join_timeout)
        low, high = self._range
        if low != high:
            raise InputError(
                f"--nnodes {self.nnodes} may change, but the workers of a script are started once. Give one number of machines; "
                "paceline train and paceline.launch take --nodes MIN:MAX."
            )
        if self.max_restarts:
            raise InputError(
                f"--max-restarts {self.max_restarts} is for one machine; with several the first lost worker ends the script. "
                "Leave it out."
            )
        if self.rdzv_endpoint:
            return replace(self._by_endpoint(host), join_timeout=join_timeout)
        if self._is_c10d or self.master_addr is None:
            asked = "--rdzv-endpoint host:port" if self._is_c10d else "--master-addr and --node-rank"
            raise InputError(
                f"--nnodes {self.nnodes} machines need a place to meet. Give {asked} on each of them."
            )
        return replace(self._by_rank(self.master_addr, self.master_port), join_timeout=join_timeout)

    def _by_endpoint(self, host: bool) -> Meeting:
        if self._is_c10d:
            return Meeting(nodes=str(self._range[1]), endpoint=self.rdzv_endpoint, lead=host)
        point = Rendezvous.parse(str(self.rdzv_endpoint), "1")
        return self._by_rank(point.host, point.port)

    def _by_rank(self, host: str, port: int | None) -> Meeting:
        """Return the meeting of machines that are numbered: the first holds it."""
        rank, count = self.node_rank or 0, self._range[1]
        if rank >= count:
            raise InputError(
                f"--node-rank is {rank}, but --nnodes {count} are numbered from 0 to {count - 1}."
            )
        if count > 2 and rank:
            raise InputError(
                f"--node-rank {rank} of {count} machines cannot be kept: those behind the first are numbered as they come. Use "
                f"--rdzv-backend c10d --rdzv-endpoint {host}:{port or STATIC_PORT} on all of them."
            )
        if rank and interfaces.is_here(host):
            raise InputError(
                f"--node-rank {rank} follows the machine at {host}, but that is this machine. Give it --node-rank 0."
            )
        return Meeting(nodes=str(count), endpoint=f"{host}:{port or STATIC_PORT}", lead=rank == 0)

    def _check_here(self) -> None:
        """Refuse to be one machine at another one's address."""
        if self.standalone:
            if self._range[0] > 1:
                raise InputError(
                    f"--standalone is one machine, but --nnodes is {self.nnodes}. Leave one out."
                )
            return  # torchrun overlooks where else machines would meet
        if self.node_rank:
            raise InputError(f"--node-rank is {self.node_rank}, but there is one machine. Give --nnodes.")
        for name, host in (("--master-addr", self.master_addr), ("--rdzv-endpoint", self._endpoint_host)):
            if host and not interfaces.is_here(host):
                raise InputError(
                    f"{name} {host} is no address of this machine, which is the only one. Give --nnodes, or leave it out."
                )

    @property
    def _endpoint_host(self) -> str | None:
        text = (self.rdzv_endpoint or "").strip()
        return text.rpartition(":")[0].strip("[]") or text if text else None


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where machines meet, as `--nodes`, `--rendezvous`, `--lead` and `--join-timeout` say it."""

    nodes: str = "1"
    endpoint: str | None = None
    lead: bool = False
    join_timeout: float | None = None


def meant(asked: TorchrunOptions, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that a command was given, with what torchrun's say of them."""
    where = asked.meeting()
    said: dict[str, Any] = {}
    if asked.nnodes is not None or asked.standalone:
        said["nodes"] = where.nodes
    said |= {"rendezvous": where.endpoint} if where.endpoint is not None else {}
    said |= {"lead": True} if where.lead else {}
    said |= {"join_timeout": where.join_timeout} if where.join_timeout is not None else {}
    said |= {"grace": asked.shutdown_timeout} if asked.shutdown_timeout is not None else {}
    for name, names in (("nodes", "--nnodes"), ("rendezvous", "--rdzv-endpoint or --master-addr")):
        if name in said and name in given:
            raise InputError(f"{flag(name)} and torchrun's {names} say the same. Give one.")
    return {**given, **said}


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in fields(TorchrunOptions):
        text = environment.get(f"{_PET}{one.name.upper()}")
        if text is None or shown(one) is None:
            continue
        if isinstance(one.default, bool):
            found[one.name] = bool(_number(text))
        elif one.name in ("node_rank", "master_port", "max_restarts", "monitor_interval", "shutdown_timeout"):
            found[one.name] = _number(text)
        else:
            found[one.name] = text
    return found


def _number(text: str) -> int | float | str:
    """Return a number of a text, or the text where it is none: the check behind says so."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _configured(text: str | None) -> dict[str, str]:
    """Read KEY=VALUE,KEY=VALUE."""
    found = {}
    for part in (text or "").strip().split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not part.strip():
            continue
        if not equals or not key or not value:
            raise InputError(f"--rdzv-conf {part.strip()!r} is not KEY=VALUE.")
        found[key] = value
    return found
