"""Stands for ``megatron.legacy``, which no wheel of megatron-core has and the builders of Megatron-LM until 0.17
import."""
