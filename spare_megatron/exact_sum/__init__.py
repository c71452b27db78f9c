"""Fixed-point sums of gradients, which do not depend on the order of addition: formats, scales, piece checksums.

May import ``kernels``, torch and numpy; nothing of megatron. Promises: scales depend on committed state alone.
"""
