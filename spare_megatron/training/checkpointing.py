"""Megatron's module of this name: every function of it is refused with what to use, for ``pretrain`` does the work."""

from __future__ import annotations

from typing import Any

from spare_megatron.training import megatron_exports


def __getattr__(name: str) -> Any:
    raise megatron_exports.missing(__name__, name)
