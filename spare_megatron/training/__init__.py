"""Megatron's public names for users' scripts: ``get_args``, ``pretrain``, ``print_rank_0`` and the others.

Thin: each name is loaded from where it is implemented when it is asked for. A script is ported by writing
``spare_megatron`` for ``megatron`` in its imports of ``megatron.training``.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return importlib.import_module("spare_megatron.training.megatron_exports").lookup(__name__, name)
