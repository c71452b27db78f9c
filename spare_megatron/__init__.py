"""Megatron-style pre-training whose jobs do not stop when GPUs die.

What users' pretrain scripts import from ``megatron.training`` is here and in :mod:`spare_megatron.training`:
``pretrain``, ``get_args``, ``get_tokenizer``, ``print_rank_0``, ...
(:mod:`spare_megatron.training.megatron_exports`). Each is loaded when it is asked for, so that ``import
spare_megatron`` costs nothing and a bad flag is refused before torch is imported.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

__version__ = "0.1.0"
"""The only place of the version: pyproject.toml reads it here."""

# gRPC's core writes to stderr whenever a peer dies or a port is taken; this package reports both itself. It reads this
# when grpc is imported, by whichever module is first.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def pretrain(*args: Any, **options: Any) -> Any:
    """Megatron's ``pretrain``: see :func:`spare_megatron.training.training.pretrain` for the arguments.

    The module is loaded by the call, not by ``from spare_megatron import pretrain``.
    """
    return importlib.import_module("spare_megatron.training.training").pretrain(*args, **options)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module 'spare_megatron' has no attribute {name!r}")
    return importlib.import_module("spare_megatron.training.megatron_exports").lookup(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module("spare_megatron.training.megatron_exports").EXPORTS})
