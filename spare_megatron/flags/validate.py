"""Checks rules between flags; the message of each is one sentence that names the values and the fix.

Assumes a resolved namespace (:mod:`resolve`). Rules that megatron-core checks when it builds its configs are checked
here too, where a job would otherwise fail only after its start. Imports neither torch nor megatron.
"""

from __future__ import annotations

from argparse import Namespace

from spare_megatron.config.byte_units import rate_of
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.flags import flag_name
from spare_megatron.config.plural import counted
from spare_megatron.config.shape import JobShape
from spare_megatron.config.span_groups import span_groups
from spare_megatron.config.timeouts import timeouts_from
from spare_megatron.flags.batch_flags import check_evaluation
from spare_megatron.flags.hybrid_pattern import check_hybrid
from spare_megatron.flags.optimizer_flags import check_optimizer, check_state_redundancy
from spare_megatron.flags.predicted_tokens import check_predicted
from spare_megatron.flags.resolve import at_least, counted_layers, nearest_multiple
from spare_megatron.flags.stage_layout import row_cut_of


def refuse(condition: object, sentence: str) -> None:
    """ConfigError with ``sentence`` when ``condition`` holds."""
    if condition:
        raise ConfigError(sentence)


def check_model(ns: Namespace) -> None:
    """Check layers, heads and widths against the parallel degrees."""
    tensor, pipeline, context = (
        ns.tensor_model_parallel_size,
        ns.pipeline_model_parallel_size,
        ns.context_parallel_size,
    )
    refuse(
        ns.num_attention_heads % tensor,
        f"--num-attention-heads {ns.num_attention_heads} is not divisible by --tensor-model-parallel-size {tensor}; "
        f"use --num-attention-heads {nearest_multiple(ns.num_attention_heads, tensor)}",
    )
    if ns.group_query_attention:
        groups = ns.num_query_groups
        refuse(
            groups % tensor and tensor % groups,
            f"--num-query-groups {groups} is neither a multiple nor a divisor of "
            f"--tensor-model-parallel-size {tensor}; use --num-query-groups {nearest_multiple(groups, tensor)}",
        )
        refuse(
            ns.num_attention_heads % groups,
            f"--num-attention-heads {ns.num_attention_heads} is not divisible by --num-query-groups {groups}; "
            f"use --num-attention-heads {nearest_multiple(ns.num_attention_heads, groups)}",
        )
    refuse(
        ns.multi_latent_attention and ns.group_query_attention,
        "--group-query-attention does not go with --multi-latent-attention; leave one of them out",
    )
    refuse(
        ns.multi_latent_attention and ns.rotary_interleaved,
        "--rotary-interleaved does not go with --multi-latent-attention; leave it out",
    )
    refuse(
        ns.ffn_hidden_size % tensor,
        f"--ffn-hidden-size {ns.ffn_hidden_size} is not divisible by --tensor-model-parallel-size {tensor}; "
        f"use --ffn-hidden-size {nearest_multiple(ns.ffn_hidden_size, tensor)}",
    )
    refuse(
        ns.max_position_embeddings < ns.seq_length,
        f"--max-position-embeddings {ns.max_position_embeddings} is less than --seq-length {ns.seq_length}; "
        f"use --max-position-embeddings {ns.seq_length}",
    )
    refuse(
        ns.sequence_parallel and ns.seq_length % tensor,
        f"--seq-length {ns.seq_length} is not divisible by --tensor-model-parallel-size {tensor}, which "
        f"--sequence-parallel needs; use --seq-length {nearest_multiple(ns.seq_length, tensor)}",
    )
    refuse(
        context > 1 and ns.seq_length % (2 * context),
        f"--seq-length {ns.seq_length} is not divisible by {2 * context} = 2 x --context-parallel-size {context}; "
        f"use --seq-length {nearest_multiple(ns.seq_length, 2 * context)}",
    )
    _check_activation(ns)
    _check_positions(ns)
    check_stages(ns, pipeline)


def _check_activation(ns: Namespace) -> None:
    activations = [name for name in ("swiglu", "squared_relu", "quick_geglu") if getattr(ns, name)]
    refuse(
        len(activations) > 1,
        " and ".join(flag_name(name) for name in activations) + " are two activations; give one",
    )
    if ns.use_te_activation_func:
        unknown = [name for name in activations if name != "swiglu"]
        refuse(unknown, f"--use-te-activation-func has no --{'-'.join(unknown).replace('_', '-')}; leave one out")
        kind = "swiglu" if ns.swiglu else "gelu"
        refuse(
            ns.bias_swiglu_fusion if ns.swiglu else ns.bias_gelu_fusion,
            f"--use-te-activation-func does not go with the fused bias; add --no-bias-{kind}-fusion",
        )


