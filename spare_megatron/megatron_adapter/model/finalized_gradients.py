"""Has megatron-core add what ranks of a group have of one gradient, before the optimizer's step.

Tensor-parallel ranks have some parameters whole and parts of their gradients, for example those of norms under sequence
parallelism. megatron-core adds the parts of all such gradients of a stage as one vector. With three ranks or more the
order of the additions, and so the last bit, depends on an element's place in the vector and on its length, hence on
what else the stage has. Added one by one they have the same bits whatever the stages are.

May assume: ``install_cpu_shims`` has run.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

_core = importlib.import_module("megatron.core.distributed.finalize_model_grads")  # the package has a function so named
_add_together = _core._allreduce_non_tensor_model_parallel_grads


def finalize_gradients(chunks: Sequence[Any], *, one_by_one: bool) -> None:
    """Finish the gradients of a rank's ``chunks``; ``one_by_one``: those that tensor-parallel ranks share each by
    itself. Collective in the group."""
    _core._allreduce_non_tensor_model_parallel_grads = add_one_by_one if one_by_one else _add_together
    _core.finalize_model_grads(list(chunks), None)


def add_one_by_one(chunks: Sequence[Any], *more: Any) -> None:
    """As megatron-core's function, whose arguments these are."""
    for chunk in chunks:
        for one in chunk.named_parameters():
            alone = SimpleNamespace(ddp_config=chunk.ddp_config, named_parameters=lambda one=one: [one])
            _add_together([alone], *more)
