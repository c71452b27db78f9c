"""One rank's life: its job, the training loop, steps, saving, evaluation, and where faults can be injected.

``engine`` is the seam to the model; ``megatron_job`` puts megatron-core's behind it. May import ``control``,
``collectives``, ``checkpoint``, ``data``, ``flags``, ``megatron_adapter``; megatron only through the last. Promises:
a step is applied once, after its commit.
"""
