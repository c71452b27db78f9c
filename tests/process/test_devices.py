"""What a rank sets and refuses before its group's world exists, with devices that stand for a GPU host's."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spare_megatron.collectives import nccl_start
from spare_megatron.config.errors import ConfigError
from spare_megatron.trainer import devices
from tests import nccl_as_torch
from tests.process.test_backend_nccl import GOOD


def job(comm: str) -> Any:
    return SimpleNamespace(spare=SimpleNamespace(comm=comm), place=SimpleNamespace(local_rank=3))


def on_a_host_with(monkeypatch: pytest.MonkeyPatch, there: nccl_start.Devices) -> None:
    monkeypatch.setattr(nccl_start.Devices, "here", lambda local_rank: replace(there, local_rank=local_rank))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there.count > 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0" if there.cuda_build else None)


def test_the_environment_is_there_before_the_world_and_the_watchdog_gone_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nccl = nccl_as_torch.install(monkeypatch)
    on_a_host_with(monkeypatch, GOOD)
    with devices.around_the_world(job("auto")):
        assert nccl.environment() == {"TORCH_NCCL_NONBLOCKING_TIMEOUT": "15", "NCCL_RUNTIME_CONNECT": "0"}
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0", "the group's own collectives must not wait on the host"
        assert nccl_start.unprepared()
    assert not nccl_start.unprepared()


def test_sums_on_the_host_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl_as_torch.install(monkeypatch)
    on_a_host_with(monkeypatch, replace(GOOD, count=1))
    before = dict(os.environ)
    with devices.around_the_world(job("gloo")):
        pass
    assert dict(os.environ) == before


def test_a_rank_without_a_device_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl_as_torch.install(monkeypatch)
    on_a_host_with(monkeypatch, replace(GOOD, count=2))
    with (
        pytest.raises(ConfigError, match="local rank 3 would share GPU 1"),
        devices.around_the_world(job("nccl")),
    ):
        raise AssertionError("the world must not be made")


@pytest.mark.parametrize("failure", ["Found no NVIDIA driver on your system.", "The NVIDIA driver is too old"])
def test_a_driver_that_is_missing_or_old_is_named(
    failure: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """nccl is refused; a job that may use the CPU says that it does, and why."""
    nccl_as_torch.install(monkeypatch)
    on_a_host_with(monkeypatch, replace(GOOD, count=0, failure=failure))
    with pytest.raises(ConfigError, match=f"no GPU of this host can be used: {failure}"):
        devices.replica_backend(job("nccl"))
    with caplog.at_level(logging.WARNING), devices.around_the_world(job("auto")):
        pass
    assert f"this rank trains on the CPU, because no GPU of this host can be used: {failure}" in caplog.text