def _check_positions(ns: Namespace) -> None:
    refuse(
        not ns.add_position_embedding and ns.position_embedding_type != "rope",
        "--no-position-embedding is only for rotary embeddings; use --position-embedding-type none",
    )
    if ns.position_embedding_type == "yarn":
        refuse(
            ns.multi_latent_attention,
            "--position-embedding-type yarn does not go with --multi-latent-attention; use --position-embedding-type "
            "rope --rope-type yarn",
        )
        refuse(
            ns.yarn_original_max_position_embeddings is None,
            "--position-embedding-type yarn needs --yarn-original-max-position-embeddings, the longest sequence before "
            "--rotary-scaling-factor extended it; give it",
        )


def check_stages(ns: Namespace, pipeline: int) -> None:
    """Check that layers can be divided over pipeline stages."""
    even = ns.decoder_first_pipeline_num_layers is None and ns.decoder_last_pipeline_num_layers is None
    chunks = ns.virtual_pipeline_model_parallel_size or 1
    layers = counted_layers(ns)
    if even and ns.pipeline_model_parallel_layout is None and ns.hybrid_layer_pattern is None:
        unit = pipeline * chunks
        stages = f"--pipeline-model-parallel-size {pipeline}" + (f" x {chunks} virtual stages" if chunks > 1 else "")
        refuse(
            layers % unit,
            f"{counted(layers, 'layer')} cannot be divided by {unit} = {stages}; "
            f"use --num-layers {nearest_multiple(layers, unit) - layers + ns.num_layers}",
        )
    refuse(
        chunks > 1 and pipeline < 2,
        f"{chunks} virtual stages need --pipeline-model-parallel-size of at least 2, but it is {pipeline}",
    )
    if not even and ns.pipeline_model_parallel_layout is None and ns.hybrid_layer_pattern is None:
        _check_ends(ns, pipeline, chunks)


def _check_ends(ns: Namespace, pipeline: int, chunks: int) -> None:
    """Check the layers of a first or last stage that has a number of its own, and what they leave to the others."""
    counts = {
        f"--decoder-{end}-pipeline-num-layers": getattr(ns, f"decoder_{end}_pipeline_num_layers")
        for end in ("first", "last")
    }
    given = {flag: count for flag, count in counts.items() if count is not None}
    for flag, count in given.items():
        refuse(count < 1, f"{flag} is {count}, but must be at least 1")
        refuse(count % chunks, f"{flag} {count} is not divisible by {chunks} virtual stages; use {chunks}")
    words = " and ".join(f"{flag} {count}" for flag, count in given.items())
    middle, stages = ns.num_layers - sum(given.values()), pipeline - len(given)
    refuse(
        min(middle, stages) < 0 or bool(middle) != bool(stages) or (stages and middle % (stages * chunks)),
        f"{words} and --num-layers {ns.num_layers} leave {counted(middle, 'layer')} for "
        f"{counted(max(stages, 0), 'other stage')} of --pipeline-model-parallel-size {pipeline}"
        + (f" with {chunks} virtual stages each" if chunks > 1 else "")
        + ", which cannot be divided evenly; use other numbers, or leave them out",
    )


