"""A user's training script in the form of Megatron-LM's newest ones: batches go through megatron-core's own functions,
which know of packed sequences, and the model is built by functions in modules beside the script."""

import time

_PROGRAM_START_TIME = time.time()

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_context_parallel_group, get_hybrid_data_context_parallel_groups
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import (
    get_args,
    get_timers,
    inprocess_restart,
    pretrain,
    print_rank_0,
    set_startup_timestamps,
)
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import MockSFTDataset, SFTDataset
from megatron.training.datasets.varlen_dataset import MockVarlenDataset, VarlenDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from own_builders import own_builder
from own_provider import model_provider

stimer = StragglerDetector()

PACKED = ("cu_seqlens", "cu_seqlens_padded", "hybrid_cp_group", "local_cp_size", "max_seqlen")
VALUES = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
KINDS = {"sft": SFTDataset, "mock sft": MockSFTDataset, "varlen": VarlenDataset, "mock varlen": MockVarlenDataset}
FILLED = (GPTFIMDataset, GPTFIMDatasetConfig)


def predicts(vp_stage):
    """Whether this rank has layers of multi-token prediction."""
    config = core_transformer_config_from_args(get_args())
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def get_batch(data_iterator, vp_stage):
    """A microbatch by name; nothing where this stage needs none."""
    args = get_args()
    packed = args.sft or args.dataloader_inter_document_masking
    if not (is_first_or_last_pipeline_stage(vp_stage) or predicts(vp_stage) or packed):
        return dict.fromkeys((*VALUES, *PACKED))
    batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        read = next(data_iterator)
        found = {key: read.get(key) for key in (*VALUES, *PACKED)}
        batch = {key: None if value is None else value.cuda(non_blocking=True) for key, value in found.items()}
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=packed,
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=predicts(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(
        flatten_batch_for_packed_sequences(batch),
        is_hybrid_cp=args.hybrid_context_parallel,
        cp_group=get_context_parallel_group(),
        hybrid_cp_group_func=get_hybrid_data_context_parallel_groups,
    )


def loss_func(loss_mask, output_tensor, model=None):
    """The sum over the tokens, their number, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * mask)
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss, rejection_func=torch.isnan, message="found NaN in the loss", tolerance=0.0, fatal=True
        )
    tokens = mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def forward_step(data_iterator, model, return_schedule_plan=False):
    """One microbatch, packed or not."""
    assert not return_schedule_plan
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with stimer(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    packed = None
    if batch["cu_seqlens"] is not None:
        update_seqlen_stats_from_cu_seqlens(batch["cu_seqlens"].squeeze(0))
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=batch["cu_seqlens"].squeeze(0))
    timers("batch-generator").stop()
    with stimer:
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
            packed_seq_params=packed,
        )
    return output, partial(loss_func, batch["loss_mask"], model=model)


def is_dataset_built_on_rank(vp_stage=None):
    """Whether this rank reads samples."""
    reads = is_first_or_last_pipeline_stage(vp_stage) or predicts(vp_stage)
    return mpu.get_tensor_model_parallel_rank() == 0 and reads


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    """Mock data by megatron-core's builder."""
    args = get_args()
    kind = KINDS["sft"] if args.sft else FILLED[0] if args.fim_data else MockGPTDataset
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_and_blend_per_split(args)[0],
        split=args.split or "100,0,0",
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        hybrid_context_parallel=args.hybrid_context_parallel,
        inter_document_masking=args.dataloader_inter_document_masking,
    )
    built = partial(is_dataset_built_on_rank, vp_stage=vp_stage)
    return BlendedMegatronDatasetBuilder(kind, train_val_test_num_samples, built, config).build()


def get_embedding_ranks(pp_ranks):
    """Both ends of a pipeline with tied embeddings, and where tokens further ahead are predicted."""
    args = get_args()
    ends = pp_ranks[:1] if args.untie_embeddings_and_output_weights else [pp_ranks[0], pp_ranks[-1]]
    return sorted({*ends, *get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args))})


def add_own_args(parser):
    """Flags of this script."""
    parser.add_argument_group("own").add_argument("--own-model", action="store_true")
    return parser


if __name__ == "__main__":
    set_startup_timestamps(program_start=_PROGRAM_START_TIME, main_entry=time.time(), slurm_job_start_time=None)
    train_valid_test_datasets_provider.is_distributed = True
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args(extra_args_provider=add_own_args, args_defaults={"tokenizer_type": "NullTokenizer"})
    print_rank_0(f"the model is {'our own' if args.own_model else 'that of the flags'}")
    pretrain(
        pretrain_cfg_container_from_args(args, None if args.own_model else gpt_config_from_args(args)),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider=partial(model_provider, own_builder) if args.own_model else None,
        store=store,
        get_embedding_ranks=get_embedding_ranks,
    )
