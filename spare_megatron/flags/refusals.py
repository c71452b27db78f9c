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
    "inference": ("inference is not part of this framework", ""),
    "one logger": ("NVIDIA's one-logger is not part of this framework", "use --wandb-project or --tensorboard-dir"),
    "In-process restart": (
        "survivors go on without a restart, so no process is restarted in place",
        "--spare-max-group-restarts",
    ),
    "ft_package": ("NVIDIA's ft_package is replaced by our own detection", "--spare-heartbeat-timeout-s"),
    "sft": ("supervised fine-tuning data is not supported", "make ordinary data files with tools/preprocess_data.py"),
    "rerun engine": ("a suspicious step is not computed again in this version", "spare-launch --inject makes faults"),
}

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
        "each piece's backward must be complete before the next piece's gradient is counted",
        "leave it out",
        (
            "overlap-moe-expert-parallel-comm",
            "delay-wgrad-compute",
            "ep-overlap-early-attn-memory-release",
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
        "CUDA graphs fix the number of microbatches, which changes here when a group is lost",
        "leave it out",
        (
            "enable-cuda-graph",
            "cuda-graph-warmup-steps",
            "external-cuda-graph",
            "cuda-graph-impl",
            "te-rng-tracker",
            "moe-pad-experts-for-cuda-graph-inference",
        ),
    ),
    (
        "multi-token prediction is not supported",
        "leave it out",
        ("mtp-num-layers", "mtp-loss-scaling-factor", "mtp-standalone"),
    ),
    (
        "offloading to host memory is not supported",
        "use --recompute-granularity",
        (
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
        "sparse attention and other experiments of megatron-core are not supported",
        "use --experimental-attention-variant gated_delta_net or leave it out",
        (
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
        "relative position embeddings are not supported",
        "use --position-embedding-type rope",
        ("relative-attention-num-buckets", "relative-attention-max-distance"),
    ),
    (
        "routing replay, DeepEP and upcycling are not supported",
        "use --moe-token-dispatcher-type alltoall",
        (
            "moe-enable-routing-replay",
            "moe-enable-deepep",
            "moe-flex-dispatcher-backend",
            "moe-deepep-num-sms",
            "moe-hybridep-num-sms",
            "moe-use-upcycling",
            "moe-upcycling-granularity",
            "moe-per-layer-logging",
        ),
    ),
    (
        "the Muon optimizer is not supported",
        "use --optimizer adam",
        (
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
    ("the job leaves on SIGTERM and SIGUSR1 only", "send SIGTERM", ("exit-signal",)),
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
        "each evaluation takes --eval-iters batches of one validation set",
        "use --eval-iters",
        ("full-validation", "multiple-validation-sets"),
    ),
    (
        "only whole checkpoints in megatron-core's distributed format are written and read",
        "use --save, --load and --save-interval",
        (
            "save-wgrads-interval",
            "save-dgrads-interval",
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
        "the index of data files is always read whole, from a file system",
        "leave it out",
        (
            "per-dataset-sequences-path",
            "dataloader-fast-cache-load",
            "dataloader-defer-npy-index-mmap",
            "object-storage-cache-path",
        ),
    ),
    (
        "fill-in-the-middle data is not supported",
        "leave it out",
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
)

# (destination, value) -> (reason, nearest choice)
VALUES: dict[tuple[str, object], tuple[str, str]] = {
    ("optimizer", "muon"): ("the Muon optimizer is not supported", "use --optimizer adam"),
    ("optimizer", "dist_muon"): ("the Muon optimizer is not supported", "use --optimizer adam"),
    ("dataloader_type", "external"): (
        "a shard's samples must be found again after a failure, which needs a data set with an index",
        "use --dataloader-type single or cyclic",
    ),
    ("transformer_impl", "inference_optimized"): ("inference is not part of this framework", "use local"),
    ("moe_token_dispatcher_type", "flex"): ("DeepEP is not supported", "use alltoall or allgather"),
    ("experimental_attention_variant", "dsa"): ("sparse attention is not supported", "use gated_delta_net"),
    ("position_embedding_type", "mrope"): ("only language models are trained here", "use rope"),
    ("position_embedding_type", "relative"): ("only decoder-only language models are trained here", "use rope"),
    ("rerun_mode", "report_stats"): (
        "a suspicious step is not computed again in this version",
        "leave it out or use disabled",
    ),
    ("ckpt_format", "torch"): ("only megatron-core's distributed format is written and read", "use torch_dist"),
    ("ckpt_format", "torch_dcp"): ("it is for FSDP", "use torch_dist"),
    ("ckpt_format", "fsdp_dtensor"): ("it is for FSDP", "use torch_dist"),
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
