"""Builds the job's tokenizer and pads its vocabulary as Megatron does."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.flags import flag_name

END_FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
"""Flags that act at the ends of documents, and on nothing where the tokenizer has no token for them."""


def padded(vocab_size: int, divisible_by: int, tensor: int) -> int:
    """The least multiple of ``divisible_by`` x tensor-parallel size that holds ``vocab_size`` ids."""
    unit = divisible_by * tensor
    return -(-vocab_size // unit) * unit


def padded_vocabulary(vocab_size: int, args: Namespace) -> int:
    """Number of rows of the embedding: --padded-vocab-size, or the tokenizer's ids with Megatron's padding."""
    tensor = args.tensor_model_parallel_size
    if args.padded_vocab_size is None:
        return padded(vocab_size + args.vocab_extra_ids, args.make_vocab_size_divisible_by, tensor)
    requested = int(args.padded_vocab_size)
    usual = padded(vocab_size, args.make_vocab_size_divisible_by, tensor)
    if requested < vocab_size or requested % tensor:
        raise ConfigError(
            f"--padded-vocab-size {requested} must be at least the tokenizer's {vocab_size} ids and divisible by "
            f"--tensor-model-parallel-size {tensor}; use --padded-vocab-size {usual}"
        )
    return requested


def build_tokenizer(args: Namespace) -> Any:
    """Build the tokenizer that the flags name; sets ``args.padded_vocab_size``, and ``args.spare_vocabulary_ids`` for
    conversions of what is saved. Imports megatron-core."""
    from spare_megatron.megatron_adapter.data import tokenizers

    tokenizer = tokenizers.build_tokenizer(args)
    for name in END_FLAGS:
        if getattr(args, name):
            tokenizers.needed_eod(tokenizer, args, flag_name(name))
    args.padded_vocab_size = padded_vocabulary(int(tokenizer.vocab_size), args)
    args.spare_vocabulary_ids = int(tokenizer.vocab_size) + (args.vocab_extra_ids or 0)
    return tokenizer
