"""What a rank sets and refuses before its group's world exists, with devices that stand for a GPU host's."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spare_megatron import kernels
from spare_megatron.collectives import nccl_start
from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.determinism import arithmetic
from spare_megatron.worker import devices
from tests import nccl_as_torch
from tests.process.test_backend_nccl import GOOD


def job(comm: str, inside: str | None = None) -> Any:
    return SimpleNamespace(
        spare=SimpleNamespace(comm=comm),
        place=SimpleNamespace(local_rank=3, group_size=2),
        shape=SimpleNamespace(group_size=2),
        training=SimpleNamespace(distributed_backend=inside),
    )


def on_a_host_with(monkeypatch: pytest.MonkeyPatch, there: nccl_start.Devices) -> list[torch.device]:
    """Returns where kernels have been started, which grows."""
    started: list[torch.device] = []
    monkeypatch.setattr(kernels, "start", started.append)
    monkeypatch.setattr(nccl_start.Devices, "here", lambda local_rank: replace(there, local_rank=local_rank))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there.count > 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0" if there.cuda_build else None)
    return started


def test_the_environment_is_there_before_the_world_and_the_watchdog_gone_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nccl = nccl_as_torch.install(monkeypatch)
    started = on_a_host_with(monkeypatch, GOOD)
    with devices.around_the_world(job("auto")):
        assert started == [torch.device("cuda", 3)], "a kernel that is loaded later can wait for a collective"
        assert nccl.environment() == {"TORCH_NCCL_NONBLOCKING_TIMEOUT": "15", "NCCL_RUNTIME_CONNECT": "0"}
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0", "the group's own collectives must not wait on the host"
        assert nccl_start.unprepared()
    assert not nccl_start.unprepared()


def test_sums_on_the_host_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl_as_torch.install(monkeypatch)
    started = on_a_host_with(monkeypatch, replace(GOOD, count=2))
    before = dict(os.environ)
    with devices.around_the_world(job("gloo", inside="gloo")):
        assert started == [torch.device("cuda", 1)]
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (replace(GOOD, count=2), "local rank 3 would share GPU 1"),
        (replace(GOOD, name="NVIDIA H100 80GB HBM3 MIG 1g.10gb"), "is a MIG slice"),
    ],
)
def test_a_group_needs_a_gpu_for_each_rank_inside_too(
    there: nccl_start.Devices, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums over groups go through the host, but those of a group over NCCL."""
    nccl_as_torch.install(monkeypatch)
    on_a_host_with(monkeypatch, there)
    with pytest.raises(ConfigError, match=words), devices.around_the_world(job("gloo")):
        raise AssertionError("the world must not be made")


def test_a_rank_without_a_device_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl_as_torch.install(monkeypatch)
    on_a_host_with(monkeypatch, replace(GOOD, count=2))
    with pytest.raises(ConfigError, match="local rank 3 would share GPU 1"), devices.around_the_world(job("nccl")):
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


def test_kernels_that_do_not_run_end_the_start_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError("kernel accumulate on cuda:3: no kernel image is available\nmore of it")

    monkeypatch.setattr(kernels, "_run_each", fails)
    with pytest.raises(ConfigError, match=r"spare_megatron do not run on cuda:3 .*no kernel image") as raised:
        kernels.start(torch.device("cuda", 3))
    assert "\n" not in str(raised.value)
    assert "build them on this host with nvcc (pip install -e .), or install a newer driver" in str(raised.value)


class Driver:
    """Stands for libcuda.so.1."""

    def __init__(self, version: int) -> None:
        self.version = version

    def cuDriverGetVersion(self, to: Any) -> int:  # noqa: N802
        to._obj.value = self.version
        return 0


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, r"there is no NVIDIA driver \(libcuda.so.1 cannot be loaded\)"),
        (12040, "the NVIDIA driver is too old: it is for CUDA 12.4"),
    ],
)
def test_a_forked_rank_reports_what_is_wrong_with_the_driver(
    version: int | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Driver:
        assert name == "libcuda.so.1"
        if version is None:
            raise OSError("libcuda.so.1: cannot open shared object file")
        return Driver(version)

    def as_torch_in_a_fork() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, ...")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", as_torch_in_a_fork)
    monkeypatch.setattr(nccl_start.ctypes, "CDLL", load)
    monkeypatch.setattr(nccl_start.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    devices_here = nccl_start.Devices.here(0)
    assert re.match(f"no GPU of this host can be used: {words}; install a driver", nccl_start.refusal(devices_here))


def test_ranks_of_a_group_that_compute_with_other_gpus_are_named() -> None:
    one, other = "NVIDIA H100 80GB HBM3, compute capability 9.0", "NVIDIA A100-SXM4-80GB, compute capability 8.0"
    facts = [{"threads": 1, "gpu": one}, {"threads": 1, "gpu": one}, {"threads": 1, "gpu": other}]
    devices.check_alike(facts[:2])
    with pytest.raises(ConfigError, match=f"rank 2 of this group .* rank 0: gpu is {other}, elsewhere {one}; give all"):
        devices.check_alike(facts)


def test_variables_that_choose_kernels_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups apply the same sums, so nothing else would notice. What is a host's own may differ."""
    here = arithmetic()
    own = {
        "NVTE_DEBUG_LEVEL": "2",
        "PYTORCH_KERNEL_CACHE_PATH": "/local",
        "MKL_VERBOSE": "1",
        "ATEN_CPU_CAPABILITY": "x",
    }
    for name, value in {**own, "SLURM_PROCID": "3"}.items():
        monkeypatch.setenv(name, value)
    assert arithmetic() == here
    monkeypatch.setenv("NVTE_UNHEARD_OF", "0")
    assert arithmetic() == {**here, "variable NVTE_UNHEARD_OF": "0"}
    with pytest.raises(ConfigError, match=r"rank 1 .*: variable NVTE_UNHEARD_OF is 0, elsewhere not set; give"):
        devices.check_alike([here, arithmetic()])
