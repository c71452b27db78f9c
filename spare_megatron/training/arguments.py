"""``megatron.training.arguments`` of Megatron-LM: the names that users' scripts import from it."""

from __future__ import annotations

from typing import Any

from spare_megatron.training import megatron_exports
from spare_megatron.training.command_line import parse_and_validate_args as parse_and_validate_args
from spare_megatron.worker.user_state import core_transformer_config_from_args as core_transformer_config_from_args


def __getattr__(name: str) -> Any:
    return megatron_exports.lookup(__name__, name)
