"""Addresses of the form host:port, with an IPv6 host in brackets."""

from __future__ import annotations


def join_address(host: str, port: int) -> str:
    """The address of ``port`` at ``host``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of an address, the host without brackets. Raises ValueError where the port is no number."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
