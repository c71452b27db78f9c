"""Builds the model of a user's script, as Megatron-LM's builders do, which until 0.17 name its older models too."""

import megatron.legacy.model  # isort: skip

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.yaml_arguments import core_transformer_config_from_yaml


def own_builder(args, pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """A GPT of megatron-core's own layers."""
    print_rank_0("the builder beside the script builds the model ...")
    if config is None:
        from_yaml = args.yaml_cfg is not None
        config = (
            core_transformer_config_from_yaml(args, transfomer_key="language_model")
            if from_yaml
            else core_transformer_config_from_args(args)
        )
    if args.use_legacy_models:
        return megatron.legacy.model.GPTModel(config, pre_process=pre_process, post_process=post_process)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
