"""The command line: every Megatron flag is honoured, refused with a reason or always so; names and defaults hold."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.flags import document, no_effect, parser, refusals
from spare_megatron.flags.specs import MORE_CHOICES, SECTIONS, docs_of, megatron_table, own_specs
from spare_megatron.flags.supported import all_specs
from spare_megatron.worker.job_arguments import parse_job
from tests.pure.flags_of_a_job import SMALL, job_of

FROZEN = Path(__file__).parent / "flags.txt"

# destination -> why its default is not Megatron-LM's
OTHER_DEFAULTS = {
    "transformer_impl": "None: transformer-engine where it is there, else megatron-core's layers",
    "distributed_backend": "None: nccl with CUDA, else gloo",
    "rerun_mode": "suspicious steps are found by votes, so Megatron's re-run is off",
    "no_save_optim": "a switch that is not given is False, not None",
    "no_load_optim": "a switch that is not given is False, not None",
    "yarn_correction_range_round_to_int": "True, as megatron-core's embedding has it, not None",
    "moe_layer_freq": "read as a word first, then '1' becomes 1",
    "moe_router_load_balancing_type": "read as several words first, then a single one becomes a word",
    "moe_aux_loss_coeff": "read as several numbers first, then a single one becomes a number",
}


# destination -> why its kind is not Megatron-LM's
OTHER_KINDS = {
    "save_interval": "a number of steps, or auto",
    "yarn_correction_range_round_to_int": "of its two flags one says what is so without it",
}


def line_of(spec: parser.FlagSpec) -> str:
    choices = "|".join(str(choice) for choice in spec.choices)
    return f"{' '.join(spec.names)} : {spec.kind}{spec.nargs} = {spec.default!r} {choices}".rstrip()


OWN_SECTIONS = ("spare", "ademamix")
"""Sections of flags that Megatron-LM does not have."""
OLDER_CHOICES = {"no_weight_decay_cond_type": ["qwen3_next"], "lr_wsd_decay_style": ["1-sqrt"]}
"""What Megatron-LM took before it was named anew, or a Megatron that was taken from it still does."""


def test_the_list_of_flags_is_frozen() -> None:
    """A flag that is added, taken away or changed is a decision: write tests/pure/flags.txt anew with the command."""
    lines = "".join(line_of(spec) + "\n" for spec in sorted(all_specs(), key=lambda spec: spec.names))
    if "--rewrite" in sys.argv:
        FROZEN.write_text(lines)
        document.TARGET.write_text(document.text())
    assert FROZEN.read_text() == lines, f"write it anew: {sys.executable} -m tests.pure.test_flags --rewrite"


def test_every_flag_of_megatron_has_exactly_one_fate() -> None:
    honoured = {name for spec in all_specs() for name in spec.names}
    refused, always = refusals.refused_names(), no_effect.taken()
    known = {name for row in megatron_table().values() for name in row["names"]}
    for name in known:
        assert (name in honoured) + (name in refused) + (name in always) == 1, name
    assert not (refused.keys() | always.keys()) - known, "only flags that Megatron has are refused"
    own = {name for spec in own_specs() if spec.section in OWN_SECTIONS for name in spec.names}
    assert honoured - known == own


def test_honoured_flags_have_the_names_kinds_and_defaults_of_megatron() -> None:
    for spec in all_specs():
        row = megatron_table().get(spec.dest)
        if row is None:
            assert spec.section in OWN_SECTIONS
            continue
        assert list(spec.names) == [name for name in row["names"] if name not in no_effect.taken()], spec
        assert (spec.kind == row["kind"]) == (spec.dest not in OTHER_KINDS), spec
        more = [*OLDER_CHOICES.get(spec.dest, []), *MORE_CHOICES.get(spec.dest, [])]
        assert list(spec.choices) == row.get("choices", []) + more, spec
        assert (spec.nargs or None) == row.get("nargs"), spec
        assert (spec.default == row["default"]) == (spec.dest not in OTHER_DEFAULTS), spec


def test_every_refused_flag_is_refused_by_its_reason() -> None:
    for name, refusal in refusals.refused_names().items():
        with pytest.raises(ConfigError) as error:
            parser.parse([name, "1"])
        assert str(error.value) == refusal.sentence(name)
        assert len(refusal.reason) > 10


def test_all_refused_flags_are_notified_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        parser.parse(["--qk-clip", "--sft", "--num-layers", "4", "--log-max-attention-logit", "--sft"])
    first, second = str(error.value).splitlines()
    assert first.startswith("--qk-clip and --log-max-attention-logit are not supported: ")
    assert second.startswith("--sft is not supported: ")
    with pytest.raises(ConfigError) as error:
        parser.parse(list(refusals.refused_names()))
    assert len(str(error.value).splitlines()) == refusals.LINES_MAX + 1


def test_refused_values_belong_to_honoured_flags() -> None:
    choices = {spec.dest: spec.choices for spec in all_specs()}
    for dest, value in refusals.VALUES:
        assert value in choices[dest] or not choices[dest], (dest, value)
        with pytest.raises(ConfigError, match="is not supported"):
            parser.parse(["--" + dest.replace("_", "-"), str(value)])


# honoured flags that no module of ours names -> who reads them
READ_ELSEWHERE = {
    "rerun_mode": "refusals.VALUES leaves one value",
    "ckpt_format": "no_effect.VALUES says of every other value that one format is written",
    **dict.fromkeys(("eval_global_batch_size", "eval_micro_batch_size"), "validate: only the training's sizes"),
    "yaml_cfg": "replaced by what the file says before flags are read",
    "add_position_embedding": "validate: only with rope, which has no other embedding",
    **dict.fromkeys(("rotary_scaling_factor", "mscale", "mscale_all_dim"), "MLATransformerConfig, by its table"),
    **dict.fromkeys(
        (
            "tokenizer_sentencepiece_legacy",
            "tokenizer_hf_use_fast",
            "tokenizer_hf_include_special_tokens",
            "trust_remote_code",
            "tiktoken_pattern",
            "tiktoken_num_special_tokens",
        ),
        "megatron-core's tokenizer builder reads the namespace",
    ),
}


def names_read() -> set[str]:
    """Attributes and words of all modules except those that declare, refuse or validate flags."""
    declaring = (
        "config/sections.py",
        "config/spare.py",
        "flags/refusals.py",
        "flags/refused_flags.py",
        "flags/validate.py",
    )
    package = Path(refusals.__file__).parents[1]
    names: set[str] = set()
    for path in [*package.rglob("*.py"), package.parent / "pretrain_gpt.py"]:
        if str(path).endswith(declaring):
            continue
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        names |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return names


def test_no_flag_is_taken_and_then_ignored() -> None:
    names, splits = names_read(), {f"{split}_data_path" for split in ("train", "valid", "test")}
    for spec in own_specs():
        read = spec.dest in names or spec.dest.removeprefix("spare_") in names or spec.dest in splits
        assert read or spec.dest in READ_ELSEWHERE, (
            f"{spec.names[0]} is taken and nobody reads it: honour it, or refuse it in refusals.py"
        )


def test_every_unknown_flag_is_named_beside_the_refused_ones() -> None:
    with pytest.raises(ConfigError) as error:
        parser.parse(["--qk-clip", "--num-layer", "4", *(f"--other-{n}" for n in range(9)), "--seq-length", "8"])
    lines = str(error.value).splitlines()
    assert lines[0] == "there is no flag --num-layer; did you mean --num-layers?"
    assert lines[4] == "nor are there flags --other-3 --other-4 --other-5 --other-6 --other-7 --other-8"
    assert lines[5].startswith("--qk-clip is not supported: ")
    assert len(lines) == 6


def test_older_and_newer_ways_to_say_the_same() -> None:
    job, namespace = parse_job(
        [*SMALL.split(), *["--eval-iters", "-1", "--rotary-base", "500000.0", "--position-embedding-type", "rope"],
         *["--no-weight-decay-cond-type", "apply_wd_to_qk_layernorm", "--enable-experimental"]]
    )  # fmt: skip
    assert (job.evaluation.eval_iters, job.model.rotary_base, namespace.apply_wd_to_qk_layernorm) == (0, 500000, True)
    assert job.optimizer["apply_wd_to_qk_layernorm"]
    assert job.settings(128).experimental
    with pytest.raises(ConfigError, match=r"--rotary-base: takes a whole number, but got '1000\.5'"):
        parser.parse(["--rotary-base", "1000.5"])


def test_the_flex_dispatcher_is_alltoall_and_said() -> None:
    words = f"{SMALL} --num-experts 4 --disable-bias-linear --moe-token-dispatcher-type flex --moe-deepep-num-sms 20"
    job, namespace = parse_job([*words.split(), "--moe-flex-dispatcher-backend", "hybridep"])
    assert job.transformer["moe_token_dispatcher_type"] == "alltoall"
    reported = " ".join(namespace.spare_notes)
    for flag in ("--moe-token-dispatcher-type flex", "--moe-deepep-num-sms", "--moe-flex-dispatcher-backend"):
        assert flag in reported


def test_flags_without_effect_are_taken_with_their_values_and_said_once() -> None:
    switches = [name for row in megatron_table().values() if row["kind"] in ("on", "off") for name in row["names"]]
    words = [*SMALL.split(), *(name for name in no_effect.taken() if name in switches), "--local-rank", "3"]
    job, namespace = parse_job([*words, "--ddp-bucket-size", "7"])
    assert job.shape == job_of()[0].shape
    assert (namespace.overlap_param_gather, namespace.local_rank, namespace.ddp_bucket_size) == (True, 3, 7)
    reported = " ".join(job.notes)
    assert all(name in reported for name in words[len(SMALL.split()) :] if name.startswith("--"))
    assert len(job.notes) == len(set(job.notes))
    assert parse_job([*SMALL.split(), "--local-rank=3", "--num-workers", "1"])[0].data.num_workers == 1
    assert job_of()[0].notes == ()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--num-layer 4", "there is no flag --num-layer; did you mean --num-layers?"),
        ("--spare-redundncy 2", "there is no flag --spare-redundncy; did you mean --spare-redundancy?"),
        ("--xqzw", r"there is no flag --xqzw \(see --help\)"),
        ("--num-layers x", "--num-layers: takes a whole number, but got 'x'"),
        ("--num-layers 2.5", "--num-layers: takes a whole number, but got '2.5'"),
        ("--lr fast", "--lr: takes a number, but got 'fast'"),
        ("--lr nan", "--lr: takes a finite number, but got 'nan'"),
        ("--lr", "--lr: expected one argument"),
        ("4", "the word '4' belongs to no flag"),
        ("--lr-decay-style square", "--lr-decay-style: invalid choice: 'square'"),
        ("--spare-redundancy two", "--spare-redundancy: takes 'auto' or a whole number, but got 'two'"),
        ("--sft", "--sft is not supported: supervised fine-tuning"),
        (
            "--optimizer adaptive_muon",
            "--optimizer adaptive_muon is not supported: its first step fails in megatron-core",
        ),
        ("--fp4-format=e2m1", "--fp4-format is not supported: .*; use --fp8-format or --bf16"),
    ],
)
def test_a_bad_word_is_one_sentence(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        parser.parse(words.split())
    assert "\n" not in str(error.value)


def test_users_own_flags_are_read_even_under_a_refused_name() -> None:
    def mine(arguments: parser.Parser) -> parser.Parser:
        arguments.add_argument("--sample-rate", type=int, default=1)
        arguments.add_argument("--my-flag", default="a")
        return arguments

    _, namespace = parse_job([*SMALL.split(), "--my-flag", "b", "--sample-rate", "5"], {}, mine)
    assert (namespace.my_flag, namespace.sample_rate) == ("b", 5)
    with pytest.raises(ConfigError, match="did you mean --my-flag"):
        parse_job([*SMALL.split(), "--my-flg", "b"], {}, mine)


def test_defaults_of_the_script_count_where_a_flag_says_nothing() -> None:
    words = SMALL.replace("--tokenizer-type NullTokenizer", "").split()
    job, _ = parse_job(words, {}, None, {"tokenizer_type": "NullTokenizer", "seq_length": 7})
    assert (job.tokenizer.tokenizer_type, job.seq_length) == ("NullTokenizer", 64)


def test_the_namespace_has_every_destination_of_megatron() -> None:
    _, namespace = job_of()
    assert set(megatron_table()) <= set(vars(namespace)) | {"deprecated_use_mcore_models"}
    assert namespace.sft is False
    assert namespace.fim_data is False


def test_help_has_every_flag_with_words() -> None:
    text = parser.help_text()
    for spec in all_specs():
        assert spec.names[0] in text
    for _, cls in SECTIONS.values():
        assert docs_of(cls).keys() == cls.__dataclass_fields__.keys(), f"{cls.__name__}: a field without a docstring"


def test_help_has_megatrons_groups_in_their_order_and_examples() -> None:
    text = parser.help_text()
    titles = [line.removesuffix(":") for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    shown = {row["dest"] for row in megatron_table().values()} & {spec.dest for spec in all_specs()}
    groups = [row["group"] for row in megatron_table().values() if row["dest"] in shown]
    assert [title for title in titles if title in groups] == list(dict.fromkeys(groups))
    assert text.count("spare-launch --num-groups") == 2


def test_the_page_of_flags_is_current() -> None:
    command = f"{sys.executable} -m tests.pure.test_flags --rewrite"
    assert document.TARGET.read_text() == document.text(), f"write it anew: {command}"


CHECK = """
import sys, time
start = time.monotonic()
from spare_megatron.config.errors import ConfigError
from spare_megatron.worker.job_arguments import parse_job
try:
    parse_job(sys.argv[1:])
except ConfigError as error:
    print(error)
print([name for name in ("torch", "megatron.core", "numpy") if name in sys.modules])
"""


def test_a_bad_flag_is_refused_without_importing_torch_or_megatron() -> None:
    words = [*SMALL.split(), "--spare-redundancy", "9"]
    done = subprocess.run(
        [sys.executable, "-c", CHECK, *words], capture_output=True, text=True, timeout=30, check=True
    ).stdout.splitlines()
    assert done == [
        "--spare-redundancy 9 is not between 1 and the 1 groups of the job; use --spare-redundancy 1 or more groups",
        "[]",
    ]


if __name__ == "__main__":
    test_the_list_of_flags_is_frozen()
