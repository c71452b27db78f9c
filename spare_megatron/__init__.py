"""Megatron-style pre-training whose jobs do not stop when GPUs die."""
