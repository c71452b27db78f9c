"""AdEMAMix against its formulas in double precision, and against Adam, which it is without its slow average."""

from __future__ import annotations

import copy
import itertools
import math

import pytest

torch = pytest.importorskip("torch")

from spare_megatron.megatron_adapter.model.ademamix import AdEMAMix, warmed_alpha, warmed_beta3  # noqa: E402

BETAS = (0.9, 0.99, 0.999)
STEPS = 12


def gradients() -> list[list[torch.Tensor]]:
    """Of two parameters, in each step; the second has none in step 3."""
    generator = torch.Generator().manual_seed(5)
    made = [[torch.randn(7, 5, generator=generator), torch.randn(3, generator=generator)] for _ in range(STEPS)]
    made[2][1] = None  # type: ignore[call-overload]
    return made


def trained(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    for step in gradients():
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def start() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [
        torch.randn(7, 5, generator=generator).requires_grad_(),
        torch.randn(3, generator=generator).requires_grad_(),
    ]


def by_formula(parameter: torch.Tensor, given: list[torch.Tensor | None], alpha: float, warmup: int) -> torch.Tensor:
    """The paper's equations, written down once more in double precision; beta3 as it is printed there."""
    lr, eps, decay = 0.01, 1e-8, 0.1
    beta1, beta2, final = BETAS
    theta, m1, m2, v = parameter.detach().double(), *(torch.zeros_like(parameter).double() for _ in range(3))
    for t, gradient in enumerate((one for one in given if one is not None), 1):
        g = gradient.double()
        a = min(t * alpha / warmup, alpha)
        part = t / warmup
        slow = math.log(beta1) * math.log(final) / ((1 - part) * math.log(final) + part * math.log(beta1))
        beta3 = min(math.exp(slow), final) if part < 1 else final
        m1, m2 = beta1 * m1 + (1 - beta1) * g, beta3 * m2 + (1 - beta3) * g
        v = beta2 * v + (1 - beta2) * g**2
        mixed = (m1 / (1 - beta1**t) + a * m2) / ((v / (1 - beta2**t)).sqrt() + eps)
        theta = theta - lr * (mixed + decay * theta)
    return theta


@pytest.mark.parametrize("warmup", [8, 20], ids=["ends", "goes on"])
def test_it_is_the_papers(warmup: int) -> None:
    parameters = start()
    expected = [
        by_formula(one, [step[index] for step in gradients()], 8.0, warmup) for index, one in enumerate(parameters)
    ]
    made = AdEMAMix(
        parameters, lr=0.01, betas=BETAS, weight_decay=0.1, alpha=8.0, alpha_warmup=warmup, beta3_warmup=warmup
    )
    for found, right in zip(trained(made, parameters), expected, strict=True):
        assert torch.allclose(found.double(), right, rtol=1e-5, atol=1e-6)
    assert [int(made.state[one]["step"].item()) for one in parameters] == [STEPS, STEPS - 1]


def test_without_its_slow_average_it_is_adam_with_decoupled_decay() -> None:
    ours, theirs = start(), start()
    found = trained(AdEMAMix(ours, lr=0.01, betas=BETAS, weight_decay=0.1, alpha=0.0), ours)
    right = trained(torch.optim.AdamW(theirs, lr=0.01, betas=BETAS[:2], weight_decay=0.1), theirs)
    for one, other in zip(found, right, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_it_is_that_of_emerging_optimizers() -> None:
    functions = pytest.importorskip(
        "emerging_optimizers.scalar_optimizers.update_functions", reason="needs pip install emerging-optimizers"
    )
    [parameter, _] = start()
    theta, m1, m2, v = parameter.detach().clone(), *(torch.zeros_like(parameter.detach()) for _ in range(3))
    for t, (gradient, _) in enumerate(gradients(), 1):
        update = functions.calculate_ademamix_update(
            gradient, m1, m2, v, betas=BETAS, eps=1e-8, correct_bias=True, step=t, num_beta_slow_warmup_steps=8,
            num_alpha_warmup_steps=8, alpha=8.0,
        )  # fmt: skip
        theta -= 0.01 * update
    made = AdEMAMix([parameter], lr=0.01, betas=BETAS, alpha=8.0, alpha_warmup=8, beta3_warmup=8)
    for gradient, _ in gradients():
        parameter.grad = gradient
        made.step()
    assert torch.allclose(parameter.detach(), theta, rtol=1e-5, atol=1e-6)


def test_a_first_state_changes_nothing_and_a_saved_one_goes_on() -> None:
    plain, given = start(), start()
    made = AdEMAMix(given, lr=0.01, betas=BETAS, alpha=8.0, beta3_warmup=8)
    made.give_first_state()
    assert {tuple(state) for state in made.state.values()} == {("step", *AdEMAMix.MOMENTS)}
    expected = trained(AdEMAMix(plain, lr=0.01, betas=BETAS, alpha=8.0, beta3_warmup=8), plain)
    assert all(map(torch.equal, trained(made, given), expected))
    resumed = [one.detach().clone().requires_grad_() for one in given]
    other = AdEMAMix(resumed)
    other.load_state_dict(copy.deepcopy(made.state_dict()))
    assert all(map(torch.equal, trained(other, resumed), trained(made, given)))


def test_warm_ups() -> None:
    assert [warmed_alpha(t, 8.0, 4) for t in (1, 2, 4, 9)] == [2.0, 4.0, 8.0, 8.0]
    assert warmed_alpha(1, 8.0, None) == warmed_alpha(1, 8.0, 0) == 8.0
    betas = [warmed_beta3(t, 0.9999, 0.9, 1000) for t in range(1001)]
    assert betas == sorted(betas)
    assert (betas[0], betas[-1]) == (pytest.approx(0.9, rel=1e-7), 0.9999)
    half_lives = [math.log(0.5) / math.log(beta) for beta in betas[:-1]]
    steps = [after - before for before, after in itertools.pairwise(half_lives)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-6), "a half-life that grows linearly"
    assert warmed_beta3(3, 0.9999, 0.9, None) == 0.9999
    assert 0.0 < warmed_beta3(1, 0.9999, 0.0, 1000) < 0.9999