def check_experts(ns: Namespace) -> None:
    """Check the flags of mixture-of-experts models."""
    experts, parallel = ns.num_experts, ns.expert_model_parallel_size
    refuse(
        parallel > 1 and experts is None,
        f"--expert-model-parallel-size {parallel} needs a model with experts; give --num-experts {parallel * 2}",
    )
    refuse(
        isinstance(ns.moe_router_load_balancing_type, list)
        and (
            not isinstance(ns.moe_aux_loss_coeff, list)
            or len(ns.moe_aux_loss_coeff) != len(ns.moe_router_load_balancing_type)
        ),
        "--moe-router-load-balancing-type and --moe-aux-loss-coeff have different numbers of entries; "
        "give one coefficient for each loss",
    )
    refuse(
        ns.moe_router_enable_expert_bias and ns.moe_router_score_function == "softmax",
        "--moe-router-enable-expert-bias does not go with --moe-router-score-function softmax; use sigmoid",
    )
    refuse(
        (ns.moe_router_padding_for_fp8 or ns.moe_router_padding_for_quantization) and ns.fp8 is None,
        "--moe-router-padding-for-quantization is only for --fp8-format; leave it out",
    )
    refuse(
        ns.moe_pad_expert_input_to_capacity and ns.moe_expert_capacity_factor is None,
        "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor, from which the capacity follows",
    )
    _check_routing(ns)
    width = ns.moe_ffn_hidden_size
    refuse(
        width is not None and experts is None,
        f"--moe-ffn-hidden-size {width} is only for models with experts; leave it out or give --num-experts",
    )
    if experts is None:
        return
    at_least(ns, 1, "moe_ffn_hidden_size")
    refuse(
        experts % parallel,
        f"--num-experts {experts} is not divisible by --expert-model-parallel-size {parallel}; "
        f"use --num-experts {nearest_multiple(experts, parallel)}",
    )
    refuse(
        ns.moe_router_topk > experts,
        f"--moe-router-topk {ns.moe_router_topk} is more than --num-experts {experts}; use at most {experts}",
    )
    refuse(
        ns.moe_router_topk == 1
        and ns.moe_router_score_function == "softmax"
        and not ns.moe_router_pre_softmax
        and ns.moe_router_load_balancing_type != "sinkhorn",
        "--moe-router-topk 1 would give every expert the weight 1; add --moe-router-pre-softmax",
    )
    refuse(
        isinstance(ns.moe_layer_freq, list) and len(ns.moe_layer_freq) != ns.num_layers,
        f"--moe-layer-freq has {len(ns.moe_layer_freq) if isinstance(ns.moe_layer_freq, list) else 0} entries, but the "
        f"model has {ns.num_layers} layers; give one entry for each layer",
    )
    refuse(
        ns.moe_shared_expert_intermediate_size and ns.add_bias_linear,
        "shared experts (--moe-shared-expert-intermediate-size) have no biases in megatron-core; add "
        "--disable-bias-linear",
    )
    refuse(
        ns.tensor_model_parallel_size > 1 and not ns.sequence_parallel,
        f"experts with --tensor-model-parallel-size {ns.tensor_model_parallel_size} need --sequence-parallel; add it",
    )


