"""``megatron.training.argument_utils`` of megatron-core 0.18 and newer: what scripts make of flags for ``pretrain``."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.trainer.user_state import core_transformer_config_from_args as core_transformer_config_from_args
from spare_megatron.training import command_line, megatron_exports
from spare_megatron.training.pretrain_call import GPTModelConfig, PretrainConfigContainer


def gpt_config_from_args(
    args: Namespace, config: Any = None, model_config_cls: type = GPTModelConfig
) -> GPTModelConfig:
    """The model that the flags describe. A script that edits the model passes ``model_provider`` to ``pretrain``
    instead: another configuration or class ends this process with one sentence that says so."""
    if config is not None or model_config_cls is not GPTModelConfig:
        given = (
            f"config={type(config).__name__}" if config is not None else f"model_config_cls={model_config_cls.__name__}"
        )
        error = ConfigError(f"gpt_config_from_args({given}) is not supported: pass model_provider=... to pretrain()")
        command_line.leave(command_line.refuse(str(error), None))
    return GPTModelConfig()


def pretrain_cfg_container_from_args(
    args: Namespace, model_cfg: GPTModelConfig | None = None
) -> PretrainConfigContainer:
    """The flags that ``parse_and_validate_args`` has returned, and the model, for ``pretrain``."""
    return PretrainConfigContainer(args, model_cfg)


def __getattr__(name: str) -> Any:
    raise megatron_exports.missing(__name__, name)
