"""Stands for ``megatron.training.global_vars``: the functions by which users' code gets args, tokenizer and timers."""

from __future__ import annotations

from typing import Any

from spare_megatron.training import megatron_exports
from spare_megatron.worker.user_state import get_adlr_autoresume, get_args, get_one_logger, get_timers, get_tokenizer

__all__ = ["get_adlr_autoresume", "get_args", "get_one_logger", "get_timers", "get_tokenizer"]


def __getattr__(name: str) -> Any:
    raise megatron_exports.missing(__name__, name)
