"""Importing this module imports what every rank of a Megatron job imports of megatron-core when it is first used: for a
parent that forks ranks. It installs no shims: that is for the rank, which knows its device."""

from __future__ import annotations

from spare_megatron.megatron_adapter.core_differences import tokenizer_builder
from spare_megatron.megatron_adapter.data import datasets

__all__ = ["datasets"]

tokenizer_builder()
