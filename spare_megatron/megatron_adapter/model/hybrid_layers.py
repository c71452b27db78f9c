"""Builds megatron-core's HybridModel by its own specification of layers or, without transformer-engine, of torch's.

megatron-core specifies a hybrid model's layers by transformer-engine's modules only. Its specification of a GPT layer
exists for torch layers too: :func:`local_stack` takes a hybrid layer from each half of one. So a hybrid model of
attention and feed-forward layers in turn has the operations, and the names of weights, of a GPT.

May assume: ``settings.hybrid_layer_pattern`` was checked by ``flags.hybrid_pattern``. Promises: importing this module
imports nothing of HybridModel, which megatron-core has since 0.18.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.model.settings import MegatronSettings, language_model_arguments, uses_local_layers

if TYPE_CHECKING:
    import torch

CORES_OWN = ("hybrid_stack_spec", "mamba_stack_spec")
"""Names under which megatron-core has its specification."""
_ENGINE_ONLY = "MG"


def hybrid_provider(settings: MegatronSettings, config: Any) -> Callable[..., Any]:
    """The model provider of Megatron's pretrain_hybrid.py."""

    def provide(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        return HybridModel(
            config=config,
            hybrid_stack_spec=_stack_of(settings, config),
            hybrid_layer_pattern=settings.hybrid_layer_pattern,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            **language_model_arguments(settings),
        )

    return provide


def pattern_of(module: torch.nn.Module) -> str | None:
    """The layers of a HybridModel, in megatron-core's words; None for other models."""
    return getattr(module, "hybrid_layer_pattern", None)


def check_kind(settings: MegatronSettings, module: torch.nn.Module) -> None:
    """ConfigError where a user's provider builds a model whose layers are not those of the flags."""
    if settings.hybrid_layer_pattern not in (None, pattern_of(module)):
        has = pattern_of(module)
        raise ConfigError(
            f"--hybrid-layer-pattern {settings.hybrid_layer_pattern} is for megatron-core's HybridModel, but this "
            f"script's provider built {type(module).__name__}{'' if has is None else f' of {has}'}; run "
            "pretrain_hybrid.py, or leave the flag out"
        )


def _stack_of(settings: MegatronSettings, config: Any) -> Any:
    """The specification of the layers. That of megatron-core stands for torch layers where these are used."""
    if settings.spec and settings.spec[-1] not in CORES_OWN:
        from megatron.core.transformer.spec_utils import import_module

        return import_module(list(settings.spec))
    if not uses_local_layers(settings):
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

        return hybrid_stack_spec
    others = [symbol for symbol in _ENGINE_ONLY if symbol in str(settings.hybrid_layer_pattern)]
    if others:
        raise ConfigError(
            f"--hybrid-layer-pattern {settings.hybrid_layer_pattern} has layers {' and '.join(others)}, which "
            "megatron-core builds of transformer-engine's modules only; run on a machine that has it, without "
            "--transformer-impl local"
        )
    return local_stack(config)


def local_stack(config: Any) -> Any:
    """The specification of a stack of torch layers (megatron-core's ModuleSpec)."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        get_mtp_layer_spec_for_backend,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

    class LocalStack(HybridStack):  # type: ignore[misc]
        """A stack whose last norm is torch's: megatron-core's is transformer-engine's, whatever the layers are."""

        def __init__(self, config: Any, submodules: Any, *, post_layer_norm: bool = True, **named: Any) -> None:
            super().__init__(config, submodules, post_layer_norm=False, **named)
            self.post_layer_norm = post_layer_norm
            if self.post_process and post_layer_norm:
                self.final_norm = WrappedTorchNorm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def halves(experts: int | None, latent: bool) -> tuple[Any, Any]:
        whole = get_gpt_layer_local_spec(
            num_experts=experts,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=latent,
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm and not latent,
        ).submodules
        attention = replace(whole, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)
        forward = replace(whole, input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp)
        return attention, forward

    attention, dense = halves(None, False)
    latent, _ = halves(None, True)
    _, experts = halves(config.num_moe_experts or 1, False)
    predicting = MultiTokenPredictionBlockSubmodules(
        layer_specs=[get_mtp_layer_spec_for_backend(mtp_model_layer_spec=None, backend=LocalSpecProvider())]
    )
    return ModuleSpec(
        module=LocalStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mla_layer=ModuleSpec(module=TransformerLayer, submodules=latent),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=dense),
            moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=experts),
            mtp_block_spec=ModuleSpec(module=MultiTokenPredictionBlock, submodules=predicting),
        ),
    )
