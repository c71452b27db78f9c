"""Flags of Megatron-LM that this framework does not honour, each with the reason and the nearest choice.

A flag is never ignored: it is honoured, refused here, or listed in :mod:`no_effect` with the reason why it changes
nothing. A test checks that every flag of ``megatron_lm.json`` is exactly one of the three.
The module is longer than others because it is one table.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from spare_megatron.flags.no_effect import taken
from spare_megatron.flags.specs import SECTIONS, megatron_table, specs_of

GROUPS: dict[str, tuple[str, str]] = {
    # group of Megatron-LM's --help -> (reason, nearest choice)
    "rl": ("reinforcement learning is not part of this framework", ""),
    "autoresume": ("ADLR's autoresume is not part of this framework", "SIGTERM saves and leaves with exit code 4"),
    "biencoder": ("only decoder-only language models are trained here", ""),
    "vision": ("only decoder-only language models are trained here", ""),
    "heterogeneous architecture": ("layers of different shape are not supported", ""),
    "straggler": ("Megatron's straggler detector needs one world of all ranks", "see step_time_s in metrics.jsonl"),
    "workload inspector": ("the workload inspector is not part of this framework", ""),
    "inference": ("inference is not part of this framework", "load the checkpoint with Megatron-LM"),
    "one logger": ("NVIDIA's one-logger is not part of this framework", "use --wandb-project or --tensorboard-dir"),
    "In-process restart": (
        "survivors go on without a restart, so no process is restarted in place",
        "--spare-max-group-restarts",
    ),
    "ft_package": ("NVIDIA's ft_package is replaced by our own detection", "--spare-heartbeat-timeout-s"),
    "sft": ("supervised fine-tuning data is not supported", "make ordinary data files with tools/preprocess_data.py"),
    "rerun engine": ("a suspicious step is not computed again in this version", "spare-launch --inject makes faults"),
    "fault injector": ("NVIDIA's fault injector is not part of this framework", "spare-launch --inject makes faults"),
    "opentelemetry": ("no spans are sent to OpenTelemetry", "spare-page serves /metrics, spare-timeline makes a trace"),
    "Logits Distillation": (
        "distillation needs a teacher's logits beside each sample, which must move with a piece when a group is lost",
        "leave it out",
    ),
    "ModelOpt": (
        "distillation and quantization with NVIDIA ModelOpt need its own model, loss and checkpoints",
        "train without it and give the checkpoint to ModelOpt afterwards",
    ),
    "kitchen": ("quantization recipes beyond megatron-core's own fp8 are not supported", "use --fp8-format or --bf16"),
}

_MUON = (
    "Muon, Lion and SOAP need the package emerging-optimizers, and a state that checkpoints and returning groups know",
    "use --optimizer adam",
)
FLAGS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    # (reason, nearest choice, flags without their dashes)
    (
        "a job's process groups are formed group by group, not by Megatron's world-wide start-up",
        "leave it out",
        (
            "pipeline-model-parallel-comm-backend",
            "distributed-timeout-seconds-after-init",
            "high-priority-stream-groups",
            "lazy-mpu-init",
            "use-sharp",
            "sharp-enabled-group",
            "create-all-gather-group",
            "nccl-communicator-config-path",
            "fake-process-group",
        ),
    ),
    (
        "packed or hierarchical context parallelism is not supported",
        "use --context-parallel-size alone",
        ("max-seqlen-per-dp-cp-rank", "hybrid-context-parallel"),
    ),
    (
        "weights that are gathered for each layer need process groups beside those that a group forms",
        "use --tensor-model-parallel-size",
        (
            "tensor-parallel-num-weight-shards",
            "expert-tensor-parallel-num-weight-shards",
            "gtp-remat-opt-in-modules",
            "gtp-remat-reduce-scatter-with-fp32-accumulation",
            "gtp-remat-nccl-ub",
            "gtp-expert-remat-nccl-ub",
        ),
    ),
    (
        "weights are built on their device and are not sharded over groups",
        "use --use-distributed-optimizer or --recompute-activations to save memory",
        (
            "keep-fp8-transpose-cache",
            "enable-full-sharding-in-hsdp",
            "init-model-with-meta-device",
        ),
    ),
    (
        "quantization recipes beyond megatron-core's own fp8 are not supported",
        "use --fp8-format or --bf16",
        (
            "fp8-quantizer-factory",
            "fp4-format",
            "fp4-recipe",
            "fp4-param-gather",
            "fp4-quantizer-factory",
            "reuse-grad-buf-for-mxfp8-param-ag",
            "te-precision-config-file",
            "use-kitchen-attention",
            "kitchen-attention-backend",
        ),
    ),
    (
        "multi-token prediction needs the tokens and the embedding on the last pipeline stage too, where only labels "
        "are read here, and its losses in the log",
        "leave it out",
        (
            "mtp-num-layers",
            "mtp-loss-scaling-factor",
            "mtp-standalone",
            "mtp-use-repeated-layer",
            "mtp-detach-heads",
            "mtp-hsm",
            "mtp-hybrid-override-pattern",
        ),
    ),
    (
        "offloading to host memory would have to survive a pipeline that stops in the middle of a step, which nothing "
        "has shown",
        "use --recompute-granularity",
        (
            "cpu-offloading-retain-pinned-cpu-buffers",
            "delay-offload-until-cuda-graph",
            "delta-offload-bytes-across-pp-ranks",
            "activation-offload-fraction",
            "fine-grained-offloading-max-inflight-offloads",
            "moe-paged-stash",
            "moe-paged-stash-page-size",
            "moe-paged-stash-buffer-size-factor-cuda",
            "moe-paged-stash-buffer-size-factor-cpu",
            "cpu-offloading-num-layers",
            "fine-grained-activation-offloading",
            "offload-modules",
            "min-offloaded-tensor-size",
            "optimizer-cpu-offload",
            "optimizer-offload-fraction",
            "use-torch-optimizer-for-cpu-offload",
            "overlap-cpu-optimizer-d2h-h2d",
            "no-pin-cpu-grads",
            "no-pin-cpu-params",
        ),
    ),
    (
        "QK clipping needs the largest attention logit of all groups in each step",
        "use --qk-layernorm",
        ("qk-clip", "qk-clip-alpha", "qk-clip-threshold", "log-max-attention-logit"),
    ),
    (
        "sparse attention needs its indexer's loss in the schedule and a run on GPUs that shows it right; other "
        "experiments of megatron-core are not supported",
        "use --experimental-attention-variant gated_delta_net or leave it out",
        (
            "dsa-indexer-topk-freq",
            "dsa-indexer-skip-topk-offset",
            "dsa-kernel-backend",
            "dsa-indexer-rope-interleaved",
            "no-dsa-indexer-rotate-activation",
            "disable-dsa-indexer-rotate-activation",
            "no-dsa-indexer-scoring-relu",
            "disable-dsa-indexer-scoring-relu",
            "dsa-indexer-k-norm-epsilon",
            "dsa-indexer-k-norm-fp32",
            "enable-mhc-connections",
            "mhc-num-residual-streams",
            "mhc-sinkhorn-iterations",
            "mhc-init-gating-factor",
            "mhc-recompute-layer-num",
            "gdp-num-householder",
            "gdp-cutedsl-kernel",
            "gdp-num-chunk-states-to-recompute",
            "output-logit-dtype",
            "dsa-indexer-n-heads",
            "dsa-indexer-head-dim",
            "dsa-indexer-topk",
            "dsa-indexer-loss-coeff",
            "dsa-indexer-use-sparse-loss",
            "enable-experimental",
        ),
    ),
    (
        "state-space and hybrid models are not supported",
        "",
        (
            "is-hybrid-model",
            "mamba-state-dim",
            "mamba-head-dim",
            "mamba-num-groups",
            "mamba-num-heads",
            "disable-mamba-mem-eff-path",
            "hybrid-attention-ratio",
            "hybrid-mlp-ratio",
            "hybrid-override-pattern",
            "hybrid-layer-pattern",
            "mamba-training-ssm-states-dtype",
        ),
    ),
    (
        "it is for inference, which is not part of this framework",
        "",
        (
            "flash-decode",
            "inference-fuse-tp-communication",
            "symmetric-ar-type",
            "mlp-chunks-for-prefill",
            "batch-invariant-mode",
            "inference-rng-tracker",
            "cache-mla-latents",
            "batch-invariant-backend",
            "inference-cuda-graph-scope",
            "inference-disable-triton-nvls-kernels",
            "inference-grouped-gemm-backend",
            "inference-moe-disable-fused-quant-kernels",
            "inference-moe-token-dispatcher-type",
            "moe-pad-experts-for-cuda-graph-inference",
        ),
    ),
    (
        "only decoder-only language models are trained here",
        "",
        (
            "decoder-num-layers",
            "decoder-seq-length",
            "mrope-section",
            "bert-no-binary-head",
            "sample-rate",
            "mask-prob",
            "short-seq-prob",
        ),
    ),
    (
        "relative and yarn position embeddings are not supported",
        "use --position-embedding-type rope",
        (
            "relative-attention-num-buckets",
            "relative-attention-max-distance",
            "yarn-original-max-position-embeddings",
            "yarn-beta-fast",
            "yarn-beta-slow",
            "yarn-correction-range-round-to-int",
            "no-yarn-correction-range-round-to-int",
        ),
    ),
    (
        "maximal update parametrization needs a learning rate for each kind of weight, and the optimizer is built with "
        "one",
        "give the learning rate that the small model's search says for this width with --lr",
        (
            "use-mup",
            "mup-width-mult",
            "mup-base-hidden-size",
            "mup-embedding-mult",
            "mup-output-mult",
            "mup-base-head-dim",
            "mup-attn-scale-power",
        ),
    ),
    (
        "what a router adds would depend on which microbatches this group computed before",
        "leave it out",
        ("moe-router-quantile-balancing-ema", "moe-router-force-biased"),
    ),
    (
        "it changes how weights lie in memory and in checkpoints, which needs a run on GPUs that shows both right",
        "leave it out",
        (
            "mla-down-proj-fusion",
            "use-grouped-gemm-for-dense-mlp",
            "use-grouped-gemm-for-shared-expert",
            "moe-use-grouped-tensor",
            "moe-single-grouped-weight",
            "moe-single-grouped-bias",
            "moe-mlp-glu-interleave-size",
            "moe-shared-expert-glu-interleave-size",
            "ckpt-drop-redundant-extra-state",
        ),
    ),
    (
        "routing replay, DeepEP, HybridEP, NCCL EP and upcycling are not supported",
        "use --moe-token-dispatcher-type alltoall",
        (
            "moe-permute-fusion-into-hybridep",
            "moe-hybridep-num-blocks-permute",
            "moe-hybridep-num-blocks-unpermute",
            "moe-hybridep-num-sms-preprocessing",
            "moe-hybridep-pad-uneven-dispatch-inputs",
            "moe-flex-dispatcher-num-sms",
            "moe-ncclep-static-shape",
            "moe-ncclep-zero-copy",
            "moe-dispatch-fwd-dtype",
            "moe-combine-bwd-dtype",
            "moe-expert-rank-capacity-factor",
            "moe-enable-routing-replay",
            "moe-enable-deepep",
            "moe-flex-dispatcher-backend",
            "moe-deepep-num-sms",
            "moe-hybridep-num-sms",
            "moe-use-upcycling",
            "moe-upcycling-granularity",
            "moe-per-layer-logging",
            "moe-routing-trace-path",
            "moe-routing-trace-max-training-iters",
            "moe-routing-trace-capture-logits",
            "moe-routing-trace-capture-hidden-states",
            "moe-routing-trace-dump-weights",
        ),
    ),
    (
        *_MUON,
        (
            "muon-nesterov",
            "muon-coefficient-type",
            "muon-use-syrk",
            "muon-scalar-optimizer",
            "lion-beta1",
            "lion-beta2",
            "muon-momentum",
            "muon-no-split-qkv",
            "muon-use-nesterov",
            "muon-scale-mode",
            "muon-fp32-matmul-prec",
            "muon-num-ns-steps",
            "muon-tp-mode",
            "muon-extra-scale-factor",
        ),
    ),
    (
        "optimizer state is kept in fp32",
        "leave it out",
        (
            "use-precision-aware-optimizer",
            "main-grads-dtype",
            "main-params-dtype",
            "exp-avg-dtype",
            "exp-avg-sq-dtype",
            "dump-param-to-param-group-map",
        ),
    ),
    ("pipeline stages send to one another directly", "leave it out", ("use-ring-exchange-p2p",)),
    ("training in phases is not supported", "start a job for each phase", ("phase-transition-iterations",)),
    (
        "a gradient is judged by whether it is finite, not by its size",
        "use --clip-grad",
        ("check-for-large-grads",),
    ),
    ("energy meters are not read", "leave it out", ("log-energy",)),
    (
        "steps that were found bad are not skipped by number",
        "leave it out",
        ("iterations-to-skip", "result-rejected-tracker-filename"),
    ),
    (
        "the training loop of this framework has its own order of steps and collections",
        "leave it out",
        (
            "train-sync-interval",
            "disable-jit-fuser",
            "spec",
        ),
    ),
    (
        "the job leaves on SIGTERM and SIGUSR1 only",
        "send SIGTERM",
        ("exit-signal", "exit-signal-handler-for-training"),
    ),
    (
        "GPUs are not measured against one another while a job trains",
        "give a test of a GPU with --spare-health-check",
        ("gpu-sniff-test-interval",),
    ),
    (
        "what NCCL's flight recorder does follows from environment variables, which are the user's",
        "export TORCH_NCCL_TRACE_BUFFER_SIZE and TORCH_NCCL_DUMP_ON_TIMEOUT before the ranks start",
        (
            "flight-recorder-dump-path",
            "flight-recorder-trace-buffer-size",
            "no-flight-recorder-dump-on-timeout",
            "disable-flight-recorder-dump-on-timeout",
            "flight-recorder-include-stack-trace",
            "no-flight-recorder-include-only-active",
            "disable-flight-recorder-include-only-active",
            "no-flight-recorder-extra-dump-on-exec",
            "disable-flight-recorder-extra-dump-on-exec",
        ),
    ),
    (
        "a profile has no call stacks, NVTX ranges or Chakra traces",
        "use --profile",
        ("pytorch-profiler-collect-callstack", "pytorch-profiler-collect-chakra", "record-shapes", "nvtx-ranges"),
    ),
    (
        "all weights are trained",
        "leave it out",
        ("freeze-all-layers",),
    ),
    ("Megatron-LM itself no longer takes it", "use --micro-batch-size", ("batch-size",)),
    ("Megatron-LM itself no longer takes it", "use --lr-warmup-fraction", ("warmup",)),
    ("Megatron-LM itself no longer takes it", "use --tensor-model-parallel-size", ("model-parallel-size",)),
    ("Megatron-LM itself no longer takes it", "use --recompute-granularity", ("checkpoint-activations",)),
    ("it is deprecated in Megatron-LM", "use --apply-wd-to-qk-layernorm", ("no-weight-decay-cond-type",)),
    ("it has no effect on megatron-core's models", "use --attention-backend flash", ("use-flash-attn",)),
    ("it is for Megatron's older models", "leave it out", ("use-legacy-models", "openai-gelu", "onnx-safe")),
    (
        "all groups must start from the same weights",
        "leave it out",
        ("data-parallel-random-init",),
    ),
    ("training cannot be skipped", "use --train-iters", ("skip-train",)),
    (
        "each evaluation takes --eval-iters batches of one validation set, from the first --eval-interval on",
        "use --eval-iters and --eval-interval",
        ("full-validation", "multiple-validation-sets", "validation-set-names", "start-eval-at-iter"),
    ),
    (
        "only whole checkpoints in megatron-core's distributed format are written and read",
        "use --save, --load and --save-interval",
        (
            "save-wgrads-interval",
            "save-dgrads-interval",
            "save-params-interval",
            "save-activations-interval",
            "save-tokens-per-expert-interval",
            "override-ckpt-iteration",
            "load-main-params-from-ckpt",
            "non-persistent-save-interval",
            "non-persistent-ckpt-type",
            "non-persistent-global-ckpt-dir",
            "non-persistent-local-ckpt-dir",
            "non-persistent-local-ckpt-algo",
            "pretrained-checkpoint",
            "ckpt-convert-format",
            "ckpt-convert-save",
            "ckpt-convert-update-legacy-dist-opt-format",
            "dist-ckpt-save-pre-mcore-014",
            "dist-ckpt-format",
            "replication",
            "replication-jump",
            "replication-factor",
        ),
    ),
    (
        "data files are read from a file system, and their index whole",
        "leave it out",
        (
            "enable-msc",
            "per-dataset-sequences-path",
            "dataloader-fast-cache-load",
            "dataloader-defer-npy-index-mmap",
            "object-storage-cache-path",
        ),
    ),
    (
        "fill-in-the-middle data needs a data set that Megatron-LM has and megatron-core does not",
        "give your own pretrain_gpt.py a train_valid_test_datasets_provider that returns it",
        (
            "fim-data",
            "fim-rate",
            "fim-spm-rate",
            "fim-split-sample",
            "fim-fragment-rate",
            "fim-no-prefix",
            "fim-prefix-token",
            "fim-middle-token",
            "fim-suffix-token",
            "fim-pad-token",
            "fim-eod-token",
        ),
    ),
    ("configurations are written with the checkpoint, not by themselves", "use --save", ("config-logger-dir",)),
    (
        "documents are kept apart by the attention mask, not by packed sequences",
        "use --reset-attention-mask and --reset-position-ids",
        ("dataloader-inter-document-masking",),
    ),
    (
        "the tokenizer's own ids of the end and of padding are used, and its own form of a conversation",
        "make the data with the tokenizer that you want",
        (
            "null-tokenizer-eod-id",
            "null-tokenizer-pad-id",
            "chat-template",
            "use-gigatoken",
            "no-tokenizer-sentencepiece-ignore-extra-whitespaces",
            "disable-tokenizer-sentencepiece-ignore-extra-whitespaces",
        ),
    ),
    (
        "the vocabulary is always padded to what the tensor-parallel ranks can share",
        "use --padded-vocab-size N",
        ("no-pad-vocab-size", "disable-pad-vocab-size"),
    ),
)

# (destination, value) -> (reason, nearest choice)
VALUES: dict[tuple[str, object], tuple[str, str]] = {
    **{("optimizer", name): _MUON for name in ("muon", "dist_muon", "lion", "soap", "adaptive_muon")},
    ("dataloader_type", "external"): (
        "a shard's samples must be found again after a failure, which needs a data set with an index",
        "use --dataloader-type single or cyclic",
    ),
    ("transformer_impl", "inference_optimized"): ("inference is not part of this framework", "use local"),
    ("moe_token_dispatcher_type", "flex"): ("DeepEP is not supported", "use alltoall or allgather"),
    ("moe_router_load_balancing_type", "quantile_balancing"): (
        "what a router adds would depend on which microbatches this group computed before",
        "use aux_loss or seq_aux_loss",
    ),
    ("experimental_attention_variant", "dsa"): (
        "sparse attention needs its indexer's loss in the schedule and a run on GPUs that shows it right",
        "use gated_delta_net",
    ),
    ("position_embedding_type", "mrope"): ("only language models are trained here", "use rope"),
    ("position_embedding_type", "relative"): ("only decoder-only language models are trained here", "use rope"),
    ("position_embedding_type", "yarn"): (
        "yarn's own flags are not handed to megatron-core",
        "use rope, or yarn with --multi-latent-attention --rope-type yarn",
    ),
    ("rerun_mode", "report_stats"): (
        "a suspicious step is not computed again in this version",
        "leave it out or use disabled",
    ),
    ("dist_ckpt_strictness", "return_unexpected"): ("nobody would read what is returned", "use log_unexpected"),
    ("dist_ckpt_strictness", "return_all"): ("nobody would read what is returned", "use log_all"),
    ("tokenizer_type", "BertWordPieceLowerCase"): ("only decoder-only language models are trained here", "use another"),
    ("tokenizer_type", "BertWordPieceCase"): ("only decoder-only language models are trained here", "use another"),
    ("tokenizer_type", "MultimodalTokenizer"): ("only language models are trained here", "use HuggingFaceTokenizer"),
    ("tokenizer_type", "NullMultimodalTokenizer"): ("only language models are trained here", "use NullTokenizer"),
    ("tokenizer_type", "SFTTokenizer"): ("supervised fine-tuning is not supported", "use HuggingFaceTokenizer"),
}


# destination -> (reason, nearest choice): flags whose default holds and whose other values this version cannot honour.
DEFAULT_ONLY: dict[str, tuple[str, str]] = {
    "spare_standby_groups": ("a lost group is not replaced in this version", "start more groups with --num-groups"),
    "spare_standby_ranks": ("a lost rank ends its group in this version", "start more groups with --num-groups"),
    "no_save_optim": ("a checkpoint without optimizer state could not mask a later wipe-out", "leave it out"),
}


@dataclass(frozen=True)
class Refusal:
    """Why a flag is refused, and the nearest choice ('' where there is none)."""

    reason: str
    instead: str

    def sentence(self, *said: str) -> str:
        """The sentence that a user sees. ``said`` are the refused flags, with a value where only that is refused."""
        verb = "is" if len(said) == 1 else "are"
        return f"{' and '.join(said)} {verb} not supported: {self.reason}" + (
            f"; {self.instead}" if self.instead else ""
        )


LINES_MAX = 10


def all_sentences(given: Sequence[tuple[str, Refusal]]) -> str:
    """One line for each reason, with all given flags that it refuses, so that a user sees all of them at once."""
    by_reason: dict[Refusal, list[str]] = {}
    for said, refusal in given:
        by_reason.setdefault(refusal, [])
        if said not in by_reason[refusal]:
            by_reason[refusal].append(said)
    lines = [refusal.sentence(*said) for refusal, said in by_reason.items()]
    left = [word for said in list(by_reason.values())[LINES_MAX:] for word in said]
    return "\n".join(lines[:LINES_MAX] + ([f"and {' '.join(left)} are not supported either"] if left else []))


@functools.cache
def refused_names() -> dict[str, Refusal]:
    """Name of each refused flag -> its refusal."""
    ours = {name for section, (_, cls) in SECTIONS.items() for spec in specs_of(section, cls) for name in spec.names}
    refused = {f"--{name}": Refusal(reason, instead) for reason, instead, names in FLAGS for name in names}
    for row in megatron_table().values():
        for name in row["names"]:
            if row["group"] in GROUPS and name not in ours and name not in taken():
                refused.setdefault(name, Refusal(*GROUPS[row["group"]]))
    return refused
