"""Megatron's word for the kind of model, without importing megatron-core for it."""

from enum import Enum


class ModelType(Enum):
    """The member that ``pretrain`` takes; megatron-core's own ModelType is taken as well."""

    encoder_or_decoder = 1
