"""What the adapter refuses, with the reason; its versions and its table of shims. No model, no process."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.shape import JobShape
from spare_megatron.megatron_adapter import versions
from spare_megatron.megatron_adapter.model.losses import LossSums, averages
from spare_megatron.megatron_adapter.model.settings import MegatronSettings, check_settings
from spare_megatron.megatron_adapter.versions import TESTED_CORE_VERSIONS, check_core_version
from tests.spawn import ROOT, environment

SETTINGS = MegatronSettings(
    transformer={"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4},
    optimizer={"optimizer": "adam", "lr": 1e-3},
    scheduler={"init_lr": 0.0, "max_lr": 1e-3},
    padded_vocab_size=128,
    seq_length=32,
    max_position_embeddings=32,
    transformer_impl="local",
)


def shape(**degrees: int) -> JobShape:
    return JobShape(num_groups=2, micro_batch_size=1, global_batch_size=16, **degrees)


REFUSED = {
    "context": ({}, {"context": 2}, "--context-parallel-size 2 needs transformer-engine's attention"),
    "global aux loss": (
        {"transformer": {"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]}},
        {},
        "global_aux_loss is not supported",
    ),
    "experts": (
        {"transformer": {"expert_model_parallel_size": 4}},
        {"inner_data": 2},
        "expert parallelism 4 .* does not divide 2 .*--spare-inner-data-parallel 4",
    ),
    "virtual stages": (
        {"transformer": {"virtual_pipeline_model_parallel_size": 2}},
        {},
        "2 virtual stages need --pipeline-model-parallel-size of at least 2, but it is 1",
    ),
    "scheduler": ({"scheduler": {"warm_up": 3}}, {}, r"scheduler settings \['warm_up'\] are unknown"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str) -> None:
    changes, degrees, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        check_settings(dataclasses.replace(SETTINGS, **changes), shape(**degrees))


def test_plain_settings_are_accepted() -> None:
    check_settings(SETTINGS, shape(tensor=2, pipeline=2))


def test_a_norm_of_queries_that_newer_local_layers_do_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core 0.19 raises an error where it builds such a layer, after the check."""
    latent = {"multi_latent_attention": True, "qk_layernorm": True}
    for version, more in (("0.16.1", {}), ("0.19.2", {"q_lora_rank": 32})):
        monkeypatch.setattr(versions, "core_version", lambda version=version: version)
        check_settings(dataclasses.replace(SETTINGS, transformer={**latent, **more}), shape())
    with pytest.raises(ConfigError, match=r"--qk-layernorm with --multi-latent-attention .* give --q-lora-rank, or"):
        check_settings(dataclasses.replace(SETTINGS, transformer=latent), shape())


def test_untested_core_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_core_version() in TESTED_CORE_VERSIONS
    monkeypatch.setattr(versions, "core_version", lambda: "9.9.9")
    with pytest.raises(ConfigError, match=r"megatron-core 9\.9\.9 is installed.*--spare-allow-untested-core"):
        check_core_version()
    assert check_core_version(allow_untested=True) == "9.9.9"


def fresh(code: str) -> str:
    """Output of a new interpreter, in which every warning is an error."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_settings_need_neither_torch_nor_megatron() -> None:
    code = "import sys; from spare_megatron.megatron_adapter.model import settings; print('torch' in sys.modules)"
    assert fresh(code) == "False"


def test_shims_are_named_installed_once_and_bring_the_core_up_quietly_and_lightly() -> None:
    out = fresh(
        "import sys\n"
        "from spare_megatron.megatron_adapter.shims import CPU_SHIMS, install_cpu_shims\n"
        "first = install_cpu_shims()\n"
        "import torch; once = torch.zeros\n"
        "assert install_cpu_shims() == first == tuple(shim.name for shim in CPU_SHIMS)\n"
        "assert torch.zeros is once and len(set(first)) == len(first)\n"
        "assert all(len(shim.reason) > 20 for shim in CPU_SHIMS)\n"
        "assert torch.zeros(1).type() == 'torch.FloatTensor'\n"
        "print([name for name in ('wandb', 'torch._dynamo') if name in sys.modules])"
    )
    assert out == "[]"


def test_no_shim_with_cuda() -> None:
    out = fresh(
        "import torch; before = torch.zeros, torch.Tensor.cuda, torch.compile\n"
        "torch.cuda.is_available = lambda: True\n"
        "from spare_megatron.megatron_adapter.shims import install_cpu_shims\n"
        "print(install_cpu_shims(), (torch.zeros, torch.Tensor.cuda, torch.compile) == before)"
    )
    assert out == "() True"


def test_loss_sums_of_both_conventions() -> None:
    torch = pytest.importorskip("torch")
    sums = LossSums(tokens_per_microbatch=64)
    sums.add((torch.tensor(3.0), torch.tensor(4), {"lm loss": torch.tensor([6.0, 4.0])}))
    sums.add((torch.tensor(3.0), torch.tensor(2), {"lm loss": torch.tensor([1.0, 2.0])}))
    assert sums.values() == {"tokens": 6.0, "lm loss/sum": 7.0, "lm loss/count": 6.0}
    assert averages(sums.values()) == {"lm loss": 7.0 / 6.0}
    sums.clear()
    sums.add((torch.tensor(0.5), {"lm loss": torch.tensor(0.5), "tokens": 1.5}))
    assert averages(sums.values()) == {"lm loss": 0.5, "tokens": 1.5}
    assert sums.values()["tokens"] == 64.0
    sums.add((0.0, {"x": torch.zeros(3)}))
    with pytest.raises(ValueError, match="3 numbers for 'x'"):
        sums.values()
