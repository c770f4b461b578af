"""How a host and a port are written as one address."""

from __future__ import annotations


def at(host: str, port: int | str) -> str:
    """Return `host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
