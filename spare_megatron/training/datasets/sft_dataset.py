"""Stands for ``megatron.training.datasets.sft_dataset``."""

from spare_megatron.training.megatron_exports import refused_kind

SFTDataset = refused_kind("SFTDataset", "supervised fine-tuning (--sft) is not supported")
