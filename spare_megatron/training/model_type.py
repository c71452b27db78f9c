"""Megatron's enum of kinds of models, without an import of megatron-core."""

from enum import Enum


class ModelType(Enum):
    """The kind of model that ``pretrain`` takes; it accepts megatron-core's own ModelType too."""

    encoder_or_decoder = 1
