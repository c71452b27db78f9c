"""Finds and loads the libraries that setup.py builds beside the modules that call them."""

from __future__ import annotations

from ctypes import CDLL
from pathlib import Path

from spare_megatron.config.errors import ConfigError


def find(folder: Path, name: str) -> Path | None:
    """The library file ``name`` (given without the interpreter's suffix) in ``folder``, or None."""
    found = sorted(folder.glob(f"{name}.*so"))
    return found[0] if found else None


def load_if_built(folder: Path, name: str, version: int, tells: str) -> CDLL | None:
    """The library ``name`` in ``folder``; None where there is none, or none that can be loaded. ConfigError when it has
    another version than ``version``, which its function ``tells`` returns."""
    path = find(folder, name)
    try:
        return load(path, version, tells) if path is not None else None
    except OSError:
        return None


def load(path: Path, version: int, tells: str, has: str = "") -> CDLL:
    """The library at ``path``, whose function ``tells`` returns its version. OSError when it cannot be loaded,
    ConfigError when it has another version than ``version``; ``has``: of what, as in 'kernels of '."""
    library = CDLL(str(path))
    found = int(library[tells]())
    if found != version:
        raise ConfigError(
            f"{path} has {has}version {found}, but this package needs version {version}; build it again with "
            "pip install -e . (or delete the file)"
        )
    return library
