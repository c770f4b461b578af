"""One worker's connection with the others: who they are, the proof that they belong to the run, and who is lost."""

from __future__ import annotations

import contextlib
import hmac
import itertools
import math
import secrets
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore, rpc  # type: ignore[attr-defined]
from torch.distributed.rpc import backend_registry

from paceline.compat import transport_log
from paceline.compat.rpc import begin_session
from paceline.compat.rpc import options as agent_options
from paceline.errors import CallRefusedError, InputError
from paceline.remote import guard
from paceline.remote.failures import gone
from paceline.remote.names import Roles
from paceline.remote.numbering import number
from paceline.remote.reach import LOOPBACK
from paceline.world import env

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

TIMEOUT_S = 60.0
JOIN_S = 120.0
"""How long workers that start together wait for each other."""
THREADS = 64
"""How many calls a worker can be in at once. torch completes the answers that a worker gets on these same threads: one whose
calls all wait for other workers waits for ever, so there are more than anybody should need."""
_QUIET_TRANSPORTS = ["ibv", "uv"]
"""All but torch's first choice, shared memory, whose threads spin: an idle worker took a quarter of a core. That is the
fastest where every worker has a core, and slows all down where several share one."""
_PAUSE_S = 0.02
_PART_S = 10
"""How long workers that part wait for one that is lost in that very moment."""
_current: Session | None = None
_openings: list[Callable[[Session], None]] = []


class Session:
    """This worker among the others, from `open` to `close`."""

    def __init__(self, store: Store, rank: int, roles: Roles, timeout_s: float, first_number: int) -> None:
        self.rank, self.roles, self.timeout_s = rank, roles, timeout_s
        self.name = roles.names[rank]
        """This worker's own name: `server:0`."""
        self.role = roles.role(rank)
        self.numbers = itertools.count(first_number)
        """Tells apart what this worker creates elsewhere, in this session and all others."""
        self._store = store
        self._lost: dict[str, float] = {}
        self._open = True
        self._on_close: list[Callable[[], None]] = []
        self._on_loss: list[Callable[[str], None]] = []

    @classmethod
    def open(
        cls,
        store: Store,
        rank: int,
        roles: Roles,
        secret: bytes,
        *,
        interface: str = LOOPBACK,
        threads: int = THREADS,
        timeout_s: float = TIMEOUT_S,
        device_maps: dict[str, dict[Any, Any]] | None = None,
    ) -> Session:
        """Meet the others at `store`, which must be this session's own, prove the secret, and be ready for calls."""
        global _current  # noqa: PLW0603  (torch's RPC is one a process, too)
        if _current is not None:
            raise InputError(
                "this worker is in a session already: torch's RPC is one a process. Close it first."
            )
        store.set_timeout(timedelta(seconds=JOIN_S))
        key = _prove(store, rank, roles, secret)
        session = cls(store, rank, roles, timeout_s, first_number=int.from_bytes(key[:3]) << 28)
        guard.install(key)
        for action in _openings:
            action(session)
        # The workers' first meeting goes over gloo; an interface that the user has named for that stays.
        meeting = env.read("GLOO_SOCKET_IFNAME") or interface
        env.export({"TP_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": meeting})
        begin_session(number(store, rank, roles.size))
        options = agent_options(
            threads=threads,
            timeout_s=timeout_s,
            device_maps=device_maps or {},
            transports=None if roles.size <= env.cores() else _QUIET_TRANSPORTS,
        )
        _current = session  # calls may come in before the next line returns
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
                backend_registry.init_backend(  # type: ignore[no-untyped-call]
                    backend_registry.BackendType.TENSORPIPE,  # type: ignore[attr-defined]
                    store=PrefixStore("rpc", store),
                    name=session.name,
                    rank=rank,
                    world_size=roles.size,
                    rpc_backend_options=options,
                )
        except BaseException:
            _current = None
            raise
        return session

    def workers(self, role: str) -> tuple[str, ...]:
        """Name the workers of a role that are there: the lost ones are left out."""
        return tuple(name for name in self.roles.workers(role) if name not in self._lost)

    @property
    def is_open(self) -> bool:
        """Whether this worker is still in it."""
        return self._open

    @property
    def lost(self) -> frozenset[str]:
        """The workers that are gone."""
        return frozenset(self._lost)

    def note_lost(self, worker: str) -> None:
        """Know that a worker is gone: every call to it fails at once from now on."""
        if worker not in self._lost:
            self._lost[worker] = time.monotonic()
            for action in self._on_loss:
                action(worker)

    def check(self, worker: str, what: str) -> None:
        """Refuse to call a worker that is gone."""
        if worker in self._lost:
            raise gone(worker, what)

    def at_close(self, action: Callable[[], None]) -> None:
        """Have something done before the connections go."""
        self._on_close.append(action)

    def at_loss(self, action: Callable[[str], None]) -> None:
        """Have something done about each worker that is lost."""
        self._on_loss.append(action)

    def wait_for_others(self, patience_s: float = math.inf) -> None:
        """Serve calls until every other worker has come to its end or is lost, or patience is."""
        transport_log.expect_partings()  # nobody parts before all have come here
        self._store.set(f"closed/{self.rank}", "")
        others = [rank for rank in range(self.roles.size) if rank != self.rank]
        limit = time.monotonic() + patience_s
        while others and self._open and time.monotonic() < limit:
            others = [
                rank
                for rank in others
                if self.roles.names[rank] not in self._lost and not self._store.check([f"closed/{rank}"])
            ]
            if others:
                time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Wait for the others, and part from them; one that is lost is not waited for."""
        if not self._open:
            return
        self.wait_for_others()
        self._end(graceful=not self._lost)

    def abandon(self) -> None:
        """Part at once: the group is broken."""
        if self._open:
            self._end(graceful=False)

    def _end(self, *, graceful: bool) -> None:
        global _current  # noqa: PLW0603
        self._open = False
        transport_log.expect_partings()
        for action in self._on_close:
            action()
        patience = self._store.timeout  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=_PART_S))
        # Not in this thread: a call that never ends keeps torch waiting, though nobody waits for its answer any more.
        parting = threading.Thread(target=_shut_down, args=(graceful,), daemon=True, name="paceline-parting")
        parting.start()
        parting.join(_PART_S + _PART_S)
        if parting.is_alive():
            print(f"paceline: {self.name} still runs a call; it is left behind.", file=sys.stderr)  # noqa: T201
        self._store.set_timeout(patience)  # it may serve others, too
        transport_log.warn_of_partings()
        _current = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after an exception nobody is waited for."""
        if kind is None:
            self.close()
        else:
            self.abandon()


