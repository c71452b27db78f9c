"""Flags of Megatron-LM that are taken and change nothing here, each with the reason that makes this safe.

Two kinds. ``ALWAYS_SO``: what the flag asks for holds whether it is given or not. ``TIME_ONLY``: the flag asks for
another way to the same result (a schedule of communication, a cache, a writer); this framework has its own, so time or
memory may differ from Megatron's, but results do not. A job prints each given flag of these once and ``--spare-check``
lists them: none is ignored silently. The namespace has their values, because users' own code reads them.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Iterator

from spare_megatron.config.flags import flag_name

ALWAYS_SO: dict[str, str] = {
    "--use-mcore-models": "models are megatron-core's",
    "--use-flash-attn": "megatron-core's models choose their kernel by --attention-backend, which by itself takes the "
    "fastest one that is there",
    "--use-dist-ckpt": "checkpoints have megatron-core's distributed format",
    "--auto-detect-ckpt-format": "there is one format of checkpoints",
    "--verify-integrity": "each file of a checkpoint has its checksum in the manifest, and all are verified before the "
    "checkpoint is loaded; one that Megatron-LM wrote has no manifest and is not",
    "--no-save-tokenizer-assets": "files of the tokenizer are not copied into checkpoints",
    "--disable-save-tokenizer-assets": "files of the tokenizer are not copied into checkpoints",
    "--ckpt-fully-parallel-save": "the ranks of a group write in parallel",
    "--dist-ckpt-optim-fully-reshardable": "optimizer state is always written so that any layout can read it",
    "--accumulate-allreduce-grads-in-fp32": "gradients are accumulated in fp32 or better",
    "--ddp-param-name-patterns-for-fp32-local-accumulation": "gradients are accumulated in fp32 or better",
    "--no-gradient-accumulation-fusion": "the fused accumulation is off: pieces are counted one by one",
    "--disable-gloo-process-groups": "megatron-core's extra gloo groups are not made",
    "--no-async-tensor-model-parallel-allreduce": "the flag has no effect in megatron-core any more",
    "--disable-async-tensor-model-parallel-allreduce": "the flag has no effect in megatron-core any more",
    "--exit-signal-handler": "SIGTERM always saves and leaves",
    "--exit-signal-handler-for-dataloader": "data is read by threads, which leave with their rank",
    "--no-barrier-with-level-1-timing": "timers never wait for other ranks",
    "--legacy-tokenizer": "megatron-core's tokenizer of the same name gives the same token ids",
    "--check-weight-hash-across-dp-replicas-interval": "the groups' weights are compared with every vote of exact sums",
    "--no-one-logger": "one-logger is not used",
    "--disable-msc": "the multi-storage client is not used",
    "--no-save-rng": "random numbers follow from seed, step and piece, so their state is not saved",
    "--no-load-rng": "random numbers follow from seed, step and piece, so their state is not loaded",
    "--te-rng-tracker": "random numbers follow from seed, step and piece, whatever class keeps their states",
    "--tokenizer-hf-no-use-fast": "the fast implementation is used only with --tokenizer-hf-use-fast",
    "--tokenizer-hf-no-include-special-tokens": "special tokens are added only with "
    "--tokenizer-hf-include-special-tokens",
    "--pytorch-profiler-collect-shapes": "torch's profiler always records the shapes of tensors",
    "--no-use-layer-wise-param-layout": "the optimizer is not split by layers",
    "--yarn-correction-range-round-to-int": "it is rounded without --no-yarn-correction-range-round-to-int",
    "--local-rank": "the place of a rank comes from its environment",
}

_ALLTOALL = (
    "tokens go to their experts by megatron-core's alltoall dispatcher, which computes the same; DeepEP, HybridEP and "
    "NCCL EP have buffers that would have to outlive a lost group"
)
# (reason, flags)
_TIME_ONLY: tuple[tuple[str, str], ...] = (
    (
        "gradients are summed over groups by our own replica communicators, in their own buckets",
        "--no-align-grad-reduce --disable-align-grad-reduce --ddp-num-buckets --ddp-bucket-size "
        "--ddp-pad-buckets-for-high-nccl-busbw --ddp-reduce-scatter-with-fp32-accumulation "
        "--ddp-average-in-collective --no-gradient-reduce-div-fusion --use-nccl-ub --disable-symmetric-registration",
    ),
    (
        "parameters are gathered inside a group when the update is applied, before the next step's forward pass",
        "--overlap-param-gather --overlap-param-gather-with-optimizer-step --no-align-param-gather",
    ),
    (
        "FSDP saves memory by dividing weights and gradients over data-parallel ranks; here they are whole on each of "
        "these, and --use-distributed-optimizer divides the optimizer state over the inner data ranks of a group",
        "--use-megatron-fsdp --data-parallel-sharding-strategy --outer-dp-sharding-strategy --fsdp-double-buffer "
        "--suggested-communication-unit-size --use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward "
        "--fsdp-manual-registration --megatron-fsdp-version --megatron-fsdp-enable-fine-grained-param-gather "
        "--megatron-fsdp-max-pool-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail",
    ),
    (
        "a checkpoint of --ckpt-format fsdp_dtensor is converted before it is loaded, and a conversion loses no weight",
        "--no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load",
    ),
    (
        "the optimizer's weights and moments are kept, and gradients are summed, in fp32 or better, which takes 2 "
        "bytes a parameter more for each of them that Megatron would keep in 16 bits",
        "--grad-reduce-in-bf16 --use-precision-aware-optimizer --main-grads-dtype --main-params-dtype "
        "--exp-avg-dtype --exp-avg-sq-dtype --megatron-fsdp-main-params-dtype --megatron-fsdp-main-grads-dtype "
        "--megatron-fsdp-grad-comm-dtype",
    ),
    (
        "the optimizer updates on the device, where its fp32 weights and moments stay: 12 bytes a parameter that "
        "Megatron would keep in host memory, divided over inner data ranks with --use-distributed-optimizer",
        "--optimizer-cpu-offload --optimizer-offload-fraction --use-torch-optimizer-for-cpu-offload "
        "--overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params",
    ),
    ("Newton-Schulz iterations multiply with torch's own kernels", "--muon-use-syrk"),
    (
        "weights are built on their device, each group its own, with the values that Megatron's seed gives them",
        "--init-model-with-meta-device",
    ),
    (
        "gathered mxfp8 weights have memory of their own beside the gradients, which exact sums keep to the end of a "
        "step",
        "--reuse-grad-buf-for-mxfp8-param-ag",
    ),
    ("the routers' figures are logged as the sum or mean over layers, not layer by layer", "--moe-per-layer-logging"),
    ("communicators' streams have the usual priority", "--high-priority-stream-groups"),
    (
        "a gradient that is finite is not judged by its size, of which Megatron would only warn; faults are found by "
        "the votes' digests and the sums' checksums",
        "--check-for-large-grads",
    ),
    ("energy meters are not read: the log has no such figure", "--log-energy"),
    (
        _ALLTOALL,
        "--moe-enable-deepep --moe-flex-dispatcher-backend --moe-flex-dispatcher-num-sms --moe-deepep-num-sms "
        "--moe-hybridep-num-sms --moe-hybridep-num-sms-preprocessing --moe-hybridep-num-blocks-permute "
        "--moe-hybridep-num-blocks-unpermute --moe-hybridep-pad-uneven-dispatch-inputs "
        "--moe-permute-fusion-into-hybridep --moe-ncclep-static-shape --moe-ncclep-zero-copy",
    ),
    (
        "kernels are launched one by one, with the results of a captured graph; a graph fixes the number of "
        "microbatches, which changes here when a group is lost",
        "--enable-cuda-graph --external-cuda-graph --cuda-graph-impl --cuda-graph-modules --cuda-graph-scope "
        "--cuda-graph-warmup-steps --optimizer-cuda-graph",
    ),
    (
        "a microbatch is computed by itself, because each gradient is counted when its backward pass is over: neither "
        "the experts' communication nor their weight gradients run beside another microbatch",
        "--overlap-moe-expert-parallel-comm --delay-wgrad-compute --ep-overlap-early-attn-memory-release "
        "--overlap-dispatch-backward-with-experts-wgrad --high-priority-a2a-comm-stream",
    ),
    (
        "checkpoints are written by this framework's own writer, in the background without --spare-no-async-save",
        "--async-strategy --async-ckpt-cpu-priority --async-ckpt-io-priority --async-ckpt-use-cpu-shm "
        "--dist-ckpt-workers",
    ),
    (
        "tensor-parallel communication is not overlapped by transformer-engine's user buffers",
        "--tp-comm-overlap --no-tp-comm-bulk-wgrad --disable-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad "
        "--disable-tp-comm-bulk-dgrad --no-tp-comm-overlap-ag --disable-tp-comm-overlap-ag --no-tp-comm-overlap-rs "
        "--disable-tp-comm-overlap-rs --tp-comm-overlap-rs-dgrad --no-tp-comm-split-ag --disable-tp-comm-split-ag "
        "--no-tp-comm-split-rs --disable-tp-comm-split-rs --tp-comm-bootstrap-backend --tp-comm-overlap-cfg",
    ),
    (
        "the embedding's weight gradients are computed with their microbatch, not after the pipeline's flush",
        "--defer-embedding-wgrad-compute --wgrad-deferral-limit",
    ),
    (
        "the grouping of microbatches and the overlap of sends follow from a step's load, which changes with the live "
        "groups",
        "--microbatch-group-size-per-virtual-pipeline-stage --overlap-p2p-communication-warmup-flush "
        "--no-scatter-gather-tensors-in-pipeline",
    ),
    (
        "each rank of a group reads and writes its own part of a checkpoint",
        "--no-ckpt-fully-parallel-save --disable-ckpt-fully-parallel-save --ckpt-fully-parallel-load "
        "--ckpt-fully-parallel-load-exchange-algo --ckpt-fully-parallel-load-per-rank-objects "
        "--ckpt-fully-parallel-load-process-group --ckpt-fully-parallel-save-process-group "
        "--ckpt-pg-tensors-cache-path --ckpt-pg-tensors-cache-create --no-ckpt-load-validate-sharding-integrity "
        "--disable-ckpt-load-validate-sharding-integrity --ckpt-assume-constant-structure --no-stream-ckpt-dequant "
        "--disable-stream-ckpt-dequant --use-persistent-ckpt-worker --distrib-optim-fully-reshardable-mem-efficient",
    ),
)
TIME_ONLY: dict[str, str] = {name: reason for reason, names in _TIME_ONLY for name in names.split()}

_FORMAT = (
    "checkpoints are written in megatron-core's distributed format, which Megatron-LM reads with --ckpt-format "
    "torch_dist; one of another format in --load is refused with what makes it loadable"
)
# (destination, value) -> reason
VALUES: dict[tuple[str, object], str] = {
    ("ckpt_format", "torch"): _FORMAT,
    ("ckpt_format", "torch_dcp"): _FORMAT,
    ("ckpt_format", "fsdp_dtensor"): _FORMAT
    + "; for Megatron's FSDP its own tools/checkpoint/checkpoint_inspector.py convert-torch-dist-to-fsdp-dtensor "
    "converts back",
    ("moe_token_dispatcher_type", "flex"): _ALLTOALL,
    ("rerun_mode", "validate_results"): "results that are not finite end the job as they do in Megatron, without the "
    "second computation; faults are found by the votes' digests and the sums' checksums",
}


@functools.cache
def taken() -> dict[str, str]:
    """Flag of either kind -> why it changes nothing here."""
    return {**ALWAYS_SO, **TIME_ONLY}


def notes(names: list[str], ns: Namespace) -> Iterator[str]:
    """One sentence for each reason, with the flags given (``names``) that it concerns."""
    by_reason: dict[str, list[str]] = {}
    for name in names:
        by_reason.setdefault(taken()[name], []).append(name)
    for (dest, value), reason in VALUES.items():
        if getattr(ns, dest) == value:
            by_reason.setdefault(reason, []).append(f"{flag_name(dest)} {value}")
    for reason, reported in by_reason.items():
        yield f"{' and '.join(dict.fromkeys(reported))}: {reason}"
