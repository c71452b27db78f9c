"""megatron-core's data sets, batches and tokenizers."""
