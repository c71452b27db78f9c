"""Flag sets that Megatron-LM publishes: its example scripts parse unchanged, most of its GPT functional tests too.

The data files say where they come from. A set that is not supported is refused with one reason a line, never with an
exception; which sets those are, and why, is written down here.
"""

from __future__ import annotations

import functools
import json
import shlex
from collections import Counter
from pathlib import Path

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.trainer.job_arguments import parse_job

DATA = Path(__file__).parent.parent / "data"
DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}
"""What Megatron's pretrain_gpt.py gives, and ours."""
SUPPORTED_MIN = 0.8

# words of the answer -> the kind of refusal, and how many sets are of it; the first that fits counts
REFUSED_KINDS = {
    "reinforcement learning is not part": ("reinforcement learning", 5),
    "inference is not part of this framework": ("inference", 13),
    "--num-layers is missing": ("no flags of a training job", 1),
    "--ckpt-format": ("checkpoints in other formats", 5),
    "--error-injection-rate": ("Megatron's own fault injection", 2),
    "--fim-data": ("fill-in-the-middle data", 1),
    "--export-te-mcore-model": ("distillation with ModelOpt", 1),
}


def answer(words: list[str]) -> str:
    """What ``--spare-check`` says: empty when the flags are good."""
    try:
        parse_job(["--spare-check", *words], {}, None, DEFAULTS)
    except SystemExit as left:
        return "" if left.code == 0 else f"left with {left.code}"
    except ConfigError as error:
        return str(error)
    return "did not leave"


@functools.cache
def functional_sets() -> dict[str, list[str]]:
    """Name of the functional test -> its words."""
    content = json.loads((DATA / "megatron_functional_tests.json").read_text())
    split = [entry.split(" ") if isinstance(entry, str) else entry for entry in content["words"]]
    return {name: [word for place in places for word in split[place]] for name, places in content["sets"].items()}


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    """Name of the functional test -> the answer."""
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()):
        return {name: answer(words) for name, words in functional_sets().items()}


def test_four_of_five_functional_tests_pass_the_check(answers: dict[str, str]) -> None:
    assert len(answers) == 142
    passed = [name for name, said in answers.items() if not said]
    assert len(passed) == 114
    assert len(passed) >= SUPPORTED_MIN * len(answers)


def test_every_other_one_has_an_answer_of_a_known_kind(answers: dict[str, str]) -> None:
    kinds: Counter[str] = Counter()
    for name, said in answers.items():
        assert len(said.splitlines()) <= 11, f"{name}: {said}"
        if said:
            kind = next((kind for words, (kind, _) in REFUSED_KINDS.items() if words in said), None)
            assert kind is not None, f"{name}: {said}"
            kinds[kind] += 1
    assert kinds == dict(REFUSED_KINDS.values())


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
