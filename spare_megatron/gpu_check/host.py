"""What a machine has: versions, devices, environment and native libraries."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from typing import Any

import torch

from spare_megatron import kernels
from spare_megatron.collectives import nccl_start
from spare_megatron.collectives.ring_native import compiled_ring
from spare_megatron.config.errors import ConfigError
from spare_megatron.gpu_check.table import CheckError, Machine, MachineCheck, SkipError

NVIDIA_SMI_S = 30.0


def facts(machine: Machine) -> dict[str, Any]:
    """For the head of the report. The host's name is not among them."""
    devices = machine.devices
    return {
        "torch": devices.torch_version,
        "NCCL": ".".join(map(str, devices.nccl_version)) or "none",
        "CUDA": torch.version.cuda or "none",
        "GPUs": f"{devices.count} x {devices.name}" if devices.count else devices.failure or "none",
        "driver": _driver(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "seed": machine.seed,
        "quick": machine.quick,
    }


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False)
    except subprocess.TimeoutExpired:
        return f"nvidia-smi does not answer within {NVIDIA_SMI_S:g} s"
    return (done.stdout or done.stderr).strip().partition("\n")[0]


def _libraries(machine: Machine) -> dict[str, Any]:
    found = {"kernels on cpu": kernels.implementation("cpu"), "ring": "compiled" if compiled_ring() else "Python"}
    if slow := kernels.why_slow("cpu"):
        raise CheckError(slow, found)
    return found


def _gpu(machine: Machine) -> dict[str, Any]:
    machine.want_gpus()
    found = kernels.implementation("cuda")
    if slow := kernels.why_slow("cuda"):
        raise CheckError(slow, {"kernels on cuda": found})
    capability = torch.cuda.get_device_capability(machine.device)
    values = {"kernels on cuda": found, "capability": ".".join(map(str, capability))}
    try:
        kernels.start(machine.device)
    except ConfigError as error:
        raise CheckError(str(error), values) from None
    return values


def _same_gpus(machine: Machine) -> dict[str, Any]:
    machine.want_gpus(2)
    names = [torch.cuda.get_device_name(number) for number in range(machine.gpus)]
    if len(set(names)) > 1:
        raise CheckError(
            f"the GPUs are of several kinds ({', '.join(sorted(set(names)))}), and their sums and products may differ "
            "in the last bits; give a job GPUs of one kind (CUDA_VISIBLE_DEVICES)"
        )
    return {"name": names[0]}


def _nccl(machine: Machine) -> dict[str, Any]:
    machine.want_gpus()
    if why := nccl_start.refusal(machine.devices):
        raise CheckError(why)
    return {"NCCL": machine.devices.nccl_version, "torch": machine.devices.torch_version}


def _environment(machine: Machine) -> dict[str, Any]:
    set_here = {name: value for name, value in os.environ.items() if "NCCL" in name or name == "ENABLE_INTRA_NODE_COMM"}
    if found := nccl_start.contradictions(os.environ):
        raise CheckError("; ".join(found), set_here)
    return set_here


def _tools(machine: Machine) -> dict[str, Any]:
    machine.want_gpus()
    missing = [name for name in ("compute-sanitizer", "all_reduce_perf", "nvidia-smi") if shutil.which(name) is None]
    if missing:
        raise SkipError(f"not on the path: {', '.join(missing)}; what needs them is skipped")
    return {}


CHECKS = (
    MachineCheck("libraries", "the CPU's kernels and the ring are compiled", _libraries),
    MachineCheck("environment", "no variable contradicts the communicators between groups", _environment),
    MachineCheck("GPU", "the CUDA kernels are built, for this GPU, and the driver starts each of them", _gpu),
    MachineCheck("same GPUs", "all GPUs are of one kind", _same_gpus),
    MachineCheck("NCCL", "torch, NCCL and devices are such that groups can sum over NCCL", _nccl),
    MachineCheck("tools", "compute-sanitizer, nccl-tests and nvidia-smi are on the path", _tools),
)
