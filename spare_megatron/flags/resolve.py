"""Derives flags from other flags as Megatron does, and the numbers N and D, steps and samples.

Every function sets what it derives in the namespace, so that users' code finds the same values as under Megatron.
Flags from which nothing can be derived raise a ConfigError of one sentence. Imports neither torch nor megatron.
"""

from __future__ import annotations

import ast
import math
from argparse import Namespace
from typing import Any

from spare_megatron.config.batches import BatchPlan
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.flags import flag_name
from spare_megatron.config.place import WorldHint
from spare_megatron.config.plural import counted
from spare_megatron.config.shape import JobShape
from spare_megatron.flags.batch_flags import batch_plan, resolve_largest
from spare_megatron.flags.hybrid_pattern import hybrid_chunks, resolve_hybrid
from spare_megatron.flags.stage_layout import FLAG as LAYOUT
from spare_megatron.flags.stage_layout import check_layout, layout_text


def need(namespace: Namespace, dest: str, example: str) -> Any:
    """The value of a flag that every job needs; ConfigError where it is missing."""
    value = getattr(namespace, dest)
    if value is None:
        raise ConfigError(f"{flag_name(dest)} is missing; give it, as in {flag_name(dest)} {example}")
    return value


def at_least(namespace: Namespace, least: int, *dests: str) -> None:
    """ConfigError when one of the flags is given and below ``least``."""
    for dest in dests:
        value = getattr(namespace, dest)
        if value is not None and value < least:
            raise ConfigError(f"{flag_name(dest)} is {value}, but must be at least {least}")


def resolve_model(ns: Namespace) -> None:
    """Derive sizes and switches of the model from others, as Megatron does."""
    resolve_hybrid(ns)
    if ns.num_layers is not None and ns.encoder_num_layers is not None and ns.num_layers != ns.encoder_num_layers:
        raise ConfigError(
            f"--num-layers {ns.num_layers} and --encoder-num-layers {ns.encoder_num_layers} differ; use --num-layers"
        )
    if ns.seq_length is not None and ns.encoder_seq_length is not None and ns.seq_length != ns.encoder_seq_length:
        raise ConfigError(
            f"--seq-length {ns.seq_length} and --encoder-seq-length {ns.encoder_seq_length} differ; use --seq-length"
        )
    ns.num_layers = ns.num_layers if ns.num_layers is not None else ns.encoder_num_layers
    ns.seq_length = ns.seq_length if ns.seq_length is not None else ns.encoder_seq_length
    need(ns, "num_layers", "24")
    need(ns, "hidden_size", "1024")
    need(ns, "num_attention_heads", "16")
    need(ns, "seq_length", "1024")
    need(ns, "max_position_embeddings", str(ns.seq_length))
    at_least(ns, 1, "num_layers", "hidden_size", "num_attention_heads", "seq_length", "ffn_hidden_size", "kv_channels")
    at_least(ns, 1, "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    at_least(ns, 1, "expert_model_parallel_size", "expert_tensor_parallel_size", "num_query_groups")
    ns.encoder_num_layers, ns.encoder_seq_length = ns.num_layers, ns.seq_length
    if ns.kv_channels is None:
        if ns.hidden_size % ns.num_attention_heads:
            raise ConfigError(
                f"--hidden-size {ns.hidden_size} is not divisible by --num-attention-heads {ns.num_attention_heads}; "
                f"use --hidden-size {nearest_multiple(ns.hidden_size, ns.num_attention_heads)} or give --kv-channels"
            )
        ns.kv_channels = ns.hidden_size // ns.num_attention_heads
    if ns.ffn_hidden_size is None:
        ns.ffn_hidden_size = _ffn_width(ns)
    at_least(ns, 0, "mtp_num_layers")
    ns.mtp_num_layers = ns.mtp_num_layers or None
    if ns.num_experts == 0:
        ns.num_experts = None
    if ns.num_experts is not None and ns.moe_ffn_hidden_size is None:
        ns.moe_ffn_hidden_size = ns.ffn_hidden_size
    if ns.expert_tensor_parallel_size is None:
        ns.expert_tensor_parallel_size = ns.tensor_model_parallel_size
    if ns.use_rotary_position_embeddings:
        ns.position_embedding_type = "rope"
    if ns.no_weight_decay_cond_type is not None:  # qwen3_next is its older name
        ns.apply_wd_to_qk_layernorm = True
    if ns.eval_iters == -1:  # as newer scripts say that nothing is evaluated
        ns.eval_iters = 0
    if ns.moe_token_dispatcher_type == "flex":  # no_effect says so
        ns.moe_token_dispatcher_type = "alltoall"
    if ns.recompute_activations:
        ns.recompute_granularity = "selective"
    if ns.tensor_model_parallel_size == 1:
        ns.sequence_parallel = False
    if ns.add_bias_linear:
        ns.add_qkv_bias = True
    else:
        ns.bias_gelu_fusion = False
    if ns.position_embedding_type != "rope":
        ns.apply_rope_fusion = False
    if ns.apply_query_key_layer_scaling:
        ns.attention_softmax_in_fp32 = True
    ns.moe_layer_freq = pattern("--moe-layer-freq", ns.moe_layer_freq)
    ns.no_rope_freq = pattern("--no-rope-freq", ns.no_rope_freq)
    ns.window_attn_skip_freq = pattern("--window-attn-skip-freq", ns.window_attn_skip_freq)
    ns.linear_attention_freq = pattern("--linear-attention-freq", ns.linear_attention_freq)
    ns.window_size = window(ns.window_size)
    if ns.fp8 is not None and ns.spare_reduce == "exact" and "--spare-reduce" not in ns.spare_given:
        ns.spare_reduce = "fp32"
        ns.spare_notes += (
            f"--fp8-format {ns.fp8}: gradients are summed over groups in fp32, not exactly: fp8 scales "
            "depend on which microbatches a group ran",
        )
        if ns.check_weight_hash_across_dp_replicas_interval is not None:
            ns.check_weight_hash_across_dp_replicas_interval = None
            ns.spare_notes += (
                "--check-weight-hash-across-dp-replicas-interval: weights are not compared, as groups that sum in fp32 "
                "may differ in the last bit",
            )
    for dest in ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "cp_comm_type"):
        values = getattr(ns, dest)
        if isinstance(values, list) and len(values) == 1 and dest != "cp_comm_type":
            setattr(ns, dest, values[0])


