"""A service seen from another worker: the same methods, carried out where it lives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from paceline.errors import CallTimeoutError, InputError
from paceline.remote import dispatch, registry
from paceline.remote.calls import Method
from paceline.remote.counted_references import Reference, new_hold, release
from paceline.remote.guard import own
from paceline.remote.object_store import Number
from paceline.remote.session import current

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Service = TypeVar("Service")


class Proxy:
    """What stands for a service on workers that do not have it."""

    _address = ""

    def __init__(self, number: Number, lease: Reference[Any]) -> None:
        self._number, self._lease = number, lease

    @property
    def _owner(self) -> str:
        return self._lease.owner

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as one more holder of the same service."""
        return (rebuild, (self._address, self._number, self._lease))

    def __repr__(self) -> str:
        return f"<{self._address.rpartition(':')[2]} on {self._owner}>"


class _RemoteMethod:
    """Gives a bound `Method` and keeps it: made once for each service and name."""

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
            dispatch.run_batched if is_batched else dispatch.run_method,
            (proxy._number, self._name),  # noqa: SLF001
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


@own
def rebuild(address: str, number: Number, lease: Reference[Any]) -> Proxy:
    """Make a proxy of what arrived."""
    return _proxy_class(address)(number, lease)


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
    number, token = new_hold(session)
    maker: Method[..., None] = Method(name, dispatch.make, (number, token, address), made_by)
    try:
        maker(*args, **kwargs)
    except CallTimeoutError:
        release(name, (number, token))  # it may still be created
        raise
    lease: Reference[Any] = Reference(name, number, token, address.rpartition(":")[2])
    return cast("Service", _proxy_class(address)(number, lease))


def call(worker: str, called: Callable[Parameters, Result]) -> Method[Parameters, Result]:
    """Return a registered function as it is on a worker: `remote.call("server:0", add)(1, 2)`."""
    address = registry.check_function(called)
    name = current().roles.resolve(worker)
    return Method(name, dispatch.run_function, (address,), called)


def peer(worker: str) -> str:
    """Return a worker's own name, or say which there are."""
    return current().roles.resolve(worker)


def service_of(proxy: Service) -> Service:
    """Return the service itself, on the worker where it lives."""
    if not isinstance(proxy, Proxy):
        return proxy
    if proxy._owner != current().name:  # noqa: SLF001
        raise InputError(f"{proxy!r} is not on this worker. Call its methods instead.")
    return cast("Service", dispatch.instance(proxy._number))  # noqa: SLF001
