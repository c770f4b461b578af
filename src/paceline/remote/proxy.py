"""A service seen from another worker: the same methods, carried out where it lives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from paceline.errors import InputError
from paceline.remote import registry
from paceline.remote.calls import Method
from paceline.remote.counted_references import Reference
from paceline.remote.exchange import BATCHED, CREATE, FUNCTION, METHOD
from paceline.remote.session import current
from paceline.transport.values import Writer

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Service = TypeVar("Service")


class Proxy:
    """What stands for a service on workers that do not have it."""

    _address = ""

    def __init__(self, lease: Reference[Any]) -> None:
        self._lease = lease

    @property
    def _owner(self) -> str:
        return self._lease.owner

    def written(self, writer: Writer) -> list[Any]:
        """Return its form in a message: that of one more holder of the same service."""
        return [self._address, *self._lease.written(writer)]

    @classmethod
    def read(cls, payload: list[Any]) -> Proxy:
        """Make what stands for a service of what arrived."""
        return _proxy_class(str(payload[0]))(Reference.read(payload[1:]))

    def __reduce__(self) -> tuple[Any, ...]:
        return self._lease.__reduce__()

    def __repr__(self) -> str:
        return f"<{self._address.rpartition(':')[2]} on {self._owner}>"


class _RemoteMethod:
    """Makes a bound `Method` and keeps it: made once for each service and name."""

    def __init__(self, described: Callable[..., Any]) -> None:
        self._described = described
        self.__doc__ = described.__doc__

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, proxy: Proxy | None, _: type) -> Any:
        if proxy is None:
            return self._described
        is_batched = hasattr(self._described, registry.BATCHED)
        made: Method[..., Any] = Method(
            proxy._owner,  # noqa: SLF001
            BATCHED if is_batched else METHOD,
            (*proxy._lease.number, self._name),  # noqa: SLF001
            self._described,
            stays=not is_batched,
            holds=proxy._lease,  # noqa: SLF001  (the service lives as long as a method of it)
        )
        proxy.__dict__[self._name] = made
        return made


@functools.cache
def _proxy_class(address: str) -> type[Proxy]:
    description = registry.find_service(address)
    methods = {name: _RemoteMethod(value) for name, value in description.methods.items()}
    named = {"__doc__": description.made_by.__doc__, "_address": address}
    return type(description.made_by.__name__, (Proxy,), {**methods, **named})


def create(
    worker: str, made_by: Callable[Parameters, Service], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Service:
    """Create a service on a worker, and give what stands for it here.

    It lives until the last worker that holds it lets go.
    """
    if not isinstance(made_by, type):
        raise InputError(f"{made_by!r} is no class, so it is no service. Call functions with remote.call.")
    session, address = current(), registry.address_of(made_by)
    registry.described(made_by)
    name = session.roles.resolve(worker)
    session.check(name, made_by.__qualname__)
    kind = address.rpartition(":")[2]
    asked = session.exchange.request(
        name,
        CREATE,
        [address, args, kwargs],
        what=made_by.__qualname__,
        timeout_s=session.timeout_s,
        keeps=True,
    )
    number = (session.rank, asked.number)
    lease: Reference[Any] = Reference(
        name, number, number, kind
    )  # goes where it fails: it may still be created
    asked.wait()
    return cast("Service", _proxy_class(address)(lease))


def call(worker: str, called: Callable[Parameters, Result]) -> Method[Parameters, Result]:
    """Return a registered function as it is on a worker: `remote.call("server:0", add)(1, 2)`."""
    address = registry.check_function(called)
    name = current().roles.resolve(worker)
    return Method(name, FUNCTION, (address,), called)


def peer(worker: str) -> str:
    """Return a worker's own name, or say which there are."""
    return current().roles.resolve(worker)


def service_of(proxy: Service) -> Service:
    """Return the service itself, on the worker where it lives."""
    if not isinstance(proxy, Proxy):
        return proxy
    if proxy._owner != current().name:  # noqa: SLF001
        raise InputError(f"{proxy!r} is not on this worker. Call its methods instead.")
    return cast("Service", proxy._lease.local().made)  # noqa: SLF001
