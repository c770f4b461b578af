"""Which of this machine's network interfaces reaches another machine, and whether a host is this machine. No torch."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InputError
from paceline.world import env

_SIOCGIFCONF = 0x8912
_INTERFACE_REQUEST_BYTES = 40
"""sizeof(struct ifreq) on 64-bit Linux: a name of 16 bytes, then a socket address."""
_LARGEST_TABLE = 1 << 16
_ELSEWHERE = {socket.AF_INET: "198.51.100.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses set aside for documentation: nothing is ever sent to them, they only ask which way out is the usual one."""


@dataclass(frozen=True, slots=True)
class LocalEnd:
    """This machine's end of a path to another: the address others see, and the interface that has it."""

    address: str
    interface: str


def local_addresses() -> dict[str, str]:
    """Return every address of this machine with the name of the interface that has it."""
    return {**_addresses_v6(), **_addresses_v4()}


def interface_of(address: str) -> str | None:
    """Name the interface that has an address, as GLOO_SOCKET_IFNAME wants it; None when it is not ours."""
    return local_addresses().get(str(ipaddress.ip_address(address.partition("%")[0])))


def resolve(host: str) -> list[str]:
    """Return the addresses of a host, the resolver's favourite first; none when nobody knows it."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return []
    return list(dict.fromkeys(_written(entry[4]) for entry in found))


def is_here(host: str) -> bool:
    """Return whether a host is this machine: whether one of its addresses can be bound here."""
    return any(_is_ours(address) for address in resolve(host))


def reaching(host: str) -> LocalEnd:
    """Return this machine's end of the path to `host`; nothing is sent.

    Many machines know their own name only as a loopback address. Others do not: a name that leads
    to the loopback interface is answered with the way out that everybody else would use.
    """
    for address in resolve(host):
        ends = [address if _is_ours(address) else None, _local_address(address)]
        if is_loopback(address) and not is_loopback(host):
            ends.insert(0, _way_out())
        for local in ends:
            if local is not None and (interface := interface_of(local)) is not None:
                return LocalEnd(local, interface)
    fact = f"there is no route to {host}" if resolve(host) else f"{host} is no host that this machine knows"
    raise InputError(f"{fact}. Check the name, or give an address that this machine can reach.")


def address_to_bind(host: str) -> str:
    """Return the address on which this machine, being `host`, is reached by others: one interface's, no more.

    Only where this machine knows its own name as a loopback address, nobody here can tell which one
    that is; then it is the address of all of them.
    """
    ours = [address for address in resolve(host) if _is_ours(address)]
    if not ours:
        raise InputError(f"{host} is not an address of this machine. Give one that is, or run there.")
    if is_loopback(ours[0]) and not is_loopback(host):
        return "::" if ":" in ours[0] else "0.0.0.0"  # noqa: S104  (said above)
    return ours[0]


def network() -> str:
    """Return what processes have in common that reach each other over the loopback interface.

    A name does not tell: machines may share one, and a container may have its host's name and a network of its own.
    """
    return f"{env.host()} {env.kernel()} {env.namespace('net')}"


def is_loopback(host: str) -> bool:
    """Return whether a host, as written, can only ever mean the machine itself."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def family(address: str) -> socket.AddressFamily:
    """Return the address family of an address: IPv6 or IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _written(address: tuple[object, ...]) -> str:
    """Return a socket address's host as text; an IPv6 link-local one names its interface."""
    host, scope = str(address[0]), address[3] if len(address) == 4 else 0
    return f"{host}%{socket.if_indextoname(scope)}" if isinstance(scope, int) and scope else host


def _is_ours(address: str) -> bool:
    with socket.socket(family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(_socket_address(address, 0))
        except OSError:
            return False
    return True


def _local_address(address: str) -> str | None:
    """Return the address packets to `address` would leave from; connecting a datagram socket only looks that up."""
    with socket.socket(family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_socket_address(address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0]).partition("%")[0]


def _way_out() -> str | None:
    """Return the address of the default route, or failing that of any interface that is not the loopback one."""
    for address in map(_local_address, _ELSEWHERE.values()):
        if address is not None and not is_loopback(address):
            return address
    others = [address for address in local_addresses() if not is_loopback(address)]
    return min(others, key=lambda address: (":" in address, address), default=None)


def _socket_address(address: str, port: int) -> tuple[object, ...]:
    """Return what `bind` and `connect` take; an IPv6 link-local address needs its interface's number too."""
    return socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][4]


def _addresses_v4() -> dict[str, str]:
    table = array.array("B", bytes(_LARGEST_TABLE))
    start, _ = table.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, struct.pack("iL", _LARGEST_TABLE, start))
    used = struct.unpack("iL", answer)[0]
    found: dict[str, str] = {}
    for at in range(0, used, _INTERFACE_REQUEST_BYTES):
        entry = table[at : at + _INTERFACE_REQUEST_BYTES].tobytes()
        name = entry[:16].partition(b"\0")[0].decode()
        found.setdefault(socket.inet_ntoa(entry[20:24]), name)
    return found


def _addresses_v6() -> dict[str, str]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return {}  # a kernel without IPv6
    return {
        str(ipaddress.IPv6Address(bytes.fromhex(fields[0]))): fields[-1] for fields in map(str.split, lines)
    }