def _ffn_width(ns: Namespace) -> int:
    """The width of the MLP that follows from that of the model."""
    if not ns.swiglu:
        return 4 * int(ns.hidden_size)
    width = int(4 * ns.hidden_size * 2 / 3 / 64) * 64
    if not width:
        raise ConfigError(
            f"--swiglu makes --ffn-hidden-size 8/3 of --hidden-size {ns.hidden_size} in multiples of 64, which is 0; "
            "give --ffn-hidden-size, or use --hidden-size 24 or more"
        )
    return width


def nearest_multiple(value: int, unit: int) -> int:
    """The multiple of ``unit`` nearest to ``value``, at least ``unit``."""
    return max(1, round(value / unit)) * unit


def pattern(name: str, text: Any) -> Any:
    """A number, or a list written as an expression of lists of numbers with + and *, such as ``([0]+[1]*3)*4``."""
    if text is None or isinstance(text, (int, list)):
        return text
    try:
        return evaluated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        raise ConfigError(
            f"{name} is {text!r}, but takes a whole number or a list expression such as '([0]+[1]*3)*4'"
        ) from None


def evaluated(node: ast.expr) -> Any:
    """The value of an expression of numbers, lists of numbers, + and *; ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [evaluated(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = evaluated(node.left), evaluated(node.right)
        if isinstance(node.op, ast.Add) and type(left) is type(right):
            return left + right
        if isinstance(node.op, ast.Mult) and not (isinstance(left, list) and isinstance(right, list)):
            size = (left if isinstance(left, int) else len(left)) * (right if isinstance(right, int) else len(right))
            if size > 1_000_000:
                raise ValueError(size)
            return left * right
    raise ValueError(ast.dump(node))


def window(text: Any) -> tuple[int, int] | None:
    """The value of ``--window-size``, (left, right), from text such as '127,0'."""
    if text is None:
        return None
    if isinstance(text, (list, tuple)) and len(text) == 2:  # as args have it
        return int(text[0]), int(text[1])
    try:
        left, right = (int(part) for part in text.strip("() ").split(","))
    except ValueError:
        raise ConfigError(f"--window-size is {text!r}, but takes two numbers, as in --window-size 127,0") from None
    return left, right


def resolve_stages(ns: Namespace) -> None:
    """Derive the number of model chunks of each pipeline rank."""
    pipeline = ns.pipeline_model_parallel_size
    chunks = _chunks(ns, pipeline) if ns.hybrid_layer_pattern is None else hybrid_chunks(ns)
    ns.virtual_pipeline_model_parallel_size = None if chunks in (None, 1) else chunks
    ns.overlap_p2p_comm = ns.overlap_p2p_comm and ns.virtual_pipeline_model_parallel_size is not None
    ns.transformer_pipeline_model_parallel_size = pipeline


def _chunks(ns: Namespace, pipeline: int) -> int | None:
    """The model chunks of each pipeline rank of a GPT."""
    given = [
        name
        for name in (
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "pipeline_model_parallel_layout",
        )
        if getattr(ns, name) is not None
    ]
    if len(given) > 1:
        raise ConfigError(" and ".join(flag_name(name) for name in given) + " say the same thing; give one of them")
    chunks: int | None = ns.num_virtual_stages_per_pipeline_rank
    if ns.num_layers_per_virtual_pipeline_stage is not None:
        at_least(ns, 1, "num_layers_per_virtual_pipeline_stage")
        unit = pipeline * ns.num_layers_per_virtual_pipeline_stage
        layers = counted_layers(ns)
        if layers % unit:
            raise ConfigError(
                f"{counted(layers, 'layer')} cannot be divided by {unit} = --pipeline-model-parallel-size {pipeline} x "
                f"--num-layers-per-virtual-pipeline-stage {ns.num_layers_per_virtual_pipeline_stage}; "
                f"use --num-layers {nearest_multiple(layers, unit) - layers + ns.num_layers}"
            )
        chunks = layers // unit
    if ns.pipeline_model_parallel_layout is not None:
        stages = check_layout(ns.pipeline_model_parallel_layout, pipeline, ns.num_layers, ns.mtp_num_layers or 0)
        ns.spare_notes += (f"{LAYOUT}: {layout_text(stages, pipeline)}",)
        chunks = len(stages) // pipeline
    return chunks


def counted_layers(ns: Namespace) -> int:
    """Number of layers that is divided over pipeline stages: embedding and loss may count as one layer each."""
    return (
        int(ns.num_layers)
        + bool(ns.account_for_embedding_in_pipeline_split)
        + bool(ns.account_for_loss_in_pipeline_split)
    )


def resolve_shape(ns: Namespace, hint: WorldHint) -> JobShape:
    """The job's shape (N, D, batch) from the flags and from ``hint``, what the launcher passed on."""
    model = ns.tensor_model_parallel_size * ns.pipeline_model_parallel_size * ns.context_parallel_size
    inner = resolve_inner(ns, hint, model)
    groups = hint.num_groups
    instances = ns.num_distributed_optimizer_instances
    if hint.world_size is not None:
        if hint.world_size % (model * inner):
            raise ConfigError(
                f"the number of started ranks, {hint.world_size}, is not a multiple of the {model * inner} of a group "
                f"(TP {ns.tensor_model_parallel_size} x PP {ns.pipeline_model_parallel_size} x CP "
                f"{ns.context_parallel_size} x inner data {inner}); "
                f"start {nearest_multiple(hint.world_size, model * inner)}"
            )
        counted = hint.world_size // (model * inner)
        if groups is not None and groups != counted:
            raise ConfigError(
                f"SPARE_NUM_GROUPS is {groups}, but {hint.world_size} ranks are {counted} groups of {model * inner}; "
                f"start {groups * model * inner} ranks or set SPARE_NUM_GROUPS={counted}"
            )
        groups = counted
    if instances > 1 and groups is not None and groups != instances:
        raise ConfigError(
            f"--num-distributed-optimizer-instances {instances} means {instances} groups, but the job has {groups}; "
            f"leave the flag out or use {groups}"
        )
    groups = groups or instances
    need(ns, "micro_batch_size", "1")
    at_least(ns, 1, "micro_batch_size")
    resolve_largest(ns, groups * inner)
    return JobShape(
        num_groups=groups,
        micro_batch_size=ns.micro_batch_size,
        global_batch_size=ns.global_batch_size,
        tensor=ns.tensor_model_parallel_size,
        pipeline=ns.pipeline_model_parallel_size,
        context=ns.context_parallel_size,
        inner_data=inner,
        piece_microbatches=1 if ns.spare_piece_microbatches is None else ns.spare_piece_microbatches,
    )


