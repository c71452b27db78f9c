"""The address at which others reach this machine: the one place where every listener of a job chooses it.

The order is the same for all: what a flag says, then what the environment says (GLOO_SOCKET_IFNAME, by which users of
torch choose an interface), then what the machine knows of itself.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable

import psutil

from spare_megatron.config.errors import ConfigError


def own_address(interface: str, towards: Callable[[], str]) -> str:
    """The address of this machine for connections between groups.

    Args:
        interface: the name of a network interface, or a network in CIDR notation in which the address lies; empty:
            GLOO_SOCKET_IFNAME, by which users of torch choose one, or else the way to ``towards``.
        towards: finds the host of the coordinator; may take a while.

    Raises:
        ConfigError: there is no such interface, or it has no address.
    """
    return _given(interface) or _on_the_way_to(towards())


def own_host(interface: str = "") -> str:
    """As :func:`own_address`, for listeners that cannot wait for a coordinator: in place of the way to it, the name of
    this machine, as other machines look it up themselves.

    Raises:
        ConfigError: there is no such interface, or the machine's name does not lead to the machine.
    """
    found, name = _given(interface), socket.gethostname()
    if found:
        return found
    try:
        places = {place[0]: family for family, *_, place in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise ConfigError(f"this machine's name, {name}, has no address ({error.strerror}); {_FIX}") from None
    foreign = [str(place) for place, family in places.items() if not _is_own(str(place), family)]
    if foreign:
        raise ConfigError(
            f"this machine's name, {name}, leads to {', '.join(foreign)}, which is none of its own addresses; {_FIX}"
        )
    return name


def advertised(listen: str) -> str:
    """The host by which others reach a server that listens on ``listen``: its own, or :func:`own_host` where it means
    all addresses. Raises ConfigError."""
    host = listen.rpartition(":")[0]
    return own_host() if host in ("", "0.0.0.0", "[::]") else host


_FIX = (
    "give an address that all machines of the job reach: --spare-interface or GLOO_SOCKET_IFNAME for ranks, --listen "
    "HOST:PORT for the coordinator; or mend /etc/hosts"
)


def _is_own(address: str, family: int) -> bool:
    """Whether this machine can listen on an address."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _given(interface: str) -> str:
    """The address that a flag or the environment asks for; empty where neither does."""
    if "/" in interface:
        return _in_network(interface)
    given = "--spare-interface" if interface else "GLOO_SOCKET_IFNAME"
    name = interface or os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return _of_interface(name, given) if name else ""


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise ConfigError(
            f"--spare-interface {text} is no network: {error}; give a name (eth0) or a network (10.0.0.0/16)"
        ) from None


def _in_network(text: str) -> str:
    network, found = _network(text), []
    for name, address in _addresses():
        if ipaddress.ip_address(address) in network:
            return address
        found.append(f"{name} {address}")
    raise ConfigError(
        f"--spare-interface {text}: this machine, {socket.gethostname()}, has no address in that network; "
        f"its addresses are {', '.join(found)}"
    )


def _of_interface(name: str, given: str) -> str:
    for one, address in _addresses():
        if one == name:
            return address
    raise ConfigError(
        f"{given} names {name}, which has no address on {socket.gethostname()}; the interfaces are "
        f"{', '.join(sorted({one for one, _ in _addresses()}))}"
    )


def _addresses() -> list[tuple[str, str]]:
    """(interface, address), IPv4 before IPv6, without link-local ones of IPv6, which need a scope."""
    known = psutil.net_if_addrs()
    return [
        (name, one.address)
        for family in (socket.AF_INET, socket.AF_INET6)
        for name, addresses in sorted(known.items())
        for one in addresses
        if one.family == family and "%" not in one.address
    ]


def _on_the_way_to(host: str) -> str:
    """This machine's address on the way to ``host`` (no packet is sent)."""
    family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def family_of(host: str) -> socket.AddressFamily:
    """The family of an address without brackets."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
