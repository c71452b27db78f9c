"""What the installed megatron-core lacks is left out where that changes nothing, or refused in one sentence."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter import core_differences
from spare_megatron.megatron_adapter.shims import install_cpu_shims
from spare_megatron.megatron_adapter.versions import TESTED_CORE_VERSIONS, check_core_version, core_version, release

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass
class OldConfig:
    hidden_size: int = 0
    moe_extended_tp: bool = False
    cuda_graph_scope: tuple[str, ...] = ("full",)


@dataclasses.dataclass
class NewConfig:
    hidden_size: int = 0
    cuda_graph_scope: tuple[str, ...] = ("full",)
    cuda_graph_modules: tuple[str, ...] = ("full",)


def test_fields_go_by_the_names_of_the_version_that_is_there() -> None:
    values = {"hidden_size": 8, "moe_extended_tp": False, "cuda_graph_scope": ()}
    assert core_differences.transformer_fields(OldConfig, values) == values
    assert core_differences.transformer_fields(NewConfig, values) == {"hidden_size": 8, "cuda_graph_modules": ()}
    with pytest.raises(
        ConfigError, match=r"moe_extended_tp is True, but megatron-core .* no such setting in its NewCon"
    ):
        core_differences.transformer_fields(NewConfig, {**values, "moe_extended_tp": True})
    with pytest.raises(ConfigError, match=r"warp is 9, but .*; leave its flag out or install megatron-core 0\.16\.0, "):
        core_differences.transformer_fields(OldConfig, {"warp": 9})


def test_a_core_whose_inside_is_another_is_one_sentence_that_names_version_and_module() -> None:
    install_cpu_shims()
    with pytest.raises(ImportError) as caught:
        exec("from megatron.core.utils import no_such_name_ever", {})
    error = core_differences.explain_import(caught.value)
    assert error is not None
    reported = str(error)
    assert "\n" not in reported
    for part in ("cannot import name 'no_such_name_ever'", "(megatron.core.utils)", ".".join(map(str, release()))):
        assert part in reported
    assert reported.endswith(
        f"install megatron-core {', '.join(TESTED_CORE_VERSIONS[:-1])} or {TESTED_CORE_VERSIONS[-1]}"
    )
    assert core_differences.explain_import(ImportError("no", name="numpy")) is None


def test_an_untested_core_is_refused_unless_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spare_megatron.megatron_adapter.versions.core_version", lambda: "0.21.0")
    assert check_core_version(allow_untested=True) == "0.21.0"
    with pytest.raises(ConfigError, match=r"0\.21\.0 is installed, but .* pass --spare-allow-untested-core"):
        check_core_version()


def test_a_core_that_is_no_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise importlib.metadata.PackageNotFoundError("megatron-core")

    monkeypatch.setattr("spare_megatron.megatron_adapter.versions.core_version", none)
    with pytest.raises(ConfigError, match=r"not installed as a package; the one in .*core is not: take its folder out"):
        check_core_version(allow_untested=True)
    monkeypatch.setattr("spare_megatron.megatron_adapter.versions.imported_core", lambda: None)
    with pytest.raises(ConfigError, match=r"^megatron-core is not installed as a package; pip install megatron-core$"):
        check_core_version()


def test_a_core_that_hides_the_installed_one_is_named_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "megatron" / "core"
    checkout.mkdir(parents=True)
    (checkout / "__init__.py").touch()
    (checkout / "package_info.py").write_text("MAJOR = 0\nMINOR = 20\nPATCH = 0\nPRE_RELEASE = 'rc0'\n")
    script = tmp_path / "pretrain_own.py"
    script.write_text("from spare_megatron.megatron_adapter.versions import check_core_version as c\nc()\n")

    def run() -> subprocess.CompletedProcess[str]:
        where = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run([sys.executable, str(script)], env=where, capture_output=True, text=True)

    assert f"but import megatron.core finds 0.20.0rc0 in {checkout}; run the script from" in run().stderr
    numbers = zip(("MAJOR", "MINOR", "PATCH"), core_version().split("."), strict=True)
    reported = "".join(f"{name} = {value}\n" for name, value in numbers)
    (checkout / "package_info.py").write_text(f'{reported}PRE_RELEASE = ""\n')
    assert run().returncode == 0
    (checkout / "package_info.py").unlink()
    assert run().returncode == 0


def test_tokenizers_get_flags_by_old_and_new_names_and_change_none(monkeypatch: pytest.MonkeyPatch) -> None:
    args = Namespace(
        tokenizer_hf_use_fast=True,
        tokenizer_hf_include_special_tokens=False,
        tokenizer_special_tokens=["<a>"],
        tokenizer_metadata=None,
    )
    before = dict(vars(args))
    flags = core_differences._tokenizer_flags(args)
    assert (flags.tokenizer_hf_no_use_fast, flags.tokenizer_hf_no_include_special_tokens) == (False, True)
    assert (flags.special_tokens, flags.tokenizer_special_tokens) == (["<a>"], ["<a>"])
    flags.padded_vocab_size = 128
    assert vars(args) == before


def test_only_megatron_cores_own_remarks_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_differences, "deprecations", [])
    quiet = core_differences.QuietLogs()

    def kept(name: str, text: str) -> bool:
        return quiet.filter(logging.LogRecord(name, logging.WARNING, "", 0, text, (), None))

    for _ in range(2):  # one for each model chunk
        assert not kept("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED: use another")
    assert not kept("megatron.core.optimizer", "load_common is deprecated")
    assert core_differences.deprecations == ["GPTModel IS DEPRECATED: use another"], "a job shows it once"
    assert kept("megatron.core.models.gpt.gpt_model", "loss is NaN")
    assert kept("users.script", "GPTModel IS DEPRECATED")
