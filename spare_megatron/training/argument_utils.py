"""``megatron.training.argument_utils`` of megatron-core 0.18 and newer: what scripts make of flags for ``pretrain``."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, NoReturn

from spare_megatron.training import command_line, megatron_exports
from spare_megatron.training.pretrain_call import GPTModelConfig, HybridModelConfig, PretrainConfigContainer
from spare_megatron.worker.user_state import core_transformer_config_from_args as core_transformer_config_from_args


def gpt_config_from_args(
    args: Namespace, config: Any = None, model_config_cls: type = GPTModelConfig
) -> GPTModelConfig:
    """The GPT that the flags describe. A script that edits the model passes ``model_provider`` to ``pretrain`` instead:
    another configuration or class ends this process with one sentence that says so, as do flags of a hybrid model."""
    _refuse_edited("gpt_config_from_args", config, model_config_cls, GPTModelConfig)
    if args.hybrid_layer_pattern is not None:
        _end(f"--hybrid-layer-pattern {args.hybrid_layer_pattern} is not for a GPT; run pretrain_hybrid.py")
    return GPTModelConfig()


def hybrid_config_from_args(
    args: Namespace, config: Any = None, model_config_cls: type = HybridModelConfig
) -> HybridModelConfig:
    """The same for the hybrid model that the flags describe, which must name its layers."""
    _refuse_edited("hybrid_config_from_args", config, model_config_cls, HybridModelConfig)
    if args.hybrid_layer_pattern is None:
        _end("this script trains a hybrid model, whose layers are not given; add --hybrid-layer-pattern, as in '*-*-'")
    return HybridModelConfig()


def _refuse_edited(name: str, config: Any, given: type, usual: type) -> None:
    if config is not None or given is not usual:
        what = f"config={type(config).__name__}" if config is not None else f"model_config_cls={given.__name__}"
        _end(f"{name}({what}) is not supported: pass model_provider=... to pretrain()")


def _end(sentence: str) -> NoReturn:
    command_line.leave(command_line.refuse(sentence, None))


def pretrain_cfg_container_from_args(
    args: Namespace, model_cfg: GPTModelConfig | HybridModelConfig | None = None
) -> PretrainConfigContainer:
    """The flags that ``parse_and_validate_args`` has returned, and the model, for ``pretrain``."""
    return PretrainConfigContainer(args, model_cfg)


def __getattr__(name: str) -> Any:
    raise megatron_exports.missing(__name__, name)
