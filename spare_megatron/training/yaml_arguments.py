"""Stands for ``megatron.training.yaml_arguments``; here a file of --yaml-cfg becomes flags, and scripts see no YAML."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from spare_megatron.training import megatron_exports
from spare_megatron.worker.user_state import core_transformer_config_from_args


def core_transformer_config_from_yaml(args: Namespace, transfomer_key: str = "language_model") -> Any:
    """The TransformerConfig of the flags, which hold what the file said; the key is spelt as in Megatron."""
    return core_transformer_config_from_args(args)


def __getattr__(name: str) -> Any:
    return megatron_exports.lookup(__name__, name)
