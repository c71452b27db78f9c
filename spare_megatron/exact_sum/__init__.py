"""Fixed-point sums: number formats, scales and piece checksums, which make sums independent of their order.

May import ``kernels``, torch and numpy; nothing of megatron. Promises: scales follow from committed state alone.
"""
