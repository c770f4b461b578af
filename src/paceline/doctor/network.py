"""The network of this machine: interfaces, its own name, and variables that lead workers astray. Imports no torch."""

from __future__ import annotations

import contextlib
import re
import socket
from pathlib import Path

from paceline.doctor.finding import Finding, fail, ok, warn
from paceline.errors import InputError
from paceline.observe.formats import plural
from paceline.world import env, interfaces

ATTEMPT_S = 2.0
"""How long a connection from this machine to itself may take."""
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


def addresses() -> list[Finding]:
    """Look at the interfaces and their addresses, and at which of them others would be told to use."""
    known: dict[str, list[str]] = {}
    for address, name in interfaces.local_addresses().items():
        known.setdefault(name, []).append(address)
    found = _loopback()
    facts = {"interfaces": known}
    listed = "; ".join(f"{name} {' '.join(sorted(ours))}" for name, ours in sorted(known.items()))
    outside = [one for ours in known.values() for one in ours if not _is_local(one)]
    if not outside:
        what = f"only the loopback interface has an address ({listed or 'none'}): this machine trains alone"
        remedy = "For several machines give an interface an address and a route, or join the container to their network."
        return [*found, warn("network", what, remedy, **facts)]
    try:
        used = interfaces.reaching(env.host())
    except InputError:
        used = None
    if used is None or interfaces.is_loopback(used.address):
        used = None
        what = f"no interface is the way out: {listed}"
        remedy = "For several machines add a route (ip route add default ...), or give --rendezvous the address to use."
        found.append(warn("network", what, remedy, **facts))
    else:
        found.append(
            ok(
                "network",
                f"{listed}; others are told {used.address} ({used.interface})",
                **facts,
                used=used.interface,
            )
        )
    return found + [one for address in outside for one in _own_address(address)]


def _loopback() -> list[Finding]:
    """Look whether this machine reaches itself at 127.0.0.1, where workers of one machine meet."""
    why = _answers("127.0.0.1")
    if why is None:
        return []
    return [
        fail(
            "network",
            f"this machine does not reach itself at 127.0.0.1 ({why}), where workers of one machine meet",
            "Bring the loopback interface up (ip link set lo up), and let the firewall pass what goes over it.",
        )
    ]


def _own_address(address: str) -> list[Finding]:
    """Look whether this machine reaches itself at an address of its own, as workers on the machine that leads do."""
    why = _answers(address)
    if why is None:
        return []
    return [
        warn(
            "network",
            f"this machine does not reach itself at {address} ({why})",
            "A run that meets at this address would fail. Let the firewall pass it, or give --rendezvous another address.",
            address=address,
        )
    ]


def _answers(address: str) -> str | None:
    """Open a connection from this machine to a port of its own; return why it failed, or None."""
    try:
        listening = socket.create_server((address, 0), family=interfaces.family(address))
    except OSError as error:
        return f"nothing can listen there: {error.strerror or error}"
    with listening:
        try:  # the kernel answers for a socket that listens: nobody need accept
            with socket.create_connection(listening.getsockname()[:2], timeout=ATTEMPT_S):
                return None
        except TimeoutError:
            return f"no answer within {ATTEMPT_S:g} s: something drops what is sent"
        except OSError as error:
            return error.strerror or str(error)


def _is_local(address: str) -> bool:
    """Return whether an address means something on this machine, or on one cable of it, alone."""
    return interfaces.is_loopback(address) or address.lower().startswith("fe80:")


def own_name() -> list[Finding]:
    """Look at what this machine's own name leads to: other machines are told an address, but other programs go by the name."""
    name = env.host()
    found = interfaces.resolve(name)
    facts = {"host": name, "addresses": found}
    advice = (
        f"Put its address and {name} into /etc/hosts, or give --rendezvous an address instead of the name."
    )
    if not found:
        return [warn("name", f"this machine does not know its own name, {name}", advice, **facts)]
    if all(interfaces.is_loopback(one) for one in found):
        what = f"its own name, {name}, leads this machine to {found[0]}, where no other machine reaches it"
        return [warn("name", what, advice, **facts)]
    strange = [one for one in found if interfaces.interface_of(one) is None]
    if strange:
        what = f"{name} leads to {', '.join(strange)}, which is no address of this machine"
        return [warn("name", what, advice, **facts)]
    return [ok("name", f"{name} is {', '.join(found)}", **facts)]


def named_interfaces() -> list[Finding]:
    """Look whether the variables that name an interface name one that is there, up and with an address."""
    return [*_gloo_interfaces(), *_nccl_interfaces()]


def _gloo_interfaces() -> list[Finding]:
    variable = "GLOO_SOCKET_IFNAME"
    text = env.read(variable)
    if text is None:
        return []
    found = []
    for name in text.split(","):
        why = _unusable(name)
        if why is not None:
            what = f"{variable} is {text!r}, and {why}: gloo's workers could not connect"
            found.append(fail("network", what, _choose(variable), variable=variable, value=text))
    return found


def _nccl_interfaces() -> list[Finding]:
    """Look at NCCL's variable: names of which the beginnings count, `=` before exact ones, `^` before ones to avoid."""
    variable = "NCCL_SOCKET_IFNAME"
    text = env.read(variable)
    if not text:
        return []
    avoided, exact = text.startswith("^"), text.lstrip("^").startswith("=")
    wanted = [one for one in text.lstrip("^=").split(",") if one]
    there = [
        name
        for _, name in socket.if_nameindex()
        if any(name == one if exact else name.startswith(one) for one in wanted) != avoided
    ]
    if any(_unusable(name) is None for name in there):
        return []
    what = f"{variable} is {text!r}, and no interface with an address is one of these: NCCL could not connect"
    # Where there is no GPU nobody asks NCCL.
    level = fail if Path("/dev/nvidiactl").exists() else warn
    return [level("network", what, _choose(variable), variable=variable, value=text)]


def _unusable(name: str) -> str | None:
    """Return why an interface cannot be used; None where it can."""
    if name not in {known for _, known in socket.if_nameindex()}:
        return f"there is no interface {name!r}"
    if name not in {known.partition(":")[0] for known in interfaces.local_addresses().values()}:
        return f"{name} has no address"
    state = Path("/sys/class/net", name, "operstate")
    with contextlib.suppress(OSError):
        if state.read_text().strip() == "down":
            return f"{name} is down"
    return None


def _choose(variable: str) -> str:
    names = sorted({name.partition(":")[0] for name in interfaces.local_addresses().values()})
    return f"Unset {variable}: paceline chooses the interface that leads to the others. Or name one of {', '.join(names)}."


def proxies() -> list[Finding]:
    """Look for proxies: paceline's own connections and torch's pass them by, those of Ray and of downloads do not."""
    found = [name for name in _PROXIES if env.read(name) or env.read(name.upper())]
    if not found:
        return []
    spared = env.read("no_proxy") or env.read("NO_PROXY") or ""
    own = {env.host(), *(one for one in interfaces.local_addresses() if not _is_local(one))}
    if own & set(re.split(r"[\s,]+", spared)) or spared.strip() == "*":
        return []
    return [
        warn(
            "proxy",
            f"{plural(len(found), 'proxy is', 'proxies are')} set ({', '.join(found)}): workers do not use it, but Ray's "
            "connections between machines would",
            "Name the machines of the run in no_proxy.",
        )
    ]
