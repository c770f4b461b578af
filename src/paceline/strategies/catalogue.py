"""Which strategies there are, and how one is asked for. The table loads none of them, nor torch."""

from __future__ import annotations

import importlib
import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from paceline.errors import InputError, UnknownNameError
from paceline.world.mesh import DATA, SERVERS, SIDES, Mesh

if TYPE_CHECKING:
    from paceline.strategies.replica import Strategy


@dataclass(frozen=True)
class StrategyEntry:
    """Where a strategy is, and what a launcher must know before any worker has loaded it."""

    reference: str
    description: str
    threaded: bool = False
    """Whether --workers counts threads of one process."""
    processes: int | None = None
    """How many processes it runs in, where that is not for --workers to say."""
    side: str = "ddp"
    """The side of the mesh that its workers make, where it is named alone."""
    beside: tuple[str, ...] = ()
    """The sides that may stand beside it in a mesh."""
    modules: tuple[str, ...] = ()
    """What its workers import beyond torch itself and the module of `reference`."""
    compiles_blocks: bool = False
    """Whether --compile takes the model block by block: other kernels than those of the whole model, and so other bits."""
    sharded: bool = False
    """Whether each worker along its side of the mesh holds a part of the state only."""
    servers: int = 0
    """How many servers stand beside its workers where nobody says; 0 where it has none."""
    several: bool = False
    """Whether it trains several models and optimizers in one run."""

    @property
    def imports(self) -> tuple[str, ...]:
        """Everything that its workers import; one from outside is found by the workers, who know where to look."""
        module = self.reference.partition(":")[0]
        return (*self.modules, module) if module.startswith("paceline.") else self.modules


PARTS = ("torch.distributed.checkpoint.planner_helpers",)
"""What is imported where a checkpoint is written in parts."""
_SPLIT = (
    "paceline.compat.compiler",
    "paceline.compat.fake_tensors",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    *PARTS,
)
_COMPUTES = ("pp", "tp", "fsdp", "ddp")
"""Of several sides that are named, the strategy of the first computes."""
SHARDED_OPTIMIZER = (*PARTS, "paceline.strategies.data_parallel.zero")
_SERVED = (*PARTS, "paceline.remote.opening")
STRATEGIES = {
    "single": StrategyEntry(
        "paceline.strategies.data_parallel.single:Single",
        "one process, one device: the reference",
        several=True,
        processes=1,
    ),
    "dp": StrategyEntry(
        "paceline.strategies.data_parallel.dp:DataParallel",
        "one process, one thread per replica, a master that gathers",
        several=True,
        threaded=True,
        processes=1,
    ),
    "ddp": StrategyEntry(
        "paceline.strategies.data_parallel.strategy:Ddp",
        "one process per device, gradients summed in buckets during the backward pass",
        several=True,
    ),
    "fsdp": StrategyEntry(
        "paceline.strategies.fsdp:Fsdp",
        "weights, gradients and optimizer state sharded among the workers",
        several=True,
        side="fsdp",
        sharded=True,
        compiles_blocks=True,
        beside=("ddp",),
        modules=_SPLIT,
    ),
    "tp": StrategyEntry(
        "paceline.strategies.tensor:TensorParallel",
        "each layer's matrices split among the workers",
        side="tp",
        sharded=True,
        beside=("ddp", "fsdp"),
        modules=_SPLIT,
    ),
    "pp": StrategyEntry(
        "paceline.strategies.pipeline:Pipeline",
        "the layers split among the workers, shards flowing through as micro-batches",
        side="pp",
        sharded=True,
        beside=("ddp", "fsdp"),
        modules=_SPLIT,
    ),
    "local-sgd": StrategyEntry(
        "paceline.strategies.local_sgd:LocalSgd",
        "workers step alone and average their weights now and then",
    ),
    "ps": StrategyEntry(
        "paceline.strategies.parameter_server:ParameterServer",
        "parameters and their optimizer on servers; workers pull weights and push gradients",
        several=True,
        servers=1,
        modules=(
            *_SERVED,
            "paceline.strategies.parameter_server.trainer",
            "paceline.strategies.parameter_server.sync_server",
            "paceline.strategies.parameter_server.async_server",
        ),
    ),
    "hybrid": StrategyEntry(
        "paceline.strategies.hybrid:Hybrid",
        "dense layers under ddp, sparse embeddings on servers; only the rows that a step touches travel",
        servers=1,
        modules=_SERVED,
    ),
}


