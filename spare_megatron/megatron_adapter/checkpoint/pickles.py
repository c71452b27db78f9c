"""Lists classes that Megatron's checkpoint files contain and whose unpickling has no effects."""

from __future__ import annotations

from typing import Any

from spare_megatron.megatron_adapter.shims import install_cpu_shims


def harmless_classes() -> list[Any]:
    """Classes for ``torch.serialization.safe_globals``: enums, and those of which numpy's random states consist."""
    install_cpu_shims()
    import codecs

    import numpy as np
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend
    from numpy._core.multiarray import _reconstruct

    return [ModelType, AttnBackend, np.ndarray, np.dtype, _reconstruct, type(np.dtype(np.uint32)), codecs.encode]
