"""Importing this module imports what every rank of a Megatron job imports of megatron-core when it is first used: for a
parent that forks ranks."""

from __future__ import annotations

import megatron.core.datasets.gpt_dataset  # noqa: F401

from spare_megatron.megatron_adapter.core_differences import tokenizer_builder

tokenizer_builder()
