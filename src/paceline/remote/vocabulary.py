"""What may travel in a call beside plain values: classes with `remote.allow`, exceptions, references and services."""

from __future__ import annotations

from typing import Any

from paceline.errors import CallRefusedError
from paceline.remote import registry
from paceline.remote.counted_references import Reference
from paceline.remote.proxy import Proxy
from paceline.transport.values import Writer, refusal

_REFERENCE, _SERVICE = "R", "P"


class Registered:
    """Looks classes up among those that were registered, and writes references for the worker that gets them."""

    def address(self, made_by: Any) -> str | None:
        """Return the name under which the other side knows a class; None where its values may not travel."""
        address = registry.address_of(made_by)
        return address if registry.travels(address) is made_by else None

    def find(self, address: str) -> Any:
        """Return the class of that name, or raise CallRefusedError."""
        found = registry.travels(address)
        if found is None:
            raise refusal(str(address).replace(":", "."))
        return found

    def write(self, writer: Writer, value: Any) -> dict[str, Any] | None:
        """Return the form of a reference or of a service; None for all else."""
        if isinstance(value, Reference):
            return {_REFERENCE: value.written(writer)}
        if isinstance(value, Proxy):
            return {_SERVICE: value.written(writer)}
        return None

    def read(self, tag: str, payload: Any) -> Any:
        """Make a reference, or what stands for a service, of what arrived."""
        if tag == _REFERENCE:
            return Reference.read(payload)
        if tag == _SERVICE:
            return Proxy.read(payload)
        raise CallRefusedError(f"a message could not be read: there is no value of kind {tag!r}")
