"""All checks in their order, and the report of them. Imports no torch, except inside a job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from paceline.doctor import devices, exchange, limits, machine, network, versions
from paceline.doctor.advice import Advice, advise, machines_of
from paceline.doctor.finding import Finding, Level, attempt, fail
from paceline.doctor.hosts import hosts
from paceline.errors import InputError, PacelineError
from paceline.launch.local import LocalLauncher
from paceline.observe.formats import plural
from paceline.verify.report import Part, Report
from paceline.world import env

_LOCAL: tuple[tuple[str, Callable[[], list[Finding]]], ...] = (
    ("versions", versions.packages),
    ("versions", versions.curve),
    ("processor", machine.processor),
    ("memory", machine.memory),
    ("shared memory", limits.shared_memory),
    ("files", limits.open_files),
    ("processes", limits.processes),
    ("limits", limits.address_space),
    ("network", network.addresses),
    ("name", network.own_name),
    ("network", network.named_interfaces),
    ("proxy", network.proxies),
)
_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


@dataclass(frozen=True, kw_only=True)
class Examination(Report):
    """What was found, and what suits the machines."""

    findings: tuple[Finding, ...]
    advice: tuple[Advice, ...] = ()
    together: bool = False
    """Whether all workers of a job have come to the same findings, so that one of them says it for all."""
    seconds: float | None = None

    @property
    def holds(self) -> bool:
        """Whether training can start."""
        return not self._of(Level.FAIL)

    def _of(self, level: Level) -> list[Finding]:
        return [one for one in self.findings if one.level is level]

    def parts(self) -> Iterable[Part]:
        """Return the findings in their order, each with its remedy, then what suits these machines."""
        width = max((len(one.check) for one in self.findings), default=0)
        for one in self.findings:
            where = f"{one.machine}: " if one.machine else ""
            yield Text.assemble(
                (f"{one.level:4}", _STYLES[one.level]), f"  {one.check:{width}}  {where}{one.what}"
            )
            if one.remedy:
                yield f"{'':{width + 8}}{one.remedy}"
        if self.advice:
            yield ""
            yield "What suits these machines, by the model:"
        for case in self.advice:
            yield f"  {case.case}: {case.why}"
            yield f"      {case.command}"
        yield ""

    @property
    def verdict(self) -> str:
        """The last line."""
        faults, worth = len(self._of(Level.FAIL)), len(self._of(Level.WARN))
        if faults:
            return f"Training cannot start here: {plural(faults, 'fault')}."
        return (
            f"Training can start here; {plural(worth, 'thing')} to look at."
            if worth
            else "Training can start here."
        )


def examine(
    *, backend: str | None = None, names: Sequence[str] = (), port: int, wait_s: float
) -> Examination:
    """Make all checks of this machine, or of the job that this process is a worker of."""
    began = time.monotonic()
    identity = env.identity()
    seen: Mapping[str, Any]
    local = [found for name, check in _LOCAL for found in attempt(name, check)]
    if identity is not None and identity.size > 1:
        from paceline.doctor import job

        if names:
            raise InputError(
                "--hosts is for machines outside a job; those of this one are checked by themselves. Leave it out."
            )
        found, together, seen = job.examine(identity, local, backend)
        machines = identity.nodes
    else:
        found, seen = _alone(local, backend)
        together = False
        machines = max(1, len(names))
    if names:
        found += attempt("hosts", lambda: hosts(names, port, wait_s))
    return Examination(
        findings=tuple(found),
        advice=tuple(_advice(seen, machines)),
        together=together,
        seconds=time.monotonic() - began,
    )


def _alone(local: list[Finding], backend: str | None) -> tuple[list[Finding], Mapping[str, Any]]:
    """Ask a worker what torch sees, and try the backends between workers of this machine."""
    try:
        seen = LocalLauncher(exchange.Quiet()).ask(devices.ReadTorch())
    except PacelineError as error:
        remedy = "See what else is said of versions and limits; `python -c 'import torch'` shows whether torch itself loads."
        return [*local, fail("workers", f"no worker can be started: {error}", remedy)], {}
    found = local + attempt("devices", lambda: devices.devices(seen))
    return found + attempt(exchange.CHECK, lambda: exchange.backends(seen, backend)), seen


def _advice(seen: Mapping[str, Any], machines: int) -> list[Advice]:
    if not seen:
        return []
    cores, quota = env.cores(), machine.cpu_quota()
    try:
        memory, _ = machine.memory_bytes()
    except OSError:
        return []
    return advise(machines_of(seen, machines, cores if quota is None else min(cores, quota), memory))
