"""The store in which the ranks of one group meet to form their world: position 0 serves it, and writes its address into
the run directory.

A group's world lives and dies with its ranks, so one of them may serve its store. The store of the replica
communicators, which must outlive a death, is in the coordinator.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

from spare_megatron.collectives.interface import own_host
from spare_megatron.collectives.store import StoreServer, connect
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.place import Place
from spare_megatron.control.disk import patiently
from spare_megatron.control.run_directory import glance, write_json

POLL_S = 0.05
_servers: list[StoreServer] = []
"""The stores that this process serves until it ends, for the ranks of its group use them as long as they live."""


def group_store(place: Place, timeout_s: float, interface: str = "") -> dist.Store:
    """The store in which the ranks of a group, or of a standby, meet; position 0 serves it, on the given interface.

    Raises:
        ConfigError: position 0 did not appear in time, or there is no such interface.
    """
    directory = Path(place.run_dir) / "leaders"
    patiently(lambda: directory.mkdir(parents=True, exist_ok=True))
    number = place.home.rpartition(" ")[2]
    path = directory / (f"standby-{number}-store.json" if place.place_file else f"group-{number}-store.json")
    if place.is_leader:
        server = StoreServer(_store_host(interface))
        _servers.append(server)
        host, port = server.host, server.port
        address = {"incarnation": place.incarnation, "host": host, "port": port}
        patiently(lambda: write_json(path, address), timeout_s)
    else:
        host, port = _wait_for_leader(path, place, timeout_s)
    return dist.PrefixStore(f"{place.home}/{place.incarnation}", connect(host, port, timeout_s))


def _wait_for_leader(path: Path, place: Place, timeout_s: float) -> tuple[str, int]:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        told = glance(path)
        if told is not None and told["incarnation"] == place.incarnation:
            return told["host"], told["port"]
        time.sleep(POLL_S)
    raise ConfigError(
        f"position 0 of {place.home} did not appear in {path.parent} within {timeout_s:g} s; "
        "see its log, and whether all ranks share the run directory"
    )


def _store_host(interface: str) -> str:
    """Where other hosts of the group reach the store; the loopback address where this machine's name leads nowhere, as
    it may where all ranks are on one machine."""
    if interface:
        return own_host(interface)
    try:
        return own_host()
    except ConfigError:
        return "127.0.0.1"
