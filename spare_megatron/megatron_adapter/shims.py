"""Makes megatron-core run without CUDA by a small set of named changes.

Each entry of :data:`CPU_SHIMS` says what is changed and which lines of megatron-core 0.16.1 need it. They are applied
once, by :func:`install_cpu_shims`, and only where torch finds no CUDA device: with a GPU nothing is changed.
Every shim changes a call that would raise (or be very slow) without CUDA, so code that runs on CPU anyway keeps its
meaning. megatron-core's own structure (schedules, layers, optimizer, checkpoints) is left as it is.

May assume: called before the first import of ``megatron``. Promises: calling it again does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._device import _device_constructors

from spare_megatron.megatron_adapter.core_differences import QuietLogs, without_triton
from spare_megatron.megatron_adapter.imports import uncollected
from spare_megatron.megatron_adapter.versions import silence_known_warnings


@dataclass(frozen=True)
class CpuShim:
    """One change: ``apply`` makes it; ``reason`` says what it does and which lines of megatron-core need it."""

    name: str
    reason: str
    apply: Callable[[], None]
    phase: str = "before import"
    """When it is made: 'before import' of megatron.core, or 'after import' where one of its modules is changed."""


_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn", "randint")

_installed: tuple[str, ...] | None = None


def cuda_available() -> bool:
    """Whether this process computes on CUDA; decided once, by what torch sees."""
    return torch.cuda.is_available()


def compute_device() -> torch.device:
    """The device of model, gradients and optimizer state of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if cuda_available() else torch.device("cpu")


# ------------------------------------------------------------------------------------------------- before import


def _current_device() -> None:
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]


def _is_cuda(device: object) -> bool:
    return str(device).startswith("cuda") if device is not None else False


def _factories() -> None:
    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def create(*args: Any, **kwargs: Any) -> torch.Tensor:
            if "device" in kwargs and _is_cuda(kwargs["device"]):
                kwargs["device"] = "cpu"
            return factory(*args, **kwargs)

        return create

    # `with torch.device("meta")` acts on the functions that torch lists at its first use: list these, not the new ones.
    # Else transformers, in the same process, would load models whose rotary frequencies have no values.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _tensor_cuda() -> None:
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self  # type: ignore[assignment]