def resolve_inner(ns: Namespace, hint: WorldHint, model: int) -> int:
    """D: as --spare-inner-data-parallel gives it, else from the number of ranks that were started, else the least that
    expert parallelism allows."""
    reported = ns.spare_inner_data_parallel
    at_least(ns, 1, "spare_inner_data_parallel", "num_distributed_optimizer_instances")
    unit = expert_unit(ns)
    inner = reported or unit
    if reported is None and hint.world_size is not None and ns.num_distributed_optimizer_instances > 1:
        ranks = model * ns.num_distributed_optimizer_instances
        if hint.world_size % ranks:
            raise ConfigError(
                f"the number of ranks, {hint.world_size}, is not a multiple of {ranks} = TP x PP x CP {model} x "
                f"--num-distributed-optimizer-instances {ns.num_distributed_optimizer_instances}; "
                f"start {nearest_multiple(hint.world_size, ranks)}"
            )
        inner = hint.world_size // ranks
    if reported is None and hint.group_size is not None and hint.group_size % model == 0:
        inner = hint.group_size // model
    if hint.group_size is not None and hint.group_size != model * inner:
        raise ConfigError(
            f"torchrun started {hint.group_size} ranks for this group, but TP {ns.tensor_model_parallel_size} x PP "
            f"{ns.pipeline_model_parallel_size} x CP {ns.context_parallel_size} x inner data {inner} are "
            f"{model * inner}; use --nproc-per-node x --nnodes = {model * inner}"
        )
    if inner % unit:
        raise ConfigError(
            f"inner data parallelism {inner} leaves no room for expert parallelism {ns.expert_model_parallel_size} x "
            f"expert tensor parallelism {ns.expert_tensor_parallel_size}, which needs a multiple of {unit}; "
            f"use --spare-inner-data-parallel {unit}"
        )
    return inner


