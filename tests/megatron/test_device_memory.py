"""What exact sums ask of a device's memory, and operations that a device refuses in deterministic mode, as far as a CPU
shows them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
import torch

from spare_megatron.megatron_adapter.model.exact import _Buffer

CORE = Path(megatron.core.__path__[0])
LAYERS = ("transformer", "tensor_parallel", "models/gpt", "models/common", "models/hybrid", "models/mamba", "ssm", "fusions")
ALLOWED = {"cumsum": "of integers; those of floating-point numbers are refused", "resize_": "of storages, not of tensors"}
"""Operations that are refused for other arguments than those with which layers call them, and why."""


@pytest.mark.parametrize(("dtype", "sizes"), [(torch.int64, [0, 800]), (torch.int32, [])], ids=str)
def test_an_accumulator_is_not_beside_the_gradient_that_it_replaces(
    dtype: torch.dtype, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    resized: list[int] = []
    resize = torch.UntypedStorage.resize_

    def recorded(storage: torch.UntypedStorage, size: int) -> Any:
        resized.append(size)
        return resize(storage, size)

    buffer = SimpleNamespace(
        grad_data=torch.zeros(100), ddp_config=SimpleNamespace(use_distributed_optimizer=False), buckets=[]
    )
    view = buffer.grad_data[10:20]
    monkeypatch.setattr(torch.UntypedStorage, "resize_", recorded)
    made = _Buffer(buffer, SimpleNamespace(size=lambda: 1, rank=lambda: 0), dtype)  # type: ignore[arg-type]
    assert resized == sizes, "with the old size first, both would be there at once"
    made.accumulator.zero_()
    buffer.grad_data.fill_(1.0)
    assert view.tolist() == [1.0] * 10
    assert made.accumulator.data_ptr() == buffer.grad_data.data_ptr()


def refused_on_cuda() -> set[str]:
    """The functions that torch's documentation says raise in deterministic mode."""
    text = torch.use_deterministic_algorithms.__doc__ or ""
    text = text[text.index("will throw a") :]
    return {name.rpartition(".")[2] for name in re.findall(r":(?:func|attr|meth):`(torch\.[\w.]+)`", text)}


def called(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            names.add(node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", ""))
    return names


def test_layers_call_nothing_that_deterministic_mode_refuses() -> None:
    refused = refused_on_cuda()
    assert {"histc", "cumsum", "kthvalue"} <= refused
    found = {
        (str(path.relative_to(CORE)), name)
        for folder in LAYERS
        for path in (CORE / folder).rglob("*.py")
        for name in called(path) & refused
        if name not in ALLOWED
    }
    assert not found
