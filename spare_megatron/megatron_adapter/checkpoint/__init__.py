"""Reads and writes megatron-core's checkpoints, with optimizer state that loads under any inner data-parallel
degree."""