def explain_inner(ns: Namespace, shape: JobShape) -> None:
    """Add a note that says what ``--use-distributed-optimizer`` does in this job."""
    if not ns.use_distributed_optimizer:
        return
    ranks = shape.inner_data * shape.context
    flag = "--use-distributed-optimizer"
    if ranks == 1:
        ns.spare_notes += (
            f"{flag}: a group has one inner data rank, so its optimizer state is whole on each rank; "
            "--spare-inner-data-parallel D divides it over D ranks",
        )
    else:
        ns.spare_notes += (f"{flag}: each group's optimizer state is divided over its {ranks} inner ranks",)


def explain_auto(ns: Namespace) -> None:
    """Add notes about choices that were asked for with 'auto' and cannot be made without --save, or about what a save
    without the optimizer cannot do."""
    if ns.save is not None:
        if ns.no_save_optim:
            ns.spare_notes += (
                "--no-save-optim: no checkpoint has the optimizer's state, so a wipe-out ends the job; go on from its "
                "weights with --load and --no-load-optim",
            )
        return
    if ns.save_interval == "auto":
        ns.spare_notes += ("--save-interval auto without --save: nothing is saved or measured; give --save DIR",)
    if "--spare-redundancy" in ns.spare_given and ns.spare_redundancy is None and ns.spare_data != "shared":
        ns.spare_notes += (
            "--spare-redundancy auto without --save: the redundancy depends on the number of groups alone; give --save "
            "DIR and --save-interval, so that a save is measured and the next start can use the job's own figures",
        )


