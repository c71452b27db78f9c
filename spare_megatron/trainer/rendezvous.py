"""The store in which the ranks of one group meet to form their world: position 0 serves it, and writes its address into
the run directory.

A group's world lives and dies with its ranks, so one of them may serve its store. The store of the replica
communicators, which must outlive a death, is in the coordinator.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

import torch.distributed as dist

from spare_megatron.collectives.store import StoreServer, connect
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.place import Place
from spare_megatron.control.disk import patiently
from spare_megatron.control.run_directory import glance, write_json

POLL_S = 0.05
_servers: list[StoreServer] = []
"""The stores that this process serves until it ends, for the ranks of its group use them as long as they live."""


def group_store(place: Place, timeout_s: float) -> dist.Store:
    """The store in which the ranks of a group, or of a standby, meet; position 0 serves it.

    Raises:
        ConfigError: position 0 did not appear in time.
    """
    directory = Path(place.run_dir) / "leaders"
    patiently(lambda: directory.mkdir(parents=True, exist_ok=True))
    number = place.home.rpartition(" ")[2]
    path = directory / (f"standby-{number}-store.json" if place.place_file else f"group-{number}-store.json")
    if place.is_leader:
        server = StoreServer(_own_address())
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


def _own_address() -> str:
    """This host's name, by which other hosts of the job reach it; the loopback address where the name has no
    address."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "127.0.0.1"
    return name
