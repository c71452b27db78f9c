"""The flags that megatron-core's own dataclasses do not have: model, training, data, checkpoint and logging.

Names and defaults are those of Megatron-LM's command line (core 0.16), which users know; a test compares them with
``flags/megatron_lm.json``. Fields of megatron-core's TransformerConfig and OptimizerConfig are not repeated here.
Values are plain: no torch types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spare_megatron.config.flags import flag


@dataclass(frozen=True)
class ModelConfig:
    """The model, as far as megatron-core's TransformerConfig has no field of the same name."""

    encoder_num_layers: int | None = None
    """Older name of --num-layers."""
    max_position_embeddings: int | None = None
    """Longest sequence that the position embeddings cover; at least --seq-length."""
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "mrope", "relative", "none"] = (
        "learned_absolute"
    )
    """How a token's position enters the model."""
    use_rotary_position_embeddings: bool = False
    """Older name of --position-embedding-type rope."""
    transformer_impl: Literal["local", "transformer_engine", "inference_optimized"] | None = None
    """Layers of megatron-core or of transformer-engine; default: the latter where it is installed and CUDA is there."""
    add_position_embedding: bool = flag(True, "--no-position-embedding")
    """Older way to leave out learned position embeddings; only with rope."""
    rotary_base: int = 10000
    """Base of the rotary angles."""
    no_weight_decay_cond_type: Literal["apply_wd_to_qk_layernorm", "qwen3_next"] | None = None
    """Older way to say --apply-wd-to-qk-layernorm."""
    enable_experimental: bool = False
    """Allow what megatron-core calls experimental, such as its fused permutation of experts' tokens."""
    rotary_percent: float = 1.0
    """Share of each head's channels that is rotated."""
    rotary_seq_len_interpolation_factor: int | None = None
    """Divides positions before they are turned into angles."""
    use_rope_scaling: bool = False
    """Scale rotary frequencies as Llama 3 does."""
    rope_scaling_factor: float = 8.0
    """Factor of --use-rope-scaling."""
    yarn_original_max_position_embeddings: int | None = None
    """--position-embedding-type yarn: longest sequence before the context was extended."""
    yarn_beta_fast: float | None = None
    """--position-embedding-type yarn: turns above which an angle stays as it was; default: 32."""
    yarn_beta_slow: float | None = None
    """--position-embedding-type yarn: turns below which an angle is divided by the factor; default: 1."""
    yarn_correction_range_round_to_int: bool = flag(True, "--no-yarn-correction-range-round-to-int")
    """--position-embedding-type yarn: round the channels between which both are mixed."""
    no_rope_freq: str | None = None
    """Layers without rotary embedding: every n-th, or a list expression such as '([0]*3+[1])*4'."""
    window_size: str | None = None
    """Sliding attention window as 'left,right'."""
    window_attn_skip_freq: str | None = None
    """Layers with full attention in a model with a window: every n-th, or a list expression."""
    hybrid_layer_pattern: str | None = None
    """Layers of a hybrid model, a symbol each, as in '*-*E': M Mamba, G gated delta net, * attention, + multi-latent
    attention, - feed-forward, E experts. A bar ends a pipeline stage, / begins the layers of one more token."""
    hybrid_override_pattern: str | None = None
    """Older name of --hybrid-layer-pattern."""
    hybrid_attention_ratio: float = 0.0
    """Share of attention layers: replaced by --hybrid-layer-pattern, beside which it changes nothing."""
    hybrid_mlp_ratio: float = 0.0
    """Share of feed-forward layers: replaced by --hybrid-layer-pattern, beside which it changes nothing."""
    spec: tuple[str, ...] | None = flag(None, nargs="*")
    """Module and name of the specification of a hybrid model's layers; default: megatron-core's."""
    linear_attention_freq: str | None = None
    """Layers with linear attention (gated delta net): all but every n-th, or a list expression."""
    group_query_attention: bool = False
    """Share keys and values between query heads; --num-query-groups says how many groups of them there are."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer weights of its own."""
    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this times the tensor-parallel size."""
    swiglu: bool = False
    """SwiGLU activation in the feed-forward layers."""
    squared_relu: bool = False
    """Squared ReLU activation in the feed-forward layers."""
    quick_geglu: bool = False
    """Quick GEGLU activation in the feed-forward layers."""
    num_experts: int | None = None
    """Number of experts of a mixture-of-experts layer; if it is not given, the model is dense."""
    moe_layer_freq: str = "1"
    """Which layers have experts: every n-th, or a list expression such as '([0]+[1]*3)*4'."""
    moe_router_load_balancing_type: tuple[
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none"], ...
    ] = ("aux_loss",)
    """How the router keeps the experts' loads even; several may be given."""
    moe_aux_loss_coeff: tuple[float, ...] = (0.0,)
    """Weight of each auxiliary loss of --moe-router-load-balancing-type."""
    cp_comm_type: tuple[str, ...] = ("p2p",)
    """How attention exchanges keys and values between context-parallel ranks; one word, or one for each layer."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline stage, where stages are uneven."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline stage, where stages are uneven."""
    pipeline_model_parallel_layout: str | None = None
    """Layers of each pipeline stage, written out as megatron-core's layout string."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of one model chunk: gives the interleaved schedule."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Model chunks on each pipeline rank: gives the interleaved schedule."""
    overlap_p2p_comm: bool = flag(True, "--no-overlap-p2p-communication")
    """Overlap sends between stages with compute in the interleaved schedule."""
    recompute_activations: bool = False
    """Short form of --recompute-granularity selective."""
    masked_softmax_fusion: bool = flag(True, "--no-masked-softmax-fusion")
    """Fuse scaling, mask and softmax where a CUDA kernel is there."""
    bias_gelu_fusion: bool = flag(True, "--no-bias-gelu-fusion")
    """Fuse bias and GELU."""
    bias_swiglu_fusion: bool = flag(True, "--no-bias-swiglu-fusion")
    """Fuse bias and SwiGLU."""
    bias_dropout_fusion: bool = flag(True, "--no-bias-dropout-fusion")
    """Fuse bias, dropout and the residual sum."""
    apply_rope_fusion: bool = flag(True, "--no-rope-fusion")
    """Fuse the rotary embedding where transformer-engine or apex is there."""
    no_persist_layer_norm: bool = False
    """Do not use the persistent layer-norm kernel of apex."""
    attention_softmax_in_fp32: bool = False
    """Compute the attention softmax in fp32 also in half precision."""
    fp16_lm_cross_entropy: bool = False
    """Compute the loss in fp16; only with --fp16."""
    init_method_xavier_uniform: bool = False
    """Xavier uniform initialisation of the weights."""
    rope_type: Literal["rope", "yarn"] | None = None
    """Kind of rotary embedding of multi-latent attention."""
    q_lora_rank: int | None = None
    """Multi-latent attention: rank of the query projection."""
    kv_lora_rank: int = 32
    """Multi-latent attention: rank of the key and value projection."""
    qk_head_dim: int = 128
    """Multi-latent attention: channels of a head without position."""
    qk_pos_emb_head_dim: int = 64
    """Multi-latent attention: channels of a head with position."""
    v_head_dim: int = 128
    """Multi-latent attention: channels of a value head."""
    rotary_scaling_factor: float = 1.0
    """Multi-latent attention: scaling of the rotary embedding."""
    mscale: float = 1.0
    """Multi-latent attention: yarn's mscale."""
    mscale_all_dim: float = 0.0
    """Multi-latent attention: yarn's mscale over all channels."""


