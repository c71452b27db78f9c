"""A rank's process groups have one gloo device together, and torch makes those of others as it always does."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.shape import JobShape
from tests.spawn import run_ranks

pytestmark = pytest.mark.beside_others


def devices() -> int:
    """The number of gloo devices of this process: each listens from the moment it is made (its thread names itself
    some time later, so names of threads do not count them)."""
    own = [int(entry.name) for entry in Path("/proc/self/fd").iterdir() if entry.is_socket()]
    return sum(_listens(number) for number in own)


def _listens(number: int) -> bool:
    with socket.socket(fileno=os.dup(number)) as connection:
        return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def worker(_rank: int, store: Any, interface: str) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed import PrefixStore

    from spare_megatron.megatron_adapter.model import world

    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    shape = JobShape(num_groups=1, micro_batch_size=1, global_batch_size=1)
    counts = {}
    for name, one in (("ours", True), ("torch's", False)):
        world.init_group_world(shape, 0, PrefixStore(name, store), one_gloo_device=one)
        counts[name] = devices()
        group = dist.new_group([0])
        counts[f"{name}, and a group made later"] = devices()
        told = [None]
        dist.all_gather_object(told, "here", group=group)
        world.barrier()
        assert told == ["here"]
        assert dist.get_backend() == "gloo"
        world.destroy()
    return counts


@pytest.mark.parametrize("interface", ["", "lo"])
def test_one_device_for_all_groups(interface: str) -> None:
    (counts,) = run_ranks("tests.megatron.test_gloo_device:worker", [interface])
    assert counts["ours"] == 1
    assert counts["torch's"] > 10, "megatron-core makes fewer groups than the docstring says"
    assert counts["ours, and a group made later"] == 2
