"""Trains a hybrid model, whose layers --hybrid-layer-pattern writes out (megatron-core 0.19 or later).

    spare-launch --num-groups 4 pretrain_hybrid.py --hybrid-layer-pattern '*-*E|*-*E' FLAGS...

Data and forward step are pretrain_gpt.py's. The script has the form of Megatron-LM's since megatron-core 0.19: the
model is that of the flags; a script that edits it passes model_provider to pretrain.
"""

from __future__ import annotations

from pretrain_gpt import forward_step, train_valid_test_datasets_provider
from spare_megatron import ModelType, parse_and_validate_args, pretrain
from spare_megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args

if __name__ == "__main__":
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    pretrain(
        pretrain_cfg_container_from_args(args, hybrid_config_from_args(args)),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
    )