@dataclass(frozen=True)
class TrainingConfig:
    """The length of the training and its batches."""

    micro_batch_size: int | None = None
    """Samples of one microbatch on one data-parallel rank."""
    global_batch_size: int | None = None
    """Samples of one optimizer step over the whole job; default: micro batch size x data-parallel size."""
    train_iters: int | None = None
    """Steps to train."""
    train_samples: int | None = None
    """Samples to train on, instead of --train-iters."""
    exit_interval: int | None = None
    """Save and leave at the first step divisible by this."""
    exit_duration_in_mins: int | None = None
    """Save and leave after this many minutes."""
    seed: int = 1234
    """Seed of initialisation, dropout and data order."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Backend inside a group; default: nccl with CUDA, gloo without it."""
    distributed_timeout_minutes: int = 10
    """Time-out of a collective inside a group, in minutes."""
    overlap_grad_reduce: bool = False
    """Begin the sum over groups while the last backward passes of a step still run."""
    num_distributed_optimizer_instances: int = 1
    """Megatron's word for N: the groups between which the optimizer state is replicated."""
    check_for_nan_in_loss_and_grad: bool = flag(True, "--no-check-for-nan-in-loss-and-grad")
    """Refuse to train on when the loss or the gradient is not finite."""
    rampup_batch_size: tuple[int, ...] | None = flag(None, nargs=3)
    """First batch size, its increment, and the samples over which it grows to --global-batch-size."""
    step_batch_size_schedule: str | None = None
    """Batch sizes and the tokens from which on each counts, as in '0:768 250B:1536 500B:3072'; needs --train-samples,
    and stands in the place of --global-batch-size."""
    decrease_batch_size_if_needed: bool = False
    """Round each batch size of --rampup-batch-size down to what the groups can share out evenly."""
    manual_gc: bool = False
    """Collect Python's garbage at fixed steps only, so that all ranks pause together."""
    manual_gc_interval: int = 0
    """Steps between collections with --manual-gc; 0: none while training."""
    manual_gc_eval: bool = flag(True, "--no-manual-gc-eval", "--disable-manual-gc-eval")
    """With --manual-gc, collect before and after an evaluation."""
    empty_unused_memory_level: Literal[0, 1, 2] = 0
    """Give unused CUDA memory back after the backward pass (1), and after the update too (2)."""
    use_tp_pp_dp_mapping: bool = False
    """Order of a group's ranks: tensor, pipeline, inner data, instead of tensor, inner data, pipeline."""
    yaml_cfg: str | None = None
    """File with these settings in Megatron's YAML form; flags beside it win."""
    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = "disabled"
    """Megatron's re-run of suspicious steps; replaced here by votes with digests."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate and weight decay over the steps."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt", "1-sqrt"] = "exponential"
    """Shape of the last phase of WSD; 1-sqrt is another name of minus_sqrt, from Apertus's Megatron."""
    lr_decay_iters: int | None = None
    """Steps over which the rate decays; default: all steps."""
    lr_decay_samples: int | None = None
    """Samples over which the rate decays, with --train-samples."""
    lr_wsd_decay_iters: int | None = None
    """Steps of the last phase of WSD."""
    lr_wsd_decay_samples: int | None = None
    """Samples of the last phase of WSD, with --train-samples."""
    lr_warmup_fraction: float | None = None
    """Share of the decay steps that is warm-up."""
    lr_warmup_iters: int = 0
    """Steps of warm-up."""
    lr_warmup_samples: int = 0
    """Samples of warm-up, with --train-samples."""
    lr_warmup_init: float = 0.0
    """Rate at which the warm-up begins."""
    override_opt_param_scheduler: bool = flag(False, "--override-opt_param-scheduler", "--override-opt-param-scheduler")
    """Take the schedule from the flags, not from the checkpoint."""
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, "--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"
    )
    """Take the schedule from the checkpoint, not from the flags."""
    start_weight_decay: float | None = None
    """Weight decay at the first step, with an increasing weight decay."""
    end_weight_decay: float | None = None
    """Weight decay at the last step, with an increasing weight decay."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay grows."""


