"""Checks that megatron-core has a tested version, and silences the warnings that it gives on every start.

May assume nothing. Promises: importing this module imports neither torch nor megatron.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import warnings
from pathlib import Path

from spare_megatron.config.errors import ConfigError

TESTED_CORE_VERSIONS = ("0.16.0", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
"""Versions of megatron-core that this package's tests ran with; from 0.17 on they need Python 3.12."""
TESTED = f"{', '.join(TESTED_CORE_VERSIONS[:-1])} or {TESTED_CORE_VERSIONS[-1]}"

_KNOWN_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "The following imports from `dynamic_context.py` will be removed",
    r"\s*The 'megatron.core.transformer.custom_layers.transformer_engine'\s+module is deprecated",
    "full scope is deprecated. Use empty cuda_graph_(scope|modules)",
    "Warning: tp_group is None, using default tp group",
    "`load_state_dict` is deprecated and will be removed in future versions. Please use `load` instead",
    "If you are using transformer_engine as the transformer implementation, the core_attn is from",
    "MLP requires ffn_hidden_size, but it was not provided",
    "MimoModelConfig is experimental",
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    "Could not determine rank from torch.distributed, RANK, or SLURM_PROCID",
)
"""Warnings of megatron-core on every start: transformer-engine and apex are optional here, the others concern its own
code."""

_CUDA_ADVICE = ("When using .* it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS",)

_DEPRECATED_IN_TORCH = (
    r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
    "Please use DTensor instead and we are deprecating ShardedTensor",
    "The argument order of load has been changed",
    "torch.distributed is disabled, unavailable or uninitialized",
)
"""Warnings of torch 2.13 about functions that megatron-core uses."""

_NUMBERS = re.compile(r"""^(MAJOR|MINOR|PATCH|PRE_RELEASE) = ["']?(\w*)["']?\s*$""", re.MULTILINE)


@functools.cache
def core_version() -> str:
    """The installed version of megatron-core."""
    return importlib.metadata.version("megatron-core")


def minor_of(version: str) -> tuple[int, int]:
    """(0, 16) for '0.16.1'."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def release() -> tuple[int, int]:
    """The first two numbers of the installed version."""
    return minor_of(core_version())


def imported_core() -> tuple[Path, str] | None:
    """Folder and version of the megatron-core that ``import megatron.core`` would find, by its own words; None where
    there is none, or none that says so. A folder on the path can hide the installed one: a script's own, in a checkout
    of Megatron-LM. Its ``package_info`` is read and not run: there it asks git for the commit."""
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent
    try:
        parts = dict(_NUMBERS.findall((folder / "package_info.py").read_text()))
        version = f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}{parts['PRE_RELEASE']}"
    except (OSError, KeyError):
        return None
    return folder, version


def check_core_version(allow_untested: bool = False) -> str:
    """The installed version of megatron-core; ConfigError when it is not a tested one, or another is imported instead,
    unless ``allow_untested``."""
    try:
        version = core_version()
    except importlib.metadata.PackageNotFoundError:
        imported = imported_core()
        where = "" if imported is None else f"; the one in {imported[0]} is not: take its folder out of PYTHONPATH"
        raise ConfigError(f"megatron-core is not installed as a package{where}; pip install megatron-core") from None
    if version not in TESTED_CORE_VERSIONS and not allow_untested:
        raise ConfigError(
            f"megatron-core {version} is installed, but this version of spare_megatron was tested with "
            f"{TESTED}; install one of these or pass --spare-allow-untested-core"
        )
    imported = imported_core()
    if imported is not None and imported[1] != version.partition("+")[0] and not allow_untested:
        raise ConfigError(
            f"megatron-core {version} is installed, but import megatron.core finds {imported[1]} in {imported[0]}; "
            f"run the script from a folder that has no megatron/core, or take that folder out of PYTHONPATH"
        )
    return version


def silence_known_warnings(on_cuda: bool) -> None:
    """Ignore, for the rest of the process, the warnings that megatron-core gives on every start."""
    for message in _KNOWN_WARNINGS + (() if on_cuda else _CUDA_ADVICE):
        warnings.filterwarnings("ignore", message=message, module=r"megatron\.core\b")
    for message in _DEPRECATED_IN_TORCH:
        warnings.filterwarnings("ignore", message=message, module=r"torch\.distributed\b")
