"""The only package that imports ``megatron.*``: the rest of spare_megatron uses megatron-core through it.

Importing this package imports neither torch nor megatron. Its modules, in the order in which a rank uses them:

=============== =================================================================================================
versions        the tested versions of megatron-core; silences the warnings of every start
shims           makes megatron-core run without CUDA
determinism     makes a piece's gradient the same bits wherever it is computed
model           settings, a group's torch.distributed world, random states, model and optimizer, pipeline schedule,
                losses, exact sums, overlap of gradients with the backward pass, snapshots of the state
megatron_engine ``MegatronEngine``, the step loop's engine
checkpoint      saves and loads checkpoints in megatron-core's format; digests of their weights
data            data sets, microbatches on the ranks of a stage, tokenizers
diagnostics     norm of all parameters, memory
timers          megatron-core's timers
flag_sources    the table of megatron-core's fields, from which flags are made
=============== =================================================================================================
"""
