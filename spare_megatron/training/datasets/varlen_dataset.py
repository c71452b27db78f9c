"""Stands for ``megatron.training.datasets.varlen_dataset``, which Megatron-LM has since 0.20."""

from spare_megatron.training.megatron_exports import refused_kind

_WHY = "data of packed sequences (--use-varlen-dataset) are not supported"

VarlenDataset = refused_kind("VarlenDataset", _WHY)
MockVarlenDataset = refused_kind("MockVarlenDataset", _WHY)
