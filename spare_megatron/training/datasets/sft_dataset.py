"""Stands for ``megatron.training.datasets.sft_dataset``."""

from spare_megatron.training.megatron_exports import refused_kind

_WHY = "supervised fine-tuning (--sft) is not supported"

SFTDataset = refused_kind("SFTDataset", _WHY)
MockSFTDataset = refused_kind("MockSFTDataset", _WHY)
