"""Megatron-core's mock data with a hundredth of its documents, for processes that the tests' preloaded parent forks: to
draw and shuffle 100 000 documents takes each rank half a second of a processor as it starts."""

from __future__ import annotations

from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

MockGPTLowLevelDataset.size = 1000
