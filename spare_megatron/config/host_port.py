"""Addresses of the form host:port, with an IPv6 host in brackets."""

from __future__ import annotations

from spare_megatron.config.errors import ConfigError


def join_address(host: str, port: int) -> str:
    """The address of ``port`` at ``host``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of an address, the host without brackets. Raises ValueError where the port is no number."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def listen_address(listen: str, example: str) -> tuple[str, int]:
    """(host, port) of a flag ``--listen``, the host without brackets. Raises ConfigError where it is no address, with
    one that is."""
    host, _, port = listen.rpartition(":")
    plain = host.removeprefix("[").removesuffix("]")
    if plain and port.isdecimal() and int(port) < 1 << 16 and (host == f"[{plain}]") == (":" in plain):
        return plain, int(port)
    raise ConfigError(f"--listen {listen} is not HOST:PORT, as in {example} or [::1]:0, with a port up to 65535")
