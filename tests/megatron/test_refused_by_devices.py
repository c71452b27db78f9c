"""What a device refuses, as far as a CPU shows it: memory for two buffers at once, operations in deterministic mode,
states of random numbers that are not set."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spare_megatron.config.errors import ConfigError

LAYERS = (
    "transformer",
    "tensor_parallel",
    "models/gpt",
    "models/common",
    "models/hybrid",
    "models/mamba",
    "ssm",
    "fusions",
)
ALLOWED = {
    "cumsum": "of integers; those of floating-point numbers are refused",
    "resize_": "of storages, not of tensors",
}
"""Operations that are refused for other arguments than those with which layers call them, and why."""


@pytest.mark.parametrize(("dtype", "sizes"), [(torch.int64, [0, 800]), (torch.int32, [])], ids=str)
def test_an_accumulator_is_not_beside_the_gradient_that_it_replaces(
    dtype: torch.dtype, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from spare_megatron.megatron_adapter.model.exact import _Buffer

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


@pytest.mark.parametrize("options", [{"use_cudagraphable_rng": True}, {"is_inference_rng_tracker": True}], ids=str)
def test_a_tracker_whose_states_cannot_be_set_is_refused(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    from spare_megatron.megatron_adapter.model.rng import core_random, set_states_by_layer

    class Other(core_random.CudaRNGStatesTracker):
        """As transformer-engine's, and as the one for inference."""

    kind = Other if "is_inference_rng_tracker" in options else core_random.CudaRNGStatesTracker
    tracker = kind.__new__(kind)
    vars(tracker).update({"use_cudagraphable_rng": False, "states_": {}, **options})
    monkeypatch.setattr(core_random, "_CUDA_RNG_STATE_TRACKER", tracker)
    monkeypatch.setattr(core_random, "initialize_rng_tracker", lambda *_: None)
    with pytest.raises(ConfigError, match="leave out te_rng_tracker, use_cudagraphable_rng and inference_rng_tracker"):
        set_states_by_layer(torch.nn.Linear(2, 2))


def refused_on_cuda() -> set[str]:
    """The functions that torch's documentation says raise in deterministic mode."""
    text = torch.use_deterministic_algorithms.__doc__ or ""
    text = text[text.rindex("operations will throw a") :]
    return {name.rpartition(".")[2] for name in re.findall(r":(?:func|attr|meth):`(torch\.[\w.]+)`", text)}


def called(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            names.add(node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", ""))
    return names


def test_layers_call_nothing_that_deterministic_mode_refuses() -> None:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    core = Path(spec.submodule_search_locations[0])  # type: ignore[index]
    refused = refused_on_cuda()
    assert {"histc", "put_"} <= refused  # and cumsum, up to torch 2.13
    found = {
        (str(path.relative_to(core)), name)
        for folder in LAYERS
        for path in (core / folder).rglob("*.py")
        for name in called(path) & refused
        if name not in ALLOWED
    }
    assert not found
