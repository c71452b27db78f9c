"""Lists classes that Megatron's checkpoint files contain and whose unpickling has no effects."""

from __future__ import annotations

from typing import Any

_ENUMS = ("AttnBackend", "CudaGraphModule", "CudaGraphScope", "InferenceCudaGraphScope")
"""Of megatron-core's transformer settings; all but the first came after 0.16."""


def harmless_classes() -> list[Any]:
    """Classes for ``torch.serialization.safe_globals``: enums, flags, and those of which numpy's random states
    consist."""
    import argparse
    import codecs
    import signal

    import numpy as np
    from megatron.core.enums import ModelType
    from megatron.core.transformer import enums
    from numpy._core.multiarray import _reconstruct

    named = [getattr(enums, name) for name in _ENUMS if hasattr(enums, name)]
    of_numpy = [np.ndarray, np.dtype, _reconstruct, type(np.dtype(np.uint32))]
    older = (_reconstruct, "numpy.core.multiarray._reconstruct")  # its name in files of numpy 1
    return [argparse.Namespace, signal.Signals, ModelType, *named, *of_numpy, older, codecs.encode]