@dataclass(frozen=True)
class AdemamixConfig:
    """The optimizer AdEMAMix, which Megatron-LM does not have: flags and defaults of Apertus's Megatron."""

    ademamix_alpha: float = 2.0
    """Weight of the slow average of gradients beside the fast one."""
    ademamix_beta3: float = 0.9999
    """Coefficient of the slow average; those of the fast one and of squares are --adam-beta1 and --adam-beta2."""
    ademamix_alpha_warmup: int | None = None
    """Steps over which --ademamix-alpha grows from 0, linearly."""
    ademamix_beta3_warmup: int | None = None
    """Steps over which the slow average's half-life grows linearly from that of --adam-beta1."""


@dataclass(frozen=True)
class DataConfig:
    """Where samples come from and how they are cut."""

    data_path: tuple[str, ...] | None = flag(None, nargs="*")
    """Prefixes of data files (without .bin), each with a weight before it or none at all; cut by --split."""
    split: str | None = None
    """Shares of training, validation and test, such as 969,30,1."""
    train_data_path: tuple[str, ...] | None = flag(None, nargs="*")
    """Data files for training only, in the form of --data-path."""
    valid_data_path: tuple[str, ...] | None = flag(None, nargs="*")
    """Data files for validation only, in the form of --data-path."""
    test_data_path: tuple[str, ...] | None = flag(None, nargs="*")
    """Data files for testing only, in the form of --data-path."""
    data_args_path: str | None = None
    """File with the words of --data-path."""
    per_split_data_args_path: str | None = None
    """JSON file with lists 'train', 'valid' and 'test' of the words of the three --*-data-path flags."""
    data_cache_path: str | None = None
    """Directory of the built sample indices; default: beside the data."""
    mmap_bin_files: bool = flag(True, "--no-mmap-bin-files")
    """Read .bin files through memory maps."""
    mock_data: bool = False
    """Train on made-up samples."""
    seq_length: int | None = None
    """Tokens of a sample."""
    encoder_seq_length: int | None = None
    """Older name of --seq-length."""
    num_workers: int = 2
    """Threads that read samples ahead; 0: read when they are needed."""
    reset_position_ids: bool = False
    """Count positions anew after each end of document."""
    reset_attention_mask: bool = False
    """Let no token attend across an end of document."""
    eod_mask_loss: bool = False
    """Take no loss on end-of-document tokens."""
    create_attention_mask_in_dataloader: bool = flag(True, "--no-create-attention-mask-in-dataloader")
    """Make the attention mask with the sample."""
    num_dataset_builder_threads: int = 1
    """Threads that build the indices of several data files."""
    mid_level_dataset_surplus: float = 0.005
    """Extra samples drawn from each file of a blend, as a share."""
    allow_ambiguous_pad_tokens: bool = False
    """Accept a tokenizer whose padding token also stands for something else."""
    dataloader_type: Literal["single", "cyclic", "external"] | None = None
    """single: samples in their order, once; cyclic: shuffled anew in each epoch."""
    data_sharding: bool = flag(True, "--no-data-sharding")
    """cyclic: each data-parallel rank shuffles its own part of the samples."""
    fim_data: bool = False
    """Rearrange some documents so that the model learns to fill in the middle (arXiv 2207.14255); random numbers follow
    from the seed and the sample's index, so the choice is another than Megatron's."""
    fim_rate: float = 0.5
    """Share of the documents that --fim-data rearranges."""
    fim_spm_rate: float = 0.5
    """Share of the rearranged documents that have the suffix first (SPM); the others have the prefix first (PSM)."""
    fim_split_sample: str | None = None
    """Token that divides a document into fragments, each of which is rearranged by itself."""
    fim_fragment_rate: float | None = None
    """Share of the fragments of a document that are rearranged, with --fim-split-sample."""
    fim_no_prefix: str | None = None
    """Text: what begins with it is not rearranged."""
    fim_prefix_token: str = "<fim_prefix>"
    """Token before a prefix."""
    fim_middle_token: str = "<fim_middle>"
    """Token before a middle."""
    fim_suffix_token: str = "<fim_suffix>"
    """Token before a suffix."""
    fim_pad_token: str = "<fim_pad>"
    """Token that fills up a sample which became shorter."""
    fim_eod_token: str = "<|endoftext|>"
    """Token that ends a document in the data."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Validation and test."""

    eval_iters: int = 100
    """Number of batches of one evaluation; 0: no evaluation."""
    eval_interval: int | None = None
    """Steps between evaluations; if it is not given, there are none while training."""
    eval_global_batch_size: int | None = None
    """Samples of an evaluation's batch; only the size of the (largest) training batch is possible."""
    eval_micro_batch_size: int | None = None
    """Samples of an evaluation's microbatch; only --micro-batch-size is possible."""


