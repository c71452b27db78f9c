"""Trains a GPT model. The script has the form of Megatron-LM's: copy it and edit it as you would edit that one.

    spare-launch --num-groups 4 pretrain_gpt.py FLAGS...
    python pretrain_gpt.py --spare-check FLAGS...          only checks the flags

torch and megatron-core are imported inside the functions, so that a wrong flag is refused at once.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from spare_megatron import (
    ModelType,
    core_transformer_config_from_args,
    get_args,
    get_timers,
    get_tokenizer,
    pretrain,
    print_rank_0,
)

if TYPE_CHECKING:
    import torch


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, config: Any = None
) -> torch.nn.Module:
    """One stage of the model: with the embedding if ``pre_process``, with the output layer if ``post_process``."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_transformer_block_with_experimental_attention_variant_spec,
    )
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_decoder_layer_specs,
        get_gpt_mtp_block_spec,
    )

    args = get_args()
    print_rank_0("building GPT model ...")
    config = config or core_transformer_config_from_args(args)
    engine = args.transformer_impl == "transformer_engine"
    norms = {"normalization": args.normalization, "qk_l2_norm": args.qk_l2_norm}
    if args.experimental_attention_variant is not None:
        layers = get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
        last = layers
    else:
        layers = get_gpt_decoder_block_spec(config, engine, vp_stage=vp_stage, **norms)
        last = get_gpt_decoder_layer_specs(config, engine, **norms)[-1]
    mtp = get_gpt_mtp_block_spec(config, last, engine, vp_stage=vp_stage) if args.mtp_num_layers else None
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
    )


def get_batch(data_iterator: Any, vp_stage: int | None = None) -> tuple[Any, ...]:
    """Tokens, labels, loss mask, attention mask and position ids; None where this stage needs none."""
    from spare_megatron.training.utils import (
        get_batch_on_this_cp_rank,
        get_batch_on_this_tp_rank,
        is_first_or_last_pipeline_stage,
    )

    if not is_first_or_last_pipeline_stage(vp_stage):
        return None, None, None, None, None
    return tuple(get_batch_on_this_cp_rank(get_batch_on_this_tp_rank(data_iterator)).values())


def loss_func(loss_mask: torch.Tensor, output_tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """The loss summed over the tokens, their number, and both for the log."""
    import torch

    mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Run one microbatch through this stage; returns its output, and the function that makes a loss of the last stage's
    output."""
    from spare_megatron.training.utils import unwrap_model

    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator, unwrap_model(model).vp_stage)
    timers("batch-generator").stop()
    output = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return output, partial(loss_func, loss_mask)


def train_valid_test_datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Data sets of training, validation and test with at least ``num_samples`` samples each."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

    from spare_megatron.training.utils import get_blend_and_blend_per_split, is_dataset_built_on_rank

    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    kind, make_config = MockGPTDataset if args.mock_data else GPTDataset, GPTDatasetConfig
    if args.fim_data:
        from spare_megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig

        kind = GPTFIMDataset
        make_config = partial(
            GPTFIMDatasetConfig,
            fim_rate=args.fim_rate,
            fim_spm_rate=args.fim_spm_rate,
            fim_split_sample=args.fim_split_sample,
            fim_fragment_rate=args.fim_fragment_rate,
            fim_no_prefix=args.fim_no_prefix,
            fim_extra_tokens={
                "prefix": args.fim_prefix_token,
                "middle": args.fim_middle_token,
                "suffix": args.fim_suffix_token,
                "pad": args.fim_pad_token,
                "eod": args.fim_eod_token,
            },
        )
    config = make_config(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=None if blend_per_split else args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
    )
    return tuple(
        BlendedMegatronDatasetBuilder(kind, num_samples, partial(is_dataset_built_on_rank, vp_stage), config).build()
    )


train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]

if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
