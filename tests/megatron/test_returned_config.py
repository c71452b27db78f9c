"""The config.json that goes back to Hugging Face has what training changed, and only that."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from spare_megatron.checkpoint.convert.hf_config import shape_of_config
from spare_megatron.checkpoint.convert.returned_config import returned_config
from spare_megatron.cli import convert
from tests.fuzz.hf_configs import FAMILIES, SUPPORTED
from tests.megatron.hugging_face_models import make, run

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def back(
    folder: Path, config: dict[str, Any], kind: str | None = None, **trained: Any
) -> tuple[dict[str, Any], list[str]]:
    """The config that goes back of a model that came with ``config``, when training changed ``trained``."""
    (folder / "config.json").write_text(json.dumps(config))
    shape = dataclasses.replace(shape_of_config(config), **trained)
    return returned_config(folder, shape, kind, torch.float32)


@pytest.mark.parametrize("family", SUPPORTED)
def test_nothing_changes_by_itself(family: str, tmp_path: Path) -> None:
    config = {**FAMILIES[family], "of_a_later_version": [1, {"a": None}]}
    assert back(tmp_path, config) == (config, [])
    assert list(back(tmp_path, config)[0]) == list(config)  # nor does the order


@pytest.mark.parametrize(
    ("family", "trained", "changed"),
    [
        ("llama2", {"norm_epsilon": 1e-3}, {"rms_norm_eps": 1e-3}),
        ("gpt2", {"norm_epsilon": 1e-3}, {"layer_norm_epsilon": 1e-3}),
        ("gpt2", {"hidden_dropout": 0.0}, {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
        ("gpt2", {"attention_dropout": 0.2}, {"attn_pdrop": 0.2}),
        ("gpt2", {"bias_gelu_fusion": False}, {"activation_function": "gelu"}),
        ("qwen3", {"attention_dropout": 0.2}, {"attention_dropout": 0.2}),
        ("qwen2", {"max_position_embeddings": 32}, {}),
        ("qwen2", {"max_position_embeddings": 128}, {"max_position_embeddings": 128}),
        ("mixtral", {"moe_aux_loss_coeff": 0.0}, {}),
        ("mixtral", {"moe_aux_loss_coeff": 0.5}, {"router_aux_loss_coef": 0.5}),
        ("mixtral", {"moe_router_topk": 3}, {"num_experts_per_tok": 3}),
        ("llama3", {"vocab_size": 97, "padded_vocab_size": 128}, {"vocab_size": 97}),
    ],
)
def test_what_training_changed(family: str, trained: dict[str, Any], changed: dict[str, Any], tmp_path: Path) -> None:
    assert back(tmp_path, FAMILIES[family], **trained) == ({**FAMILIES[family], **changed}, [])


def test_a_rotary_embedding_that_changed(tmp_path: Path) -> None:
    """Under its old and its new name, for both are read."""
    config, _ = back(tmp_path, FAMILIES["llama3"], rotary_base=10000, rope_scaling_factor=16.0)
    shape = shape_of_config(config)
    assert (shape.rotary_base, shape.rope_scaling_factor, shape.use_rope_scaling) == (10000, 16.0, True)
    old = {name: value for name, value in config.items() if name != "rope_parameters"}
    new = {name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling")}
    assert shape_of_config(old) == shape_of_config(new) == shape
    rest = FAMILIES["llama3"].keys() - {"rope_theta", "rope_scaling"}
    assert {name: config[name] for name in rest} == {name: FAMILIES["llama3"][name] for name in rest}


def test_a_window_that_training_did_not_have(tmp_path: Path) -> None:
    came = {**FAMILIES["mistral"], "sliding_window": 64}
    assert back(tmp_path, came)[0] == came
    longer = back(tmp_path, came, max_position_embeddings=128)[0]
    assert longer == {**came, "max_position_embeddings": 128, "sliding_window": None}


def test_the_type_is_that_of_the_weights(tmp_path: Path) -> None:
    for name in ("torch_dtype", "dtype"):
        came = {key: value for key, value in FAMILIES["llama2"].items() if key != "torch_dtype"} | {name: "bfloat16"}
        assert back(tmp_path, came)[0] == {**came, name: "float32"}


def test_a_config_of_another_model_is_not_taken(tmp_path: Path) -> None:
    config, notes = back(tmp_path, FAMILIES["llama2"], num_layers=3)
    assert config["num_hidden_layers"] == 3
    assert "it has num_layers 2, the weights have 3" in notes[0]


def test_another_kind_keeps_the_special_ids(tmp_path: Path) -> None:
    config, _ = back(tmp_path, FAMILIES["llama2"], kind="mistral")
    assert (config["model_type"], config["bos_token_id"], config["eos_token_id"]) == ("mistral", 1, 2)
    assert shape_of_config(config) == shape_of_config(FAMILIES["llama2"])


def test_a_kind_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("llama", tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "core", "hf", "core")
    capsys.readouterr()
    for kind in ("gpt2", "qwen3", "mixtral", "qwen2"):
        words = ["--model-type", "GPT", "--loader", "core", "--saver", "hf", "--hf-model", kind]
        assert convert.main([*words, "--load-dir", str(tmp_path / "core"), "--save-dir", str(tmp_path / "x")]) == 2
        error = capsys.readouterr().err
        assert f"--hf-model {kind} does not fit these weights, which are of a llama" in error
        assert error.count("\n") == 1
        assert not (tmp_path / "x").exists()
