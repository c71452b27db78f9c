"""Flags, data, the step interpreter, the loop, saving, and ``pretrain()``.

The names that users import from ``megatron.training`` are here too, each loaded when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return importlib.import_module("spare_megatron.training.megatron_exports").lookup(__name__, name)
