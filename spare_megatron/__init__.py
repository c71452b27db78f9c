"""Megatron-style pre-training whose jobs do not stop when GPUs die.

What users' pretrain scripts import is here: ``pretrain``, ``get_args``, ``get_tokenizer``, ``get_timers``,
``print_rank_0``, ``core_transformer_config_from_args``, ``ModelType``. Each is loaded when it is asked for, so that
``import spare_megatron`` costs nothing and a bad flag is refused before torch is imported.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "ModelType": "spare_megatron.training.model_type",
    "core_transformer_config_from_args": "spare_megatron.training.user_state",
    "get_args": "spare_megatron.training.user_state",
    "get_timers": "spare_megatron.training.user_state",
    "get_tokenizer": "spare_megatron.training.user_state",
    "print_rank_0": "spare_megatron.training.user_state",
}

__all__ = [*sorted(_EXPORTS), "pretrain"]


def pretrain(*args: Any, **options: Any) -> Any:
    """Megatron's ``pretrain``: see :func:`spare_megatron.training.pretrain.pretrain` for the arguments.

    The module is loaded by the call, not by ``from spare_megatron import pretrain``.
    """
    return importlib.import_module("spare_megatron.training.pretrain").pretrain(*args, **options)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'spare_megatron' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_EXPORTS]
