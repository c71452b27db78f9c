"""AdEMAMix: Adam with a second, slow average of gradients.

From "The AdEMAMix Optimizer: Better, Faster, Older" (arXiv 2409.03137), section 3, with decoupled weight decay:

    m1 = beta1 m1 + (1 - beta1) g        m2 = beta3(t) m2 + (1 - beta3(t)) g        v = beta2 v + (1 - beta2) g^2
    theta -= lr ((m1 / (1 - beta1^t) + alpha(t) m2) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay theta)

t is the number of the update, from 1. alpha(t) and beta3(t) grow to their final values as :func:`warmed_alpha` and
:func:`warmed_beta3` say. m2 has no correction of its bias: alpha's growth stands in its place.

Every operation is elementwise, so the distributed optimizer may divide the tensors. May assume nothing of megatron.
Promises: a state that was created before the first update (zeros, step 0) changes no result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch


class AdEMAMix(torch.optim.Optimizer):
    """The optimizer over ordinary tensors. Parameter groups may have an ``lr``, ``eps`` and ``weight_decay`` of their
    own."""

    MOMENTS = ("exp_avg_fast", "exp_avg_slow", "exp_avg_sq")
    """Names of m1, m2 and v in the state of a parameter, each of its shape, fp32; 'step' beside them is t."""

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        alpha: float = 2.0,
        alpha_warmup: int | None = None,
        beta3_warmup: int | None = None,
    ) -> None:
        """``betas`` are beta1, beta2 and the final beta3; a warm-up is a number of updates, None for none."""
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "alpha": alpha,
            "alpha_warmup": alpha_warmup,
            "beta3_warmup": beta3_warmup,
        }
        super().__init__(params, defaults)

    def give_first_state(self) -> None:
        """Give each parameter that has none the state with which it would begin."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update by the parameters' ``grad``; those without one stay as they are."""
        assert closure is None, "megatron-core computes gradients before the update"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter, parameter.grad)

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)  # as torch's Adam, on the CPU
            state.update({name: torch.zeros_like(parameter.data) for name in self.MOMENTS})
        return state

    def _update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        state = self._state_of(parameter)
        state["step"] += 1
        count = int(state["step"].item())
        fast, slow, square = (state[name] for name in self.MOMENTS)
        beta1, beta2, final = group["betas"]
        beta3 = warmed_beta3(count, final, beta1, group["beta3_warmup"])
        fast.lerp_(gradient, 1.0 - beta1)
        slow.lerp_(gradient, 1.0 - beta3)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        root = square.sqrt().div_(math.sqrt(1.0 - beta2**count)).add_(group["eps"])
        update = fast.div(1.0 - beta1**count)
        update.add_(slow, alpha=warmed_alpha(count, group["alpha"], group["alpha_warmup"])).div_(root)
        update.add_(parameter, alpha=group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"])


def warmed_alpha(count: int, final: float, warmup: int | None) -> float:
    """alpha of the update ``count``: it grows linearly from 0 over ``warmup`` updates."""
    return final * count / warmup if warmup is not None and count < warmup else final


def warmed_beta3(count: int, final: float, first: float, warmup: int | None) -> float:
    """beta3 of the update ``count``: the half-life of the slow average, ln 0.5 / ln beta, grows linearly from that of
    ``first`` (beta1) to that of ``final`` over ``warmup`` updates. The 1e-8 is that of the authors' own code, with
    which a ``first`` of 0 has a half-life too."""
    if warmup is None or count >= warmup:
        return final
    part = count / warmup
    start, end = (math.log(0.5) / math.log(beta + 1e-8) for beta in (first, final))
    return math.pow(0.5, 1.0 / ((1.0 - part) * start + part * end))


def replace_adam(
    chained: Any, *, beta3: float, alpha: float, alpha_warmup: int | None, beta3_warmup: int | None
) -> None:
    """Let each of megatron-core's optimizers in ``chained``, which was built with Adam and has made no update, update
    by AdEMAMix. Parameter groups, options and fp32 copies stay as megatron-core made them."""
    for part in chained.chained_optimizers:
        adam = part.optimizer
        if adam is None:  # this rank has no parameters of this kind
            continue
        assert not adam.state, "Adam has a state already"
        mixed = AdEMAMix([{"params": []}])  # torch would refuse views, which the distributed optimizer updates in fp32
        for group in adam.param_groups:
            beta1, beta2 = group["betas"]
            for name in adam.defaults.keys() - {"lr", "eps", "weight_decay"}:
                group.pop(name, None)
            group.update(betas=(beta1, beta2, beta3), alpha=alpha)
            group.update(alpha_warmup=alpha_warmup, beta3_warmup=beta3_warmup)
        mixed.param_groups = adam.param_groups
        part.optimizer = mixed
        part.init_state_fn = lambda optimizer, _config=None: optimizer.give_first_state()
