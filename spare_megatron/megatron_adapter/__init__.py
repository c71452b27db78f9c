"""The only door to ``megatron.*``: everything of megatron-core that the rest of the package uses comes through here.

Importing this package imports neither torch nor megatron. Its modules, in the order in which a rank uses them:

========== ======================================================================================================
settings   ``MegatronSettings``, ``config_types``: what a model is, in megatron-core's names
versions   which megatron-core was tested
shims      what makes megatron-core run without CUDA
world      one group's own torch.distributed world and parallel state
model      chunks, gradient buffers, optimizer, schedule: ``build_replica``
engine     ``MegatronEngine``: the step loop's seam
========== ======================================================================================================
"""