def _check_routing(ns: Namespace) -> None:
    """Check how many tokens an expert gets, and among which groups of experts routers choose."""
    experts = ns.num_experts
    losses = ns.moe_router_load_balancing_type
    balancing = losses if isinstance(losses, list) else [losses]
    refuse(
        ns.moe_expert_capacity_factor is not None
        and not set(balancing) <= {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"},
        f"--moe-expert-capacity-factor {ns.moe_expert_capacity_factor} is not for --moe-router-load-balancing-type "
        f"{' '.join(balancing)}; use aux_loss, seq_aux_loss or none",
    )
    chosen, router_groups = ns.moe_router_group_topk, ns.moe_router_num_groups
    refuse(
        chosen and (experts is None or not router_groups),
        f"--moe-router-group-topk {chosen} needs --num-experts and --moe-router-num-groups, among which it chooses",
    )
    refuse(
        chosen and ((experts or 0) % router_groups or chosen > router_groups),
        f"--moe-router-num-groups {router_groups} does not divide --num-experts {experts}, or is less than "
        f"--moe-router-group-topk {chosen}; use other numbers",
    )


def check_training(ns: Namespace) -> None:
    """Check precision, learning rate, intervals, dropout and recomputation."""
    refuse(ns.fp16 and ns.bf16, "--fp16 and --bf16 are two precisions; give one of them")
    refuse(
        ns.fp16_lm_cross_entropy and not ns.fp16,
        "--fp16-lm-cross-entropy is only for --fp16; leave it out or add --fp16",
    )
    refuse(
        ns.fp8_param_gather and ns.fp8 is None,
        "--fp8-param-gather is only for --fp8-format; leave it out or give --fp8-format hybrid",
    )
    refuse(
        ns.fp32_residual_connection and not (ns.fp16 or ns.bf16),
        "--fp32-residual-connection is only for half precision; leave it out or add --bf16",
    )
    refuse(ns.lr is None, "--lr is missing; give it, as in --lr 3e-4")
    refuse(ns.lr <= 0, f"--lr is {ns.lr}, but must be above 0")
    refuse(ns.min_lr > ns.lr, f"--min-lr {ns.min_lr} is above --lr {ns.lr}; use --min-lr {ns.lr} or less")
    at_least(ns, 1, "log_interval", "eval_interval", "exit_interval", "exit_duration_in_mins")
    at_least(ns, 1, "tensorboard_log_interval")
    refuse(ns.eval_iters < -1, f"--eval-iters is {ns.eval_iters}, but must not be negative; 0 or -1 evaluates nothing")
    refuse(ns.clip_grad < 0, f"--clip-grad is {ns.clip_grad}, but must not be negative; 0 clips nothing")
    for name in ("hidden_dropout", "attention_dropout"):
        value = getattr(ns, name)
        refuse(not 0 <= value < 1, f"{flag_name(name)} is {value}, but must be in 0 <= x < 1")
    refuse(
        ns.recompute_granularity == "selective" and ns.recompute_method is not None,
        f"--recompute-method {ns.recompute_method} is only for --recompute-granularity full; leave it out",
    )
    refuse(
        "mlp" in (ns.recompute_modules or ()) and ns.add_bias_linear,
        "--recompute-modules mlp hangs with biases in megatron-core 0.16.1; add --disable-bias-linear",
    )
    refuse(
        ns.recompute_granularity == "full" and ns.recompute_method is None,
        "--recompute-granularity full needs --recompute-method uniform or block",
    )
    refuse(
        ns.recompute_granularity == "full" and ns.recompute_num_layers is None,
        "--recompute-granularity full needs --recompute-num-layers, as in --recompute-num-layers 1",
    )


def check_checkpoint(ns: Namespace) -> None:
    """Check the flags of saving and loading checkpoints."""
    refuse(
        ns.save is not None and ns.save_interval is None,
        f"--save {ns.save} needs --save-interval, the steps between checkpoints, as in --save-interval 1000, or auto",
    )
    refuse(
        isinstance(ns.save_interval, int) and ns.save_interval < 1,
        f"--save-interval is {ns.save_interval}, but must be at least 1",
    )
    after, hours = ns.spare_restart_after, ns.spare_mtbf_gpu_hours
    refuse(after is not None and after < 0, f"--spare-restart-after is {after}, but must be at least 0; 0 means never")
    refuse(bool(after) and ns.save is None, f"--spare-restart-after {after} needs --save, from which the job restarts")
    refuse(
        hours is not None and not 0 < hours < float("inf"),
        f"--spare-mtbf-gpu-hours is {hours}, but must be a finite number above 0",
    )
    for name in ("save_retain_interval", "spare_keep_checkpoints"):
        at_least(ns, 1, name)
        value = getattr(ns, name)
        needs = "needs --save, the directory of the checkpoints"
        refuse(value is not None and ns.save is None, f"{flag_name(name)} {value} {needs}")
    refuse(
        ns.async_save and ns.spare_no_async_save,
        "--async-save and --spare-no-async-save contradict each other; leave one of them out",
    )
    refuse(
        not ns.perform_initialization and ns.load is None,
        "--no-initialization leaves the weights undefined; give --load with it or leave it out",
    )
    refuse(
        ns.exit_on_missing_checkpoint and ns.load is None,
        "--exit-on-missing-checkpoint needs --load, the directory where the checkpoint must be",
    )
    refuse(
        ns.ckpt_step is not None and ns.load is None,
        f"--ckpt-step {ns.ckpt_step} needs --load, the directory of the checkpoints",
    )


def check_data(ns: Namespace) -> None:
    """Check that flags name at most one source of data (a script's own provider needs none), and the tokenizer's."""
    per_split = [ns.train_data_path, ns.valid_data_path, ns.test_data_path]
    sources = {
        "--mock-data": ns.mock_data,
        "--data-path": ns.data_path is not None or ns.data_args_path is not None,
        "--train-data-path (or --valid-, --test-)": any(path is not None for path in per_split),
        "--per-split-data-args-path": ns.per_split_data_args_path is not None,
    }
    given = [name for name, there in sources.items() if there]
    refuse(len(given) > 1, " and ".join(given) + " are different sources of data; give one of them")
    refuse(ns.num_workers < 0, f"--num-workers is {ns.num_workers}, but must not be negative")
    refuse(ns.num_dataset_builder_threads < 1, "--num-dataset-builder-threads must be at least 1")
    refuse(
        ns.tokenizer_type is None,
        "--tokenizer-type is missing; give it, as in --tokenizer-type SentencePieceTokenizer --tokenizer-model FILE",
    )
    refuse(
        ns.tokenizer_type == "NullTokenizer" and ns.vocab_size is None,
        "--tokenizer-type NullTokenizer needs --vocab-size, the number of token ids in the data",
    )
    at_least(ns, 1, "vocab_size", "make_vocab_size_divisible_by")


def check_telemetry(ns: Namespace) -> None:
    """Check what is sent to OpenTelemetry."""
    span_groups(ns.otel_span_groups or "default")
    given = [name for name in ("otel_service_name", "otel_span_groups") if getattr(ns, name) is not None]
    refuse(
        given and not ns.otel_enabled,
        f"--{''.join(given[:1]).replace('_', '-')} does nothing without --otel-enabled; add it, or leave it out",
    )


def check_adoption(ns: Namespace) -> None:
    """Check how groups open the data of shards that they did not host."""
    command, limit_s = ns.spare_stage_command, ns.spare_adopt_timeout_s
    refuse(
        command is not None and "{shard}" not in command,
        f"--spare-stage-command {command!r} does not say which shard; write {{shard}} where its number is to stand, as "
        "in 'rsync -a store:/data/{shard}/ /scratch/{shard}/'",
    )
    refuse(
        command is not None and ns.spare_data == "shared",
        f"--spare-stage-command {command!r} brings data to hosts, but with --spare-data shared every group can read "
        "all data; leave one of them out",
    )
    refuse(limit_s <= 0, f"--spare-adopt-timeout-s is {limit_s:g}, but must be above 0")


def check_operation(ns: Namespace) -> None:
    """Check the flags that the launcher carries out; it asks before it starts a rank."""
    refuse(
        ns.spare_max_group_restarts < 0,
        f"--spare-max-group-restarts is {ns.spare_max_group_restarts}, but must not be negative",
    )
    refuse(
        ns.spare_on_event is not None and not ns.spare_on_event.strip(),
        "--spare-on-event is empty; give a command, as in --spare-on-event 'cat >> events.jsonl', or leave it out",
    )
    check = ns.spare_health_check
    refuse(
        check is not None and not check.strip(),
        "--spare-health-check is empty; give a command, as in --spare-health-check 'nvidia-smi', or leave it out",
    )
    refuse(
        check is not None and ns.spare_max_group_restarts == 0,
        f"--spare-health-check {check!r} is made before a group is started again, but --spare-max-group-restarts is 0; "
        "leave one of them out",
    )
    refuse(
        ns.spare_group_restart_pause_s < 0,
        f"--spare-group-restart-pause-s is {ns.spare_group_restart_pause_s:g}, but must not be negative",
    )
    count = ns.spare_standby_groups
    refuse(count < 0, f"--spare-standby-groups is {count}, but must not be negative")
    refuse(
        count > 0 and ns.spare_max_group_restarts == 0,
        f"--spare-standby-groups {count} is for groups that come back, but --spare-max-group-restarts is 0; "
        "leave one of them out",
    )


def check_shapes(ns: Namespace, shape: JobShape) -> None:
    """Check what groups need to come back with fewer pipeline stages."""
    cut = row_cut_of(ns)
    if not cut.shapes:
        return
    reasons = {
        f"--spare-reduce {ns.spare_reduce} sums in floating point, whose bits depend on the split": not str(
            ns.spare_reduce
        ).startswith("exact"),
        "with --spare-state-redundancy below the number of groups no group has a whole state": (
            ns.spare_state_redundancy not in (None, shape.num_groups)
        ),
        "context-parallel ranks have not been tried in it": shape.context > 1,
        "with --use-distributed-optimizer the part of the state that an inner rank keeps depends on the stages": (
            ns.use_distributed_optimizer and shape.inner_data > 1
        ),
        "--use-tp-pp-dp-mapping numbers a group's ranks in another order": (
            ns.use_tp_pp_dp_mapping and shape.inner_data > 1
        ),
        "layers of --hybrid-layer-pattern that are written out by stages cannot be put together": (
            "|" in (ns.hybrid_layer_pattern or "")
        ),
        "layers of multi-token prediction (--mtp-num-layers) have embeddings of their own": bool(ns.mtp_num_layers),
        "standbys have the home shape: leave --spare-standby-groups out": ns.spare_standby_groups > 0,
        "only groups that are started again come back: give --spare-max-group-restarts": (
            ns.spare_max_group_restarts == 0
        ),
    }
    for reason, holds in reasons.items():
        refuse(holds, f"--spare-shapes {ns.spare_shapes}: {reason}; or leave --spare-shapes out")
    if ns.overlap_grad_reduce and not cut.is_home:
        ns.spare_notes += (
            f"--overlap-grad-reduce has no effect with --spare-shapes {ns.spare_shapes}, which cuts the stages of the "
            "home shape: ranks with parts of several smaller stages sum them after the backward pass; auto would not",
        )


def check_spare(ns: Namespace, shape: JobShape) -> None:
    """Check the flags of this framework."""
    check_shapes(ns, shape)
    groups, redundancy = shape.num_groups, ns.spare_redundancy
    refuse(
        redundancy is not None and not 1 <= redundancy <= groups,
        f"--spare-redundancy {redundancy} is not between 1 and the {groups} groups of the job; "
        f"use --spare-redundancy {min(max(redundancy or 1, 1), groups)} or more groups",
    )
    refuse(
        ns.spare_min_groups is not None and not 1 <= ns.spare_min_groups <= groups,
        f"--spare-min-groups {ns.spare_min_groups} is not between 1 and the {groups} groups of the job",
    )
    check_operation(ns)
    check_telemetry(ns)
    check_adoption(ns)
    refuse(
        ns.fp8 is not None and ns.spare_reduce.startswith("exact"),
        f"--spare-reduce {ns.spare_reduce} does not go with --fp8-format {ns.fp8}: fp8 scales depend on which "
        "microbatches a group ran, so sums change when microbatches move; use --spare-reduce fp32",
    )
    _check_audits(ns, groups)
    refuse(
        ns.spare_relief and ns.spare_schedule != "tickets",
        f"--spare-relief takes back what is not begun, and --spare-schedule {ns.spare_schedule} begins all at once; "
        "add --spare-schedule tickets",
    )
    refuse(
        ns.spare_relief and ns.spare_granularity == "shard",
        "--spare-relief moves single pieces, and with --spare-granularity shard only whole shards move; leave one of "
        "them out",
    )
    refuse(
        ns.check_weight_hash_across_dp_replicas_interval is not None and not ns.spare_reduce.startswith("exact"),
        "--check-weight-hash-across-dp-replicas-interval needs sums that are the same everywhere, which --spare-reduce "
        f"{ns.spare_reduce} does not promise; use --spare-reduce exact",
    )
    timeouts_from(ns.spare_heartbeat_timeout_s, ns.spare_progress_timeout_s)
    if ns.spare_transfer_rate is not None:
        rate_of("--spare-transfer-rate", ns.spare_transfer_rate)


def _check_audits(ns: Namespace, groups: int) -> None:
    """Check the flags of audits: gradients of a piece can be compared only in exact modes, where they are equal bit for
    bit, and only where two groups host the piece."""
    rate, redundancy = ns.spare_audit_rate, ns.spare_redundancy or min(2, groups)
    refuse(
        not 0 <= rate <= 1, f"--spare-audit-rate is {rate}, but must be in 0 <= x <= 1, as in --spare-audit-rate 0.01"
    )
    refuse(
        rate and not ns.spare_reduce.startswith("exact"),
        f"--spare-audit-rate {rate} compares checksums, which the sums of --spare-reduce {ns.spare_reduce} do not "
        "have; use --spare-reduce exact or exact32",
    )
    refuse(
        rate and redundancy < 2,
        f"--spare-audit-rate {rate} needs a second group with each piece's data, but --spare-redundancy is "
        f"{redundancy}; use 3, with which a third group decides who is wrong, or 2, with which the job then stops",
    )


def check_all(ns: Namespace, shape: JobShape) -> None:
    """Check every rule; ConfigError for the first that does not hold."""
    check_model(ns)
    check_hybrid(ns)
    check_predicted(ns)
    check_experts(ns)
    check_training(ns)
    check_optimizer(ns, shape)
    check_evaluation(ns)
    check_checkpoint(ns)
    check_data(ns)
    check_spare(ns, shape)
    check_state_redundancy(ns, shape)