def expert_unit(ns: Namespace) -> int:
    """The least D for which expert ranks fit into TP x CP x D."""
    expert = ns.expert_model_parallel_size * ns.expert_tensor_parallel_size
    return int(expert // math.gcd(expert, ns.tensor_model_parallel_size * ns.context_parallel_size))


def resolve_training(ns: Namespace, shape: JobShape) -> None:
    """Derive the number of steps, check the lengths of the learning rate schedule, and derive the weight decay."""
    if ns.train_iters is not None and ns.train_samples is not None:
        raise ConfigError(
            f"--train-iters {ns.train_iters} and --train-samples {ns.train_samples} both end the job; give one of them"
        )
    if ns.train_iters is None and ns.train_samples is None:
        raise ConfigError("neither --train-iters nor --train-samples is given; use --train-iters 1000")
    at_least(ns, 1, "train_iters", "train_samples", "lr_decay_iters", "lr_decay_samples")
    at_least(ns, 0, "lr_warmup_iters", "lr_warmup_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
    other, own = ("samples", "iters") if ns.train_samples is None else ("iters", "samples")
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        value = getattr(ns, f"{name}_{other}")
        if value:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag}-{other} {value} does not go with --train-{own}; use --{flag}-{own}")
    if ns.lr_warmup_fraction is not None and (ns.lr_warmup_iters or ns.lr_warmup_samples):
        raise ConfigError("--lr-warmup-fraction and --lr-warmup-iters (or -samples) say the same thing; give one")
    if ns.lr_wsd_decay_style == "1-sqrt":
        ns.lr_wsd_decay_style = "minus_sqrt"
    ns.consumed_train_samples = ns.consumed_valid_samples = ns.skipped_train_samples = ns.iteration = 0
    batches = batch_plan(ns, shape)  # refuses a ramp with a batch that cannot be divided over the groups
    if ns.train_samples is not None:
        ns.train_iters = batches.steps_for(ns.train_samples)
        if ns.train_iters == 0:
            raise ConfigError(
                f"--train-samples {ns.train_samples} is less than one --global-batch-size {ns.global_batch_size}; "
                f"use --train-samples {ns.global_batch_size} or more"
            )
    if ns.weight_decay_incr_style == "constant":
        if ns.start_weight_decay is not None or ns.end_weight_decay is not None:
            raise ConfigError(
                "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine"
            )
        ns.start_weight_decay = ns.end_weight_decay = ns.weight_decay
    elif ns.start_weight_decay is None or ns.end_weight_decay is None:
        raise ConfigError(
            f"--weight-decay-incr-style {ns.weight_decay_incr_style} needs --start-weight-decay and --end-weight-decay"
        )


def scheduler_fields(ns: Namespace, batches: BatchPlan) -> dict[str, Any]:
    """Arguments of megatron-core's OptimizerParamScheduler after the optimizer; lengths are in samples.

    Flags in iterations become the samples of these iterations along the plan of batches; the phases of warm-up and
    decay begin with the job's first step, and the last one of WSD ends with the decay."""
    if ns.train_samples is None:
        decay_steps, wsd_steps = ns.lr_decay_iters or ns.train_iters, ns.lr_wsd_decay_iters
        decay, total = batches.samples_of(decay_steps), batches.samples_of(ns.train_iters)
        warmup = batches.samples_of(ns.lr_warmup_iters)
        wsd = None if wsd_steps is None else decay - batches.samples_of(decay_steps - wsd_steps)
    else:
        decay, total = ns.lr_decay_samples or ns.train_samples, ns.train_samples
        warmup, wsd = ns.lr_warmup_samples, ns.lr_wsd_decay_samples
    if ns.lr_warmup_fraction is not None:
        warmup = ns.lr_warmup_fraction * decay
    if warmup >= decay:
        raise ConfigError(
            f"the warm-up of {warmup:g} samples is not shorter than the {decay} samples over which the learning rate "
            "decays; use a smaller --lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction"
        )
    if ns.lr_decay_style == "WSD" and wsd is None:
        raise ConfigError("--lr-decay-style WSD needs the length of its last phase; give --lr-wsd-decay-iters")
    return {
        "init_lr": ns.lr_warmup_init,
        "max_lr": ns.lr,
        "min_lr": ns.min_lr,
        "lr_warmup_steps": warmup,
        "lr_decay_steps": decay,
        "lr_decay_style": ns.lr_decay_style,
        "start_wd": ns.start_weight_decay,
        "end_wd": ns.end_weight_decay,
        "wd_incr_steps": total,
        "wd_incr_style": ns.weight_decay_incr_style,
        "use_checkpoint_opt_param_scheduler": ns.use_checkpoint_opt_param_scheduler,
        "override_opt_param_scheduler": ns.override_opt_param_scheduler,
        "wsd_decay_steps": wsd,
        "lr_wsd_decay_style": ns.lr_wsd_decay_style,
    }
