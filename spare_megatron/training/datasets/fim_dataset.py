"""Stands for ``megatron.training.datasets.fim_dataset``."""

from spare_megatron.training.megatron_exports import refused_kind

_WHY = "fill-in-the-middle data (--fim-data) is not supported"

GPTFIMDataset = refused_kind("GPTFIMDataset", _WHY)
GPTFIMDatasetConfig = refused_kind("GPTFIMDatasetConfig", _WHY)