_OUTSIDE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""A strategy of somebody else's, as module:class."""


@dataclass(frozen=True)
class Choice:
    """A strategy as it was asked for: by name, or as a mesh like "ddp=2,tp=2"."""

    name: str
    """The entry that computes it: the one of the innermost work, pp before tp before fsdp before ddp."""
    sizes: tuple[tuple[str, int | None], ...]
    """The sides that were named; one may be left for the number of workers to fill."""
    servers: int = field(default=0, kw_only=True)
    """Workers that stand beside the mesh; `workers`, `mesh` and `pinned` do not count them, `fitted` does."""

    @property
    def workers(self) -> int | None:
        """How many workers the sizes come to, if they say it."""
        given = [size for _, size in self.sizes]
        return None if None in given else Mesh.of(dict(self.sizes)).workers  # type: ignore[arg-type]

    def mesh(self, workers: int) -> Mesh:
        """Lay out exactly so many workers, or say which sizes would fit."""
        sizes = dict(self.sizes)
        fixed = Mesh.of({side: size for side, size in sizes.items() if size is not None})
        open_sides = [side for side, size in sizes.items() if size is None]
        if workers % fixed.workers or (not open_sides and workers != fixed.workers):
            raise InputError(
                f"--strategy {self} needs {fixed.workers}{' times some' if open_sides else ''} workers, but {workers} "
                f"were given. Use {self._advice(fixed, workers)}."
            )
        made = Mesh.of(
            {side: size if size is not None else workers // fixed.workers for side, size in sizes.items()}
        )
        return replace(made, servers=self.servers)

    def pinned(self, workers: int) -> Choice:
        """Return the same with every size filled in."""
        return replace(self, sizes=self.mesh(workers).sizes)

    def fitted(self, workers: int) -> Mesh:
        """Return the mesh for the workers that are left of a pinned one, as close to it as they reach; some may be left over.

        Sides that share one replica keep their size, so that no worker holds more of it than was planned. Where too few are left
        for one, the stages of a pipeline are cut anew; what tp splits only one worker can hold otherwise. Servers are kept as
        long as anybody is left beside them.
        """
        servers = min(self.servers, workers - 1)
        workers -= servers
        asked = {side: size or 1 for side, size in self.sizes}
        inner = {side: size for side, size in asked.items() if side not in DATA}
        if workers < Mesh.of(inner).workers:
            workers = workers if "pp" in inner else 1
            inner = {"pp": workers} if "pp" in inner else {}
        data, kept = workers // Mesh.of(inner).workers, asked.get("fsdp", 1)
        if "fsdp" not in asked:
            sizes = {"ddp": data}
        elif "ddp" not in asked or data % kept:
            sizes = {"fsdp": data}
        else:
            sizes = {"ddp": data // kept, "fsdp": kept}
        sizes |= inner
        made = Mesh.of({side: size for side, size in sizes.items() if side in asked or size > 1} or sizes)
        return replace(made, servers=servers)

    def strategy(self, mesh: Mesh) -> str:
        """Return the name of the strategy that computes on such a mesh: another one where too few workers are left."""
        side = _entry(self.name).side
        if side in dict(mesh.sizes):
            return self.name
        return next(name for name in _COMPUTES if name in dict(mesh.sizes))

    @property
    def split(self) -> int:
        """How many workers share the samples of one replica, as far as their number is named."""
        return math.prod(size or 1 for side, size in self.sizes if side not in DATA)

    def _advice(self, fixed: Mesh, workers: int) -> str:
        ways = [f"--workers {fixed.workers}"]
        for side, size in fixed.sizes:
            rest = fixed.workers // size
            if workers % rest == 0:
                sizes = {**dict(fixed.sizes), side: workers // rest}
                ways.append(f"--strategy {Mesh.of(sizes)}")
        return " or ".join(dict.fromkeys(ways))

    def __str__(self) -> str:
        sides = [side if size is None else f"{side}={size}" for side, size in self.sizes]
        return ",".join([*sides, f"{SERVERS}={self.servers}"] if self.servers else sides)


def choice(text: str) -> Choice:
    """Read a strategy from the command line: a name, or sides of a mesh with their sizes."""
    if _OUTSIDE.fullmatch(text):
        return Choice(text, ((_entry(text).side, None),))
    if text in STRATEGIES:
        return Choice(text, ((STRATEGIES[text].side, None),), servers=STRATEGIES[text].servers)
    sizes: dict[str, int | None] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*([a-z]+)\s*(?:=\s*([0-9]+))?\s*", part)
        if found is None or found[1] not in (*SIDES, SERVERS):
            raise UnknownNameError("strategy", text, STRATEGIES)
        side, size = found[1], None if found[2] is None else int(found[2])
        if side in sizes or size == 0:
            raise InputError(
                f"--strategy {text} names {side} {'twice' if side in sizes else 'with 0 workers'}. "
                "Give each side once, like ddp=2,tp=2."
            )
        sizes[side] = size
    servers = (sizes.pop(SERVERS) or 1) if SERVERS in sizes else 0
    if sum(size is None for size in sizes.values()) > 1:
        raise InputError(
            f"--strategy {text} leaves more than one size open. Give all but one, like ddp=2,tp=2."
        )
    name = "ps" if servers else next((name for name in _COMPUTES if name in sizes), "")
    if not sizes or not name:
        raise UnknownNameError("strategy", text, STRATEGIES)
    wrong = [side for side in sizes if side != STRATEGIES[name].side and side not in STRATEGIES[name].beside]
    if wrong:
        raise InputError(
            f"--strategy {text}: {name} cannot stand beside {wrong[0]}. "
            f"Use it alone, or with {' or '.join(STRATEGIES[name].beside) or STRATEGIES[name].side}."
        )
    return Choice(name, tuple((side, sizes[side]) for side in SIDES if side in sizes), servers=servers)


def several(text: str) -> tuple[str, ...]:
    """Read a list of strategies: names with commas between; sides with sizes that follow each other are one mesh."""
    found: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if "=" in part and found and "=" in found[-1]:
            found[-1] += f",{part}"
        elif part:
            found.append(part)
    return tuple(found)


def entry(text: str) -> StrategyEntry:
    """Return what is known of a strategy, named or given as a mesh."""
    return _entry(choice(text).name)


def _entry(name: str) -> StrategyEntry:
    return STRATEGIES.get(name) or StrategyEntry(name, "a strategy from outside", sharded=True)


def is_sharded(chosen: Choice, mesh: Mesh) -> bool:
    """Return whether each worker of such a mesh will hold a part of the state only."""
    sides = {one.side for one in (*STRATEGIES.values(), _entry(chosen.name)) if one.sharded}
    return mesh.servers > 0 or mesh.size(*sides) > 1


def load(text: str) -> Strategy:
    """Return the strategy itself."""
    reference = entry(text).reference
    module, _, attribute = reference.partition(":")
    try:
        strategy: Strategy = getattr(importlib.import_module(module), attribute)()
    except (ModuleNotFoundError, AttributeError) as error:
        if text in STRATEGIES:
            raise
        raise InputError(
            f"--strategy {reference} was not found: {error}. Give the module as Python imports it, and the class in it."
        ) from None
    return strategy
