"""The table of Megatron-LM's flags that are refused: by group of its --help, and flag by flag.

:mod:`refusals` makes sentences of it. The module is longer than others because it is one table.
"""

from __future__ import annotations

GROUPS: dict[str, tuple[str, str]] = {
    # group of Megatron-LM's --help -> (reason, nearest choice)
    "rl": ("reinforcement learning is not part of this framework", ""),
    "autoresume": ("ADLR's autoresume is not part of this framework", "SIGTERM saves and leaves with exit code 4"),
    "biencoder": ("only decoder-only language models are trained here", ""),
    "vision": ("only decoder-only language models are trained here", ""),
    "heterogeneous architecture": (
        "layers of different shape would need a placement of layers by their cost, and converters that know them",
        "give every layer the same shape",
    ),
    "straggler": ("Megatron's straggler detector needs one world of all ranks", "see step_time_s in metrics.jsonl"),
    "workload inspector": ("the workload inspector is not part of this framework", "use spare-page RUN_DIR"),
    "inference": ("inference is not part of this framework", "load the checkpoint with Megatron-LM"),
    "one logger": ("NVIDIA's one-logger is not part of this framework", "use --wandb-project or --tensorboard-dir"),
    "In-process restart": (
        "survivors go on without a restart, so no process is restarted in place",
        "--spare-max-group-restarts",
    ),
    "ft_package": ("NVIDIA's ft_package is replaced by our own detection", "--spare-heartbeat-timeout-s"),
    "sft": (
        "supervised fine-tuning needs a data set of packed conversations, which megatron-core does not have",
        "make ordinary data files with spare-preprocess",
    ),
    "rerun engine": ("a suspicious step is not computed again in this version", "spare-launch --inject makes faults"),
    "fault injector": ("NVIDIA's fault injector is not part of this framework", "spare-launch --inject makes faults"),
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

FLAGS: tuple[tuple[str, str, str], ...] = (
    # (reason, nearest choice, flags)
    (
        "a job's process groups are formed group by group, not by Megatron's world-wide start-up",
        "leave it out",
        "--pipeline-model-parallel-comm-backend --distributed-timeout-seconds-after-init --lazy-mpu-init "
        "--use-sharp --sharp-enabled-group --create-all-gather-group --nccl-communicator-config-path "
        "--fake-process-group",
    ),
    (
        "packed or hierarchical context parallelism needs process groups beside those that a group forms",
        "use --context-parallel-size alone",
        "--max-seqlen-per-dp-cp-rank --hybrid-context-parallel",
    ),
    (
        "weights that are gathered for each layer need process groups beside those that a group forms",
        "use --tensor-model-parallel-size",
        "--tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards --gtp-remat-opt-in-modules "
        "--gtp-remat-reduce-scatter-with-fp32-accumulation --gtp-remat-nccl-ub --gtp-expert-remat-nccl-ub",
    ),
    (
        "weights are built on their device and are not sharded over groups",
        "use --use-distributed-optimizer or --recompute-activations to save memory",
        "--keep-fp8-transpose-cache --enable-full-sharding-in-hsdp",
    ),
    (
        "quantization recipes beyond megatron-core's own fp8 are not supported",
        "use --fp8-format or --bf16",
        "--fp8-quantizer-factory --fp4-format --fp4-recipe --fp4-param-gather --fp4-quantizer-factory "
        "--te-precision-config-file --use-kitchen-attention --kitchen-attention-backend",
    ),
    (
        "layers of multi-token prediction are on the last pipeline stage, where their loss is",
        "leave it out",
        "--mtp-standalone",
    ),
    (
        "hidden states of predicted tokens are mixed only by a megatron-core that is newer than 0.19",
        "leave it out",
        "--mtp-hsm",
    ),
    (
        "offloading to host memory would have to survive a pipeline that stops in the middle of a step, which nothing "
        "has shown",
        "use --recompute-granularity",
        "--cpu-offloading-retain-pinned-cpu-buffers --delay-offload-until-cuda-graph "
        "--delta-offload-bytes-across-pp-ranks --activation-offload-fraction "
        "--fine-grained-offloading-max-inflight-offloads --moe-paged-stash --moe-paged-stash-page-size "
        "--moe-paged-stash-buffer-size-factor-cuda --moe-paged-stash-buffer-size-factor-cpu "
        "--cpu-offloading-num-layers --fine-grained-activation-offloading --offload-modules "
        "--min-offloaded-tensor-size",
    ),
    (
        "QK clipping needs the largest attention logit of all groups in each step",
        "use --qk-layernorm",
        "--qk-clip --qk-clip-alpha --qk-clip-threshold --log-max-attention-logit",
    ),
    (
        "sparse attention needs its indexer's loss in the schedule and a run on GPUs that shows it right",
        "use --experimental-attention-variant gated_delta_net or leave it out",
        "--dsa-indexer-topk-freq --dsa-indexer-skip-topk-offset --dsa-kernel-backend --dsa-indexer-rope-interleaved "
        "--no-dsa-indexer-rotate-activation --disable-dsa-indexer-rotate-activation --no-dsa-indexer-scoring-relu "
        "--disable-dsa-indexer-scoring-relu --dsa-indexer-k-norm-epsilon --dsa-indexer-k-norm-fp32 "
        "--enable-mhc-connections --mhc-num-residual-streams --mhc-sinkhorn-iterations --mhc-init-gating-factor "
        "--mhc-recompute-layer-num --gdp-num-householder --gdp-cutedsl-kernel --gdp-num-chunk-states-to-recompute "
        "--output-logit-dtype --dsa-indexer-n-heads --dsa-indexer-head-dim --dsa-indexer-topk "
        "--dsa-indexer-loss-coeff --dsa-indexer-use-sparse-loss",
    ),
    (
        "the states of Mamba layers have the dtype that megatron-core gives them",
        "leave it out",
        "--mamba-training-ssm-states-dtype",
    ),
    (
        "it is for inference, which is not part of this framework",
        "",
        "--flash-decode --inference-fuse-tp-communication --symmetric-ar-type --mlp-chunks-for-prefill "
        "--batch-invariant-mode --inference-rng-tracker --cache-mla-latents --batch-invariant-backend "
        "--inference-cuda-graph-scope --inference-disable-triton-nvls-kernels --inference-grouped-gemm-backend "
        "--inference-moe-disable-fused-quant-kernels --inference-moe-token-dispatcher-type "
        "--moe-pad-experts-for-cuda-graph-inference",
    ),
    (
        "only decoder-only language models are trained here",
        "",
        "--decoder-num-layers --decoder-seq-length --mrope-section --bert-no-binary-head --sample-rate --mask-prob "
        "--short-seq-prob",
    ),
    (
        "relative position embeddings are those of encoders",
        "use --position-embedding-type rope",
        "--relative-attention-num-buckets --relative-attention-max-distance",
    ),
    (
        "what a router adds would depend on which microbatches this group computed before",
        "leave it out",
        "--moe-router-quantile-balancing-ema --moe-router-force-biased",
    ),
    (
        "it changes how weights lie in memory and in checkpoints, which needs a run on GPUs that shows both right",
        "leave it out",
        "--mla-down-proj-fusion --use-grouped-gemm-for-dense-mlp --use-grouped-gemm-for-shared-expert "
        "--moe-use-grouped-tensor --moe-single-grouped-weight --moe-single-grouped-bias "
        "--moe-mlp-glu-interleave-size --moe-shared-expert-glu-interleave-size --ckpt-drop-redundant-extra-state",
    ),
    (
        "upcycling makes experts of a dense checkpoint, which a conversion would have to do",
        "start from a checkpoint with experts",
        "--moe-use-upcycling --moe-upcycling-granularity",
    ),
    (
        "routes would have to be kept for each microbatch, whichever group computes it again",
        "leave it out",
        "--moe-enable-routing-replay",
    ),
    (
        "what each router does is not written down layer by layer, as its figures would have to be summed over groups",
        "leave it out",
        "--moe-routing-trace-path --moe-routing-trace-max-training-iters --moe-routing-trace-capture-logits "
        "--moe-routing-trace-capture-hidden-states --moe-routing-trace-dump-weights",
    ),
    (
        "tokens in 8 bits, and tokens that are dropped where a rank's buffer is full, are other results; the alltoall "
        "dispatcher, which takes the place of DeepEP, HybridEP and NCCL EP, has neither",
        "leave it out",
        "--moe-dispatch-fwd-dtype --moe-combine-bwd-dtype --moe-expert-rank-capacity-factor",
    ),
    (
        "which weights are in which group of the optimizer is not written to a file",
        "leave it out",
        "--dump-param-to-param-group-map",
    ),
    ("pipeline stages send to one another directly", "leave it out", "--use-ring-exchange-p2p"),
    (
        "training in phases needs data sets that change at a step",
        "start a job for each phase",
        "--phase-transition-iterations",
    ),
    (
        "steps that were found bad are not skipped by number",
        "leave it out",
        "--iterations-to-skip --result-rejected-tracker-filename",
    ),
    (
        "the training loop of this framework has its own order of steps and collections",
        "leave it out",
        "--train-sync-interval --disable-jit-fuser",
    ),
    (
        "the job leaves on SIGTERM, SIGUSR1, SIGINT and SIGHUP only",
        "send SIGTERM",
        "--exit-signal --exit-signal-handler-for-training",
    ),
    (
        "GPUs are not measured against one another while a job trains",
        "give a test of a GPU with --spare-health-check",
        "--gpu-sniff-test-interval",
    ),
    (
        "what NCCL's flight recorder does follows from environment variables, which are the user's",
        "export TORCH_NCCL_TRACE_BUFFER_SIZE and TORCH_NCCL_DUMP_ON_TIMEOUT before the ranks start",
        "--flight-recorder-dump-path --flight-recorder-trace-buffer-size --no-flight-recorder-dump-on-timeout "
        "--disable-flight-recorder-dump-on-timeout --flight-recorder-include-stack-trace "
        "--no-flight-recorder-include-only-active --disable-flight-recorder-include-only-active "
        "--no-flight-recorder-extra-dump-on-exec --disable-flight-recorder-extra-dump-on-exec",
    ),
    (
        "a profile has no call stacks, NVTX ranges or Chakra traces",
        "use --profile",
        "--pytorch-profiler-collect-callstack --pytorch-profiler-collect-chakra --record-shapes --nvtx-ranges",
    ),
    ("all weights are trained", "leave it out", "--freeze-all-layers"),
    ("Megatron-LM itself no longer takes it", "use --micro-batch-size", "--batch-size"),
    ("Megatron-LM itself no longer takes it", "use --lr-warmup-fraction", "--warmup"),
    ("Megatron-LM itself no longer takes it", "use --tensor-model-parallel-size", "--model-parallel-size"),
    ("Megatron-LM itself no longer takes it", "use --recompute-granularity", "--checkpoint-activations"),
    ("it is for Megatron's older models", "leave it out", "--use-legacy-models --openai-gelu --onnx-safe"),
    ("all groups must start from the same weights", "leave it out", "--data-parallel-random-init"),
    ("training cannot be skipped", "use --train-iters", "--skip-train"),
    (
        "each evaluation takes --eval-iters batches of one validation set, from the first --eval-interval on",
        "use --eval-iters and --eval-interval",
        "--full-validation --multiple-validation-sets --validation-set-names --start-eval-at-iter",
    ),
    (
        "only whole checkpoints in megatron-core's distributed format are written and read",
        "use --save, --load and --save-interval",
        "--save-wgrads-interval --save-dgrads-interval --save-params-interval --save-activations-interval "
        "--save-tokens-per-expert-interval --override-ckpt-iteration --load-main-params-from-ckpt "
        "--non-persistent-save-interval --non-persistent-ckpt-type --non-persistent-global-ckpt-dir "
        "--non-persistent-local-ckpt-dir --non-persistent-local-ckpt-algo --pretrained-checkpoint "
        "--ckpt-convert-format --ckpt-convert-save --ckpt-convert-update-legacy-dist-opt-format "
        "--dist-ckpt-save-pre-mcore-014 --dist-ckpt-format --replication --replication-jump --replication-factor",
    ),
    (
        "data files are read from a file system, and their index whole",
        "leave it out",
        "--enable-msc --per-dataset-sequences-path --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap "
        "--object-storage-cache-path",
    ),
    ("configurations are written with the checkpoint, not by themselves", "use --save", "--config-logger-dir"),
    (
        "documents are kept apart by the attention mask, not by packed sequences",
        "use --reset-attention-mask and --reset-position-ids",
        "--dataloader-inter-document-masking",
    ),
    (
        "the tokenizer's own ids of the end and of padding are used, and its own form of a conversation",
        "make the data with the tokenizer that you want",
        "--null-tokenizer-eod-id --null-tokenizer-pad-id --chat-template --use-gigatoken "
        "--no-tokenizer-sentencepiece-ignore-extra-whitespaces "
        "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces",
    ),
    (
        "the vocabulary is always padded to what the tensor-parallel ranks can share",
        "use --padded-vocab-size N",
        "--no-pad-vocab-size --disable-pad-vocab-size",
    ),
)