@dataclass(frozen=True)
class TokenizerConfig:
    """The tokenizer that made the data."""

    tokenizer_type: (
        Literal[
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "GPT2BPETokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "HuggingFaceTokenizer",
            "Llama2Tokenizer",
            "TikTokenizer",
            "MultimodalTokenizer",
            "NullTokenizer",
            "NullMultimodalTokenizer",
            "SFTTokenizer",
        ]
        | None
    ) = None
    """Kind of tokenizer."""
    tokenizer_model: str | None = None
    """Model file, or name, of the tokenizer."""
    tokenizer_metadata: str | None = None
    """JSON file with megatron-core's description of the tokenizer."""
    tokenizer_special_tokens: tuple[str, ...] | None = None
    """Special tokens added to the tokenizer."""
    tokenizer_sentencepiece_legacy: bool = False
    """Use the older handling of special tokens by SentencePiece."""
    tokenizer_hf_use_fast: bool = False
    """Use the fast implementation of a HuggingFace tokenizer."""
    tokenizer_hf_include_special_tokens: bool = False
    """Let a HuggingFace tokenizer add its special tokens."""
    trust_remote_code: bool = False
    """Let a HuggingFace tokenizer run code that comes with it."""
    tiktoken_pattern: str | None = None
    """Which of megatron-core's patterns splits text for TikTokenizer: v1 or v2."""
    tiktoken_num_special_tokens: int = 1000
    """Number of special tokens of TikTokenizer."""
    tiktoken_special_tokens: tuple[str, ...] | None = None
    """Older name of --tokenizer-special-tokens."""
    vocab_size: int | None = None
    """Size of the vocabulary before padding; needed by NullTokenizer, checked against other tokenizers."""
    padded_vocab_size: int | None = None
    """Size of the vocabulary after padding, where it should not be computed."""
    vocab_file: str | None = None
    """Vocabulary file of GPT2BPETokenizer."""
    merge_file: str | None = None
    """Merge file of GPT2BPETokenizer."""
    vocab_extra_ids: int = 0
    """Extra tokens at the end of the vocabulary."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints that are written and read."""

    save: str | None = None
    """Directory that checkpoints are written to."""
    save_interval: int | Literal["auto"] | None = flag(
        None, "--save-interval", "--persistent-save-interval", kind="steps-or-auto"
    )
    """Steps between checkpoints; auto: chosen from the costs of the first steps and a first save, and from the
    losses."""
    load: str | None = None
    """Directory that a checkpoint is read from."""
    ckpt_step: int | None = None
    """Step of the checkpoint to read; default: the last one."""
    exit_on_missing_checkpoint: bool = False
    """Leave with an error, instead of starting anew, when --load has no checkpoint."""
    finetune: bool = False
    """Read the weights only and begin at step 0."""
    no_save_optim: bool = False
    """Do not write the optimizer state."""
    no_load_optim: bool = False
    """Do not read the optimizer state."""
    async_save: bool = False
    """Write checkpoints in the background, which is also done without this flag unless --spare-no-async-save is
    given."""
    save_retain_interval: int | None = None
    """Keep checkpoints of steps that are multiples of this; of the others only the newest ones."""
    use_checkpoint_args: bool = False
    """Take the model's flags, and the tokenizer's, from the args that the checkpoint of --load was saved with."""
    use_mp_args_from_checkpoint_args: bool = False
    """With --use-checkpoint-args: take TP, PP and EP from the checkpoint as well."""
    use_tokenizer_model_from_checkpoint_args: bool = flag(
        True, "--no-use-tokenizer-model-from-checkpoint-args", "--disable-use-tokenizer-model-from-checkpoint-args"
    )
    """With --use-checkpoint-args: take --tokenizer-type and --tokenizer-model from the command line nevertheless."""
    ckpt_format: Literal["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"] = "torch_dist"
    """Format of checkpoints; whatever it says, torch_dist is written."""
    dist_ckpt_strictness: Literal[
        "assume_ok_unexpected",
        "log_unexpected",
        "log_all",
        "raise_unexpected",
        "raise_all",
        "return_unexpected",
        "return_all",
        "ignore_all",
    ] = "assume_ok_unexpected"
    """What to do about tensors that only the checkpoint or only the model has."""


