"""Flag sets that Megatron-LM publishes: its example scripts parse unchanged, nine of ten of the GPT and MoE
configurations that its functional tests train pass the check, and most of those of hybrid models.

The data files say where they come from. A set that is not supported is refused with one reason a line, never with an
exception; how many sets that are, and why, is written down here.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from pathlib import Path

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.worker.job_arguments import parse_job
from tests.pure.functional_sets import DATA, answer, answers_of

SUPPORTED_MIN = 0.85

TRAINED = {"gpt": (155, 161), "moe": (47, 51), "mixtral": (8, 8), "hybrid": (5, 7), "nemotron": (3, 4)}
"""Folder -> the configurations that train and pass, and all that train."""

# a line of the answer -> what the set asks for, and how many sets of each folder are refused for it
REFUSED = {
    "global_aux_loss is not supported": {"moe": 2},
    "a suspicious step is not computed again": {"gpt": 3},
    "distillation and quantization with NVIDIA ModelOpt": {"gpt": 2, "hybrid": 2},
    "supervised fine-tuning needs a data set of packed": {"hybrid": 1},
    "it changes how weights lie in memory and in checkpoints": {"nemotron": 1},
    "there is no flag --": {"hybrid": 4},  # of another script, and the next
    "nor are there flags --": {"hybrid": 1},
    "offloading to host memory": {"moe": 2},
    "sparse attention needs its indexer's loss": {"gpt": 1},
}
OF_NO_TRAINING = {
    "inference": "inference is not part of this framework",
    "reinforcement learning": "reinforcement learning is not part of this framework",
}


def test_nine_of_ten_configurations_that_train_pass_the_check(answers: dict[str, str]) -> None:
    passed = Counter(name.partition("/")[0] for name, reported in answers.items() if not reported)
    everyone = Counter(name.partition("/")[0] for name in answers)
    assert {folder: (passed[folder], everyone[folder]) for folder in everyone} == TRAINED
    assert passed.total() >= SUPPORTED_MIN * len(answers)


def test_every_other_one_is_given_all_that_is_in_its_way(answers: dict[str, str]) -> None:
    reported: dict[str, Counter[str]] = {words: Counter() for words in REFUSED}
    for name, answer_of_check in answers.items():
        for line in answer_of_check.splitlines():
            (words,) = (words for words in REFUSED if words in line)
            assert " supported: " in line or " flag" in words, f"{name}: {line}"
            reported[words][name.partition("/")[0]] += 1
    assert reported == REFUSED


@pytest.mark.parametrize("kind", OF_NO_TRAINING)
def test_what_does_not_train_is_notified(kind: str) -> None:
    for name, reported in answers_of(kind).items():
        assert OF_NO_TRAINING[kind] in reported, f"{name}: {reported}"
        assert len(reported.splitlines()) <= 11, f"{name}: {reported}"


@pytest.mark.parametrize("script", json.loads((DATA / "megatron_examples.json").read_text())["scripts"])
def test_published_example_scripts_parse_unchanged(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = json.loads((DATA / "megatron_examples.json").read_text())["scripts"][script]
    assert answer(shlex.split(text)) == ""
    out = capsys.readouterr().out
    assert out.startswith("the flags are good\n")
    if "llama3" in script:
        assert "transformer-engine, for --fp8-format hybrid" in out
        assert "--fp8-format hybrid: gradients are summed over groups in fp32, not exactly" in out
    if "mixtral" in script:
        assert "inner data 8" in out, "experts are carved out of a group's data-parallel ranks"


YAML = """
language_model:
  num_layers: 4
  hidden_size: ${WIDTH}
  num_attention_heads: 4
  activation_func: swiglu
  num_query_groups: null
  layernorm_epsilon: 1.e-6
  rotary_interleaved: False
  clone_scatter_output_in_embedding: True
model_parallel:
  tensor_model_parallel_size: 1
  bf16: True
micro_batch_size: 1
global_batch_size: 8
rampup_batch_size: [4, 4, 40]
train_samples: 100
seq_length: 64
max_position_embeddings: 64
lr: 1.e-3
add_position_embedding: True
tokenizer_type: NullTokenizer
vocab_size: 100
mock_data: True
profile_ranks: [0]
"""


def test_a_yaml_file_stands_for_flags_and_flags_beside_it_win(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(YAML)
    job, namespace = parse_job(["--yaml-cfg", str(path), "--lr", "0.5"], {"WIDTH": "64"})
    assert (namespace.hidden_size, namespace.bf16, namespace.swiglu) == (64, True, True)
    assert job.transformer["layernorm_epsilon"] == 1e-6
    assert (namespace.lr, namespace.rampup_batch_size, job.train_iters) == (0.5, [4, 4, 40], 17)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("hidden_size: ${WIDTH}", "hidden_sise: 64"), "there is no setting hidden_sise; did you mean hidden_size"),
        (("bf16: True", '"a\\nb": 1'), r"there is no setting 'a\\nb'"),
        (("bf16: True", "bf16: 1"), "bf16 is 1, but takes true or false"),
        (("swiglu", "tanh"), "activation_func 'tanh' is not supported; use one of swiglu"),
        (
            ("rotary_interleaved: False", "fp8_dot_product_attention: True"),
            "fp8_dot_product_attention True is .* no flag sets it",
        ),
        (("", "sft: True"), "--sft is not supported"),
        (("mock_data: True", "mock_data: [True"), "is not YAML"),
    ],
)
def test_a_bad_yaml_file_is_one_sentence(tmp_path: Path, change: tuple[str, str], sentence: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(YAML.replace(*change) if change[0] else YAML + change[1] + "\n")
    with pytest.raises(ConfigError, match=sentence) as error:
        parse_job([f"--yaml-cfg={path}"], {"WIDTH": "64"})
    assert "\n" not in str(error.value)


def test_a_yaml_file_may_name_what_the_environment_lacks(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(YAML)
    with pytest.raises(ConfigError, match=r"hidden_size is '.*', but WIDTH is not in the environment; export it"):
        parse_job([f"--yaml-cfg={path}"], {})
