"""Stands for ``megatron.training.datasets.fim_dataset``."""

from spare_megatron.megatron_adapter.data.fill_in_middle import GPTFIMDataset, GPTFIMDatasetConfig

__all__ = ["GPTFIMDataset", "GPTFIMDatasetConfig"]
