"""Stands for ``megatron.legacy.model``: builders name its GPTModel, and make one with --use-legacy-models only."""

from spare_megatron.training.megatron_exports import refused_kind

GPTModel = refused_kind("GPTModel", "legacy models (--use-legacy-models) are not supported")