@dataclass(frozen=True)
class LoggingConfig:
    """Figures that are reported, and where."""

    log_interval: int = 100
    """Steps between two lines of the log."""
    log_throughput: bool = False
    """Add the floating-point rate per GPU to the log."""
    timing_log_level: Literal[0, 1, 2] = 0
    """Level of detail of the timers."""
    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    """How a timer is summed up over ranks."""
    tensorboard_dir: str | None = None
    """Directory of TensorBoard files."""
    tensorboard_log_interval: int = 1
    """Steps between two points in TensorBoard."""
    tensorboard_queue_size: int = 1000
    """Points that TensorBoard holds back before it writes."""
    log_loss_scale_to_tensorboard: bool = flag(
        True, "--no-log-loss-scale-to-tensorboard", "--disable-log-loss-scale-to-tensorboard"
    )
    """Write the loss scale to TensorBoard."""
    log_validation_ppl_to_tensorboard: bool = False
    """Write the validation perplexity to TensorBoard."""
    wandb_project: str | None = None
    """Project in Weights & Biases; if it is not given, nothing is sent there."""
    wandb_exp_name: str | None = None
    """Name of the run in Weights & Biases."""
    wandb_save_dir: str | None = None
    """Directory of the local files of Weights & Biases."""
    wandb_entity: str | None = None
    """Account in Weights & Biases."""
    otel_enabled: bool = False
    """Send figures and spans to OpenTelemetry, from the coordinator; needs the extra otel."""
    otel_service_name: str | None = None
    """Name of the service in OpenTelemetry; if it is not given, OTEL_SERVICE_NAME says it."""
    otel_span_groups: str | None = None
    """Which spans are sent: default, per_step or all, or groups with commas between them; job, checkpoint and step have
    spans. If it is not given, default."""
    log_params_norm: bool = False
    """Log the norm of all parameters."""
    log_progress: bool = False
    """Append tokens and floating-point operations of the run to progress.txt in --save, at start and at each save."""
    log_timers_to_tensorboard: bool = False
    """Write the times of a step's parts to TensorBoard."""
    log_memory_to_tensorboard: bool = False
    """Write each step's memory figures to TensorBoard."""
    log_memory_interval: int | None = None
    """Steps between memory figures in the ranks' logs; if it is not given, they are logged once, after the first
    interval."""
    log_device_memory_used: bool = False
    """Add the memory that the device has in use to those figures."""
    log_world_size_to_tensorboard: bool = False
    """Write the number of ranks to TensorBoard."""
    profile: bool = False
    """Profile some steps on some ranks: nsys's range with CUDA, torch's profiler with --use-pytorch-profiler."""
    profile_step_start: int = 10
    """First step that is profiled."""
    profile_step_end: int = 12
    """First step that is not profiled any more."""
    use_pytorch_profiler: bool = False
    """Profile with torch's profiler; traces go to --tensorboard-dir, or beside the logs if that is not given."""
    profile_ranks: tuple[int, ...] = (0,)
    """Ranks of the job that are profiled."""
    record_memory_history: bool = False
    """Record CUDA allocations on the last rank of each group and write --memory-snapshot-path at each log line."""
    memory_snapshot_path: str = "snapshot.pickle"
    """File for --record-memory-history."""
    logging_level: int | None = None
    """Level of Python's logging: 10 debug, 20 info, 30 warning."""
