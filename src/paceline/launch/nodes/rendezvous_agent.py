"""Keeps one machine in torch's dynamic rendezvous: enters it, says who came, and lets latecomers in. A process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from paceline.errors import InputError, PacelineError
from paceline.launch.nodes.rendezvous import (
    Failed,
    Machine,
    Met,
    Offer,
    Refused,
    Rendezvous,
    Report,
    Waiting,
    write_report,
)
from paceline.world import env, interfaces

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    from paceline.launch.workers.context import Worker

RUN = "paceline"
ROLL_CALL_S = 10.0
"""How long a machine may take from joining a round to telling the others who it is; else it has died in between."""
_PAUSE_S = 0.1


@dataclass(frozen=True, kw_only=True)
class KeepRendezvous:
    """Keep this machine in the rendezvous until killed; reports go to the launcher."""

    rendezvous: Rendezvous
    spec: Mapping[str, str]
    """What must be the same on every machine, by the names that the user knows."""
    offer: Offer | None
    """Given to the leader, who holds the rendezvous."""

    def __call__(self, worker: Worker) -> None:
        """Enter, report, and look for machines that wait."""
        if worker.extra is None:
            raise RuntimeError("the keeper needs the socket that it reports to")
        # Else torch makes a store of its own on every round: machines then race for it, and the second round hangs.
        env.export({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
        with socket.socket(fileno=worker.extra) as channel, contextlib.suppress(BrokenPipeError):

            def tell(report: Report) -> None:
                channel.sendall(write_report(report))

            try:
                _Keeping(self, tell).run()
            except PacelineError as error:
                tell(Failed(str(error), is_input=isinstance(error, InputError)))
            except BrokenPipeError:
                raise
            except Exception as error:  # noqa: BLE001  (the launcher is told, and the log has the rest)
                traceback.print_exc()
                tell(Failed(f"the rendezvous at {self.rendezvous.endpoint} failed: {_line(error)}"))


class _Keeping:
    """The work itself; whatever ends it is raised."""

    def __init__(self, call: KeepRendezvous, tell: Callable[[Report], None]) -> None:
        self._rendezvous = call.rendezvous
        self._offer = call.offer
        self._spec = {**call.spec, "nodes": call.rendezvous.nodes}
        self._tell = tell
        self._deadline = time.monotonic() + call.rendezvous.join_s
        self._rounds = 0
        self._refusals = 0

    def run(self) -> None:
        """Serve until killed."""
        from torch.distributed import DistError
        from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

        leading, address, self._store = self._hold() if self._offer is not None else self._reach()
        self._local = Machine(host=env.host(), address=address)
        try:
            self._write("arrival", str(self._local))
            self._leader, self._agreed = self._agree(leading)
            handler = self._handler()
            self._tell(self._meet_first(handler))
            while True:
                self._await_newcomer(handler)
                met = self._meet(handler)
                if met is not None:
                    self._tell(met)
        except (RendezvousConnectionError, DistError) as error:
            raise PacelineError(
                f"the rendezvous at {self._rendezvous.endpoint} is gone: the machine that holds it has ended "
                f"or cannot be reached ({_line(error.__cause__ or error)})."
            ) from error

    def _hold(self) -> tuple[str, str, Store]:
        """Serve the rendezvous: its address from here, this machine's address for others, and the store."""
        wanted = self._rendezvous
        bound = interfaces.address_to_bind(wanted.host)
        try:
            listening = socket.create_server(
                (bound, wanted.port), family=interfaces.family(bound), backlog=1024
            )
        except OSError as error:
            raise InputError(
                f"this machine cannot hold the rendezvous at {wanted.endpoint}: {_words(error)}. "
                "Give --rendezvous a port that is free."
            ) from error
        listening.setblocking(False)
        local = interfaces.reaching(wanted.host).address
        reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound, bound)  # noqa: S104  (connected to, not bound)
        return local, local, self._open_store(reached, listening.detach())

    def _reach(self) -> tuple[str, str, Store]:
        """Find the machine that holds the rendezvous, which may be yet to start."""
        wanted = self._rendezvous
        told = ""
        while True:
            try:
                left = self._deadline - time.monotonic()
                with socket.create_connection(
                    (wanted.host, wanted.port), timeout=min(5.0, max(0.1, left))
                ) as probe:
                    reached, local = probe.getpeername()[0], probe.getsockname()[0]
                return reached, local, self._open_store(reached, None)
            except OSError as error:
                reason = _words(error)
            if time.monotonic() > self._deadline:
                raise PacelineError(
                    f"no machine holds the rendezvous at {wanted.endpoint}: {reason}, for {wanted.join_s:g} s. "
                    f"Start the same command on {wanted.host}, or check the address and the firewall."
                )
            if reason != told:
                self._tell(Waiting(f"nobody answers at {wanted.endpoint} yet: {reason}"))
                told = reason
            time.sleep(_PAUSE_S)

    def _open_store(self, address: str, listening: int | None) -> Store:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store: Store = TCPStore(
            address,
            self._rendezvous.port,
            is_master=listening is not None,
            wait_for_workers=False,
            master_listen_fd=listening,
            timeout=timedelta(seconds=self._rendezvous.answer_s),
            use_libuv=True,
        )
        return store

    def _agree(self, leading: str) -> tuple[Machine, Offer]:
        """Learn from the leader what it offers; a machine that came for another run goes away before it counts."""
        if self._offer is not None:
            card = {"host": self._local.host, "spec": self._spec, "offer": asdict(self._offer)}
            self._store.set("leader", json.dumps(card))
        card = json.loads(self._store.get("leader"))
        leader = Machine(host=card["host"], address=leading)
        if card["spec"] != self._spec:
            here, there = (_differences(card["spec"], self._spec, where) for where in ("here", "there"))
            self._write("refusal", f"{self._local} asked for another run and was sent away: {there}")
            raise InputError(
                f"this machine asks for another run than {leader}, which leads: {here}. "
                "Give the same command on every machine."
            )
        return leader, Offer(**card["offer"])

    def _handler(self) -> DynamicRendezvousHandler:
        """Make torch's side of it; a follower first sees the leader in, for no round counts without."""
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
            DynamicRendezvousHandler,
            RendezvousTimeout,
        )

        wanted = self._rendezvous
        backend = C10dRendezvousBackend(self._store, RUN)
        while self._offer is None and backend.get_state() is None:
            time.sleep(_PAUSE_S)
        handler: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
            RUN,
            self._store,
            backend,
            wanted.min_nodes,
            wanted.max_nodes,
            local_addr=self._local.address,
            timeout=RendezvousTimeout(
                join=timedelta(seconds=wanted.join_s), last_call=timedelta(seconds=wanted.last_call_s)
            ),
            keep_alive_interval=wanted.keep_alive_s,
            keep_alive_max_attempt=wanted.keep_alive_attempts,
        )
        return handler

    def _meet_first(self, handler: DynamicRendezvousHandler) -> Met:
        """Come together for the first time, in time."""
        wanted = self._rendezvous
        self._tell(Waiting(f"waiting at {wanted.endpoint} for {wanted.nodes} machines"))
        while (met := self._meet(handler)) is None:
            if time.monotonic() > self._deadline:
                raise self._too_few()
        return met

    def _await_newcomer(self, handler: DynamicRendezvousHandler) -> None:
        """Wait until a machine wants to be let in; the leader says whom it had to send away meanwhile."""
        while handler.num_nodes_waiting() == 0:
            for sentence in self._read("refusal", self._refusals) if self._offer is not None else []:
                self._tell(Refused(sentence))
                self._refusals += 1
            time.sleep(self._rendezvous.poll_s)

    def _meet(self, handler: DynamicRendezvousHandler) -> Met | None:
        """Enter the next round and learn who is in it; None when it came to nothing and is to be tried again."""
        from torch.distributed import DistStoreError
        from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

        try:
            info = handler.next_rendezvous()
        except (RendezvousTimeoutError, DistStoreError):
            return None  # too few came, or one died as it came
        self._rounds += 1
        cards = self._roll_call(info.store, info.rank, info.world_size)
        leading = [card for card in cards if card["leads"]]
        if not leading or len(cards) < self._rendezvous.min_nodes:
            return None
        return Met(
            round=leading[0]["rounds"],
            rank=[card["rank"] for card in cards].index(info.rank),
            nodes=len(cards),
            machines=tuple(Machine(host=card["host"], address=card["address"]) for card in cards),
            leader=self._leader,
            local=self._local,
            offer=self._agreed,
        )

    def _roll_call(self, store: Store, rank: int, size: int) -> list[dict[str, Any]]:
        """Return who this machine is and hear the others of the round, by rank; one that has died since is left out."""
        leads = self._offer is not None
        card = {**asdict(self._local), "rank": rank, "rounds": self._rounds, "leads": leads}
        store.set(f"card/{rank}", json.dumps(card))
        names = [f"card/{one}" for one in range(size)]
        deadline = time.monotonic() + ROLL_CALL_S
        while not store.check(names) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        return [json.loads(store.get(name)) for name in names if store.check([name])]

    def _too_few(self) -> PacelineError:
        wanted = self._rendezvous
        came = sorted(set(self._read("arrival")))
        refusals = "".join(f" {sentence}." for sentence in self._read("refusal"))
        return PacelineError(
            f"{len(came)} of {wanted.min_nodes} machines came to {wanted.endpoint} within {wanted.join_s:g} s: "
            f"{', '.join(came)}.{refusals} Start the same command on the others, or let --nodes allow fewer."
        )

    def _write(self, list_name: str, text: str) -> None:
        """Add to a list that all machines can read."""
        self._store.set(f"{list_name}/{self._store.add(list_name, 1)}", text)

    def _read(self, list_name: str, after: int = 0) -> list[str]:
        count = self._store.add(list_name, 0)
        return [self._store.get(f"{list_name}/{one}").decode() for one in range(after + 1, count + 1)]


def _differences(leading: Mapping[str, str], other: Mapping[str, str], where: str) -> str:
    """Return what differs, by name: `lr is 0.2 here and 0.1 where it leads`."""
    names = sorted(name for name in {*leading, *other} if leading.get(name) != other.get(name))
    return ", ".join(
        f"{name} is {other.get(name, 'not set')} {where} and {leading.get(name, 'not set')} at the leader"
        for name in names
    )


def _words(error: OSError) -> str:
    """Return the kernel's own words, or the resolver's, without what Python adds to them."""
    if error.errno is None or isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno)


def _line(error: BaseException) -> str:
    """Return an error of torch's as one line; theirs may carry a C++ stack."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
