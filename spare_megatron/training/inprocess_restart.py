"""Stands for ``megatron.training.inprocess_restart``, which Megatron's pretrain_gpt.py calls; it restarts nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def maybe_wrap_for_inprocess_restart(pretrain: Callable[..., Any]) -> tuple[Callable[..., Any], None]:
    """``pretrain`` itself and no store: ``--inprocess-restart`` is refused, as survivors of a failure go on anyway."""
    return pretrain, None
