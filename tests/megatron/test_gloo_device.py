"""A rank's process groups have one gloo device together, and torch makes those of others as it always does."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from spare_megatron.config.shape import JobShape
from tests.spawn import run_ranks


def devices() -> int:
    """The number of gloo devices of this process: each listens from the moment it is made (its thread names itself
    some time later, so names of threads do not count them)."""
    return len(addresses())


def addresses() -> list[Any]:
    """Where they listen."""
    own = [int(entry.name) for entry in Path("/proc/self/fd").iterdir() if entry.is_socket()]
    return [address for number in own for address in _listens(number)]


def _listens(number: int) -> list[Any]:
    with socket.socket(fileno=os.dup(number)) as connection:
        listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return [connection.getsockname()] if listens else []


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
        reported = [None]
        dist.all_gather_object(reported, "here", group=group)
        world.barrier()
        assert reported == ["here"]
        assert dist.get_backend() == "gloo"
        world.destroy()
    return counts


@pytest.mark.parametrize("interface", ["", "lo"])
def test_one_device_for_all_groups(interface: str) -> None:
    (counts,) = run_ranks("tests.megatron.test_gloo_device:worker", [interface])
    assert counts["ours"] == 1
    assert counts["torch's"] > 10, "megatron-core makes fewer groups than the docstring says"
    assert counts["ours, and a group made later"] == 2


def besieged(rank: int, store: Any, host: str) -> dict[str, Any]:
    """A rank of two to which strangers connect, while the world forms and later."""
    import torch
    import torch.distributed as dist

    from spare_megatron.megatron_adapter.model import world

    before = addresses()
    shape = JobShape(num_groups=1, tensor=2, micro_batch_size=1, global_batch_size=1)
    world.init_group_world(shape, rank, store, gloo_host=host)
    (address,) = [one for one in addresses() if one not in before]
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    outcomes = []
    for _ in range(5):
        try:
            socket.create_connection(address[:2], timeout=0.1).close()
            outcomes.append("connected")
        except TimeoutError:
            outcomes.append("dropped")
    total = torch.ones(1000)
    dist.all_reduce(total)
    later = dist.new_group([0, 1])
    dist.all_reduce(total, group=later)
    grown = len(list(Path("/proc/self/fd").iterdir())) - open_before
    there = [None, None]
    dist.all_gather_object(there, outcomes)
    world.barrier()
    world.destroy()
    return {"host": address[0], "outcomes": outcomes, "sum": float(total[0]), "grown": grown}


def test_no_stranger_connects_once_the_groups_have_formed() -> None:
    """Those of the group speak on with each other, and groups that are made later form."""
    for found in run_ranks("tests.megatron.test_gloo_device:besieged", ["127.0.0.1"] * 2):
        assert found["host"] == "127.0.0.1"
        assert found["outcomes"] == ["dropped"] * 5
        assert found["sum"] == 4.0
        assert found["grown"] <= 12, "a group that is made later has a device and connections, strangers have none"


class _Gloo:
    """Takes what torch's class takes, and notes it. Its options have ``fields``, as those of a version."""

    fields: tuple[str, ...] = ()
    made: ClassVar[list[tuple[Any, dict[str, Any]]]] = []

    @classmethod
    def _Options(cls) -> Any:  # noqa: N802  # torch's name
        return SimpleNamespace(**dict.fromkeys(cls.fields))

    @classmethod
    def create_default_device(cls) -> str:
        return "the device"

    def __init__(self, store: str, rank: int, size: int, options: Any = None, **given: Any) -> None:
        self.made.append((options, given))


@pytest.mark.parametrize(
    ("fields", "given"),
    [((), {}), (("enable_reconfigure",), {"enable_reconfigure": True}), ((), {"of_a_later_version": 1})],
    ids=["2.13", "2.14", "later"],
)
def test_what_newer_versions_of_torch_give_a_group(
    fields: tuple[str, ...], given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed import distributed_c10d

    from spare_megatron.megatron_adapter.model.gloo_device import shared_gloo_device

    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", _Gloo)
    monkeypatch.setattr(_Gloo, "fields", ("_devices", "_threads", "_timeout", *fields))
    monkeypatch.setattr(_Gloo, "made", [])
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with shared_gloo_device():
        distributed_c10d.ProcessGroupGloo("store", 0, 1, timeout=timedelta(seconds=5), **given)  # type: ignore[arg-type]
    [(options, rest)] = _Gloo.made
    if "of_a_later_version" in given:  # its own device, but it is made
        assert (options, rest) == (None, {"timeout": timedelta(seconds=5), **given})
    else:
        kept = {name: getattr(options, name) for name in fields}
        assert (options._devices, options._timeout, kept, rest) == (["the device"], timedelta(seconds=5), given, {})
