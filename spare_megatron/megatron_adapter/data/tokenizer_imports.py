"""Only imports what tokenizing needs, in the process from which workers are forked."""

from spare_megatron.megatron_adapter.core_differences import tokenizer_builder
from spare_megatron.megatron_adapter.data import batch_tokenizers, datasets, tokenizers
from spare_megatron.megatron_adapter.shims import install_cpu_shims

__all__ = ["batch_tokenizers", "datasets", "tokenizers"]

install_cpu_shims()
tokenizer_builder()