def _tensor_type() -> None:
    original = torch.Tensor.type

    def type_of(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        asked_by_megatron = str(sys._getframe(1).f_globals.get("__name__", "")).startswith("megatron.")
        if not args and not kwargs and asked_by_megatron:
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.type = type_of  # type: ignore[method-assign,assignment]


def _synchronize() -> None:
    torch.cuda.synchronize = lambda *_args, **_kwargs: None


class _NoStream:
    """Replaces CUDA streams and events; it has nothing to wait for, because work on the CPU is done when a call
    returns."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def record_event(self, *_args: Any) -> _NoStream:
        return self

    def wait_stream(self, _stream: Any) -> None: ...

    def wait_event(self, _event: Any) -> None: ...

    def synchronize(self) -> None: ...


def _streams() -> None:
    stream = _NoStream()
    torch.cuda.Stream = _NoStream  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda *_args, **_kwargs: stream  # type: ignore[assignment,return-value]
    torch.cuda.stream = lambda _stream: contextlib.nullcontext()  # type: ignore[assignment,return-value]


def _no_fuser() -> None:
    def keep(function: Any = None, **_kwargs: Any) -> Any:
        return function if function is not None else (lambda decorated: decorated)

    torch.compile = keep  # type: ignore[assignment]
    if "torch._dynamo" in sys.modules:
        # a user's script imported megatron.core first, so its functions would be compiled at their first call
        torch.compiler.set_stance("force_eager")


def _no_dynamo_in_optimizer() -> None:
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        method = getattr(torch.optim.Optimizer, name)
        setattr(torch.optim.Optimizer, name, getattr(method, "__wrapped__", method))
    for kind in (torch.optim.Adam, torch.optim.SGD):  # AdamW is an Adam
        if hasattr(kind.step, "__wrapped__"):
            kind.step = _differentiable_or_not(kind.step.__wrapped__)  # type: ignore[method-assign]


def _differentiable_or_not(step: Callable[..., Any]) -> Callable[..., Any]:
    """As torch.optim.optimizer's ``_use_grad_for_differentiable``, without the breaks for a compiler."""

    @functools.wraps(step)
    def in_its_mode(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return in_its_mode


# -------------------------------------------------------------------------------------------------- after import


def _rng_tracker() -> None:
    from spare_megatron.megatron_adapter.model import rng

    rng.use_cpu_generator()


def _moe_gemm() -> None:
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _moe_splits() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    original = moe_utils.maybe_move_tensor_to_cpu

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy()
        return original(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _norm_under_sequence_parallelism() -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def create(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        config.sequence_parallel = False
        try:
            norm = original(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = True
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    WrappedTorchNorm.__new__ = create


def _latent_attention() -> None:
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    multi_latent_attention.HAVE_TE = False  # True in 0.16, whose wrappers of it can be imported without it
    plain = DotProductAttention.__init__

    @functools.wraps(plain)
    def create(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **named: Any
    ) -> None:
        plain(self, *args, **named)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    DotProductAttention.__init__ = create


def _expert_biases() -> None:
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    plain = RowParallelLinear.forward

    @functools.wraps(plain)
    def forward(self: Any, input_: Any) -> Any:
        output, bias = plain(self, input_)
        return (output if bias is None or not self.is_expert else output.clone()), bias

    RowParallelLinear.forward = forward


CPU_SHIMS: tuple[CpuShim, ...] = (
    CpuShim(
        "current_device",
        "torch.cuda.current_device() is cpu: param_and_grad_buffer 783-806, p2p_communication 190-321, "
        "mappings 91-181, layers 552, utils 631, rotary_pos_embedding 162",
        _current_device,
    ),
    CpuShim(
        "factories",
        "torch.zeros(..., device='cuda') and its kin are on cpu: schedules 596/983/2138, optimizer 473-485/907, "
        "clip_grads 90-207, utils 1207, grad_scaler 15-94",
        _factories,
    ),
    CpuShim("tensor_cuda", "Tensor.cuda() is the tensor: language_module 244, grad_scaler 140", _tensor_cuda),
    CpuShim(
        "tensor_type",
        "Tensor.type() names a cuda type when megatron asks: clip_grads 167, optimizer 671/690",
        _tensor_type,
    ),
    CpuShim(
        "synchronize", "torch.cuda.synchronize() returns: p2p_communication 242/398, filesystem_async 230", _synchronize
    ),
    CpuShim("streams", "streams without CUDA: token_dispatcher 445/871-895, shared_experts 123-277", _streams),
    CpuShim(
        "no_fuser",
        "torch.compile leaves functions as they are: jit 22; compiling costs 8 s in the first step and 0.4 s at import",
        _no_fuser,
    ),
    CpuShim(
        "no_dynamo_in_optimizer",
        "torch.optim's methods without the wrapper that imports torch._dynamo (0.4 s) at the first call",
        _no_dynamo_in_optimizer,
    ),
    CpuShim(
        "rng_tracker",
        "CudaRNGStatesTracker on the CPU generator, distinct for each TP rank: tensor_parallel/random 41-457",
        _rng_tracker,
        "after import",
    ),
    CpuShim(
        "moe_gemm",
        "te_general_gemm exists (None) without transformer-engine: moe/moe_utils 1192/1225",
        _moe_gemm,
        "after import",
    ),
    CpuShim(
        "moe_splits",
        "all-to-all splits as host integers also where they already are on the host: moe/moe_utils 1093",
        _moe_splits,
        "after import",
    ),
    CpuShim(
        "sequence_parallel_norm",
        "torch's norms under sequence parallelism, their weights marked for the sum over TP: torch_norm 32",
        _norm_under_sequence_parallelism,
        "after import",
    ),
    CpuShim(
        "latent_attention",
        "torch's attention with values of another width than keys, which only transformer-engine's is given, and "
        "nobody asks whether a layer is transformer-engine's: multi_latent_attention 155/185, "
        "dot_product_attention 78/248",
        _latent_attention,
        "after import",
    ),
    CpuShim(
        "expert_biases",
        "an expert adds its bias in place, which autograd refuses for the output of a collective: mlp 247",
        _expert_biases,
        "after import",
    ),
)
"""All shims, in the order in which they are applied."""


@contextlib.contextmanager
def _without_wandb() -> Iterator[None]:
    """Keep dynamic_context 70 from importing wandb (0.4 s), which it uses for inference statistics only."""
    absent = object()
    before = sys.modules.get("wandb", absent)
    if before is absent:
        sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is absent:
            del sys.modules["wandb"]


def install_cpu_shims() -> tuple[str, ...]:
    """Import megatron.core and, without CUDA, make it run on the CPU; returns the names of the shims (none on CUDA).

    On every device, files of checkpoints and caches are from then on loaded without running what they name
    (``megatron_adapter.checkpoint.safe_loading``).
    """
    global _installed
    if _installed is not None:
        return _installed
    silence_known_warnings(on_cuda=cuda_available())
    shims = () if cuda_available() else CPU_SHIMS
    for shim in shims:
        if shim.phase == "before import":
            shim.apply()
    for handler in (*logging.getLogger().handlers, logging.lastResort):
        if handler is not None:
            handler.addFilter(QuietLogs())
    with _without_wandb(), without_triton(), uncollected():
        import megatron.core
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer  # noqa: F401
    for shim in shims:
        if shim.phase == "after import":
            shim.apply()
    from spare_megatron.megatron_adapter.checkpoint import safe_loading

    safe_loading.install()
    _installed = tuple(shim.name for shim in shims)
    return _installed
