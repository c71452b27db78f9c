"""The only door to ``megatron.*``: everything of megatron-core that the rest of the package uses comes through here.

Importing this package imports neither torch nor megatron. Its modules, in the order in which a rank uses them:

============= ===================================================================================================
settings      ``MegatronSettings``: what a model is, in megatron-core's names; ``check_settings``: what is refused
versions      which megatron-core was tested, and what it says on every start
shims         what makes megatron-core run without CUDA
world         one group's own torch.distributed world and parallel state
rng           Megatron's seeding at start; then generator states that follow from the piece
model         chunks, gradient buffers, optimizer, schedule: ``build_replica``
schedule      a list of pieces through megatron-core's pipeline schedule
losses        sums of what a loss function reports
engine        ``MegatronEngine``: the step loop's seam
exact         integer accumulators of one rank's gradients and their checksums
formats       int64 and int32 behind one interface; their scales: scales, block_scales
determinism   what makes a piece the same bits everywhere
state         a rank's training state in memory: ``take``, ``put_back``, ``weights_digest``
checkpointing durable checkpoints in megatron-core's format: ``save``, ``load``
digest        one fingerprint of a checkpoint's weights, whatever layout wrote them
values        words of settings that stand for objects
batches       a microbatch on the ranks of a stage
datasets      megatron-core's data sets, safe for many groups at once
tokenizers    megatron-core's tokenizers
timers        megatron-core's timers
flag_sources  the fields of megatron-core's dataclasses, from which flags are made
============= ===================================================================================================
"""
