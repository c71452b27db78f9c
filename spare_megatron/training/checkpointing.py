"""Stands for ``megatron.training.checkpointing``: importing a function of it is refused, with what to use instead."""

from __future__ import annotations

from typing import Any

from spare_megatron.training import megatron_exports


def __getattr__(name: str) -> Any:
    raise megatron_exports.missing(__name__, name)
