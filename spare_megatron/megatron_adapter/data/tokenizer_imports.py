"""Only imports what tokenizing needs, in the process from which workers are forked."""

from spare_megatron.megatron_adapter.data import batch_tokenizers, datasets, tokenizers

__all__ = ["batch_tokenizers", "datasets", "tokenizers"]

from spare_megatron.megatron_adapter.shims import install_cpu_shims

install_cpu_shims()

from megatron.core.tokenizers.text.utils import build_tokenizer

__all__ += ["build_tokenizer"]
