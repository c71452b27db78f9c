"""What one rank does: it reads its job, runs steps in a loop, saves, evaluates, and injects faults for tests.

``engine`` is the interface to the model; ``megatron_job`` puts megatron-core's model behind it. May import ``control``,
``collectives``, ``checkpoint``, ``data``, ``flags``, ``megatron_adapter``; megatron only through the last. Promises:
a step is applied once, after its commit.
"""