def at_open(action: Callable[[Session], None]) -> Callable[[Session], None]:
    """Have something done whenever a session begins."""
    _openings.append(action)
    return action


def current() -> Session:
    """Return the session that this worker is in."""
    if _current is None:
        raise InputError(
            "this worker is in no session, so there is nobody to call. Start it with --roles or paceline.launch_roles."
        )
    return _current


def _shut_down(graceful: bool) -> None:
    try:
        rpc.shutdown(graceful=graceful, timeout=_PART_S if graceful else 0)
    except RuntimeError:  # one was lost while all parted
        with contextlib.suppress(RuntimeError):
            rpc.shutdown(graceful=False)


def _prove(store: Store, rank: int, roles: Roles, secret: bytes) -> bytes:
    """Show the others that this worker knows the secret, see that they do, and give the key of their messages."""
    ranks = range(roles.size)
    store.set(f"challenge/{rank}", secrets.token_hex(16))
    challenges = b" ".join(bytes(store.get(f"challenge/{one}")) for one in ranks)

    def proof(name: str) -> str:
        return hmac.digest(secret, name.encode() + b" " + challenges, "sha256").hex()

    store.set(f"proof/{rank}", proof(roles.names[rank]))
    for one in ranks:
        if not hmac.compare_digest(bytes(store.get(f"proof/{one}")), proof(roles.names[one]).encode()):
            raise CallRefusedError(
                f"{roles.names[one]} does not know this run's secret, so nobody works with it. "
                "Start all workers from one launch, or give all the same secret."
            )
    return hmac.digest(secret, b"calls " + challenges, "sha256")
