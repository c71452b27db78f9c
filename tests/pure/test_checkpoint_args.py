"""``--use-checkpoint-args``: what is taken, which side counts, what is refused; nothing of the file is ever run."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.checkpoint import folder
from spare_megatron.checkpoint.files import entries_of
from spare_megatron.checkpoint.saved_args import plain, read_args
from spare_megatron.cli import launch
from spare_megatron.config.errors import ConfigError
from spare_megatron.flags import checkpoint_args
from spare_megatron.flags.specs import megatron_table
from spare_megatron.flags.supported import all_specs
from spare_megatron.worker.job_arguments import JobArguments, parse_job

SAVED = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "kv_channels": 32,
    "num_query_groups": 2,
    "group_query_attention": True,
    "seq_length": 64,
    "max_position_embeddings": 128,
    "position_embedding_type": "rope",
    "rotary_base": 500000.0,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "add_bias_linear": False,
    "swiglu": True,
    "qk_layernorm": True,
    "hidden_dropout": 0.0,
    "num_experts": None,
    "padded_vocab_size": 256,
    "tokenizer_type": "NullTokenizer",
    "tokenizer_model": None,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 1,
    "lr": 7.0,
}
REST = "--mock-data --vocab-size 200 --micro-batch-size 1 --train-iters 20 --lr 1e-3"


def write_common(directory: Path, content: bytes) -> None:
    """``common.pt`` in torch's form: an archive with a pickle in it."""
    directory.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(directory / "common.pt", "w") as archive:
        archive.writestr("common/data.pkl", content)
        archive.writestr("common/version", "3")
    (directory / "metadata.json").write_text("{}")


def checkpoint(save: Path, step: int = 10, **other: Any) -> Path:
    """The args of a small Llama, changed by ``other``, as step ``step`` of ``save``; with a manifest."""
    directory = save / folder.iteration_name(step)
    common = {"iteration": step, "args": Namespace(**{**SAVED, **other}), "checkpoint_version": 3.0}
    write_common(directory, pickle.dumps(common))
    folder.write_manifest(directory, entries_of(directory))
    return directory


def test_a_checkpoint_whose_args_cannot_be_found_is_one_sentence(tmp_path: Path) -> None:
    """megatron-core 0.19 has no common.pt; what leads to the args may be damaged like any file."""
    directory = tmp_path / folder.iteration_name(10)
    directory.mkdir()
    (directory / "metadata.json").write_text("{}")
    assert f"{directory / 'common.pt'} is missing" in refusal(tmp_path)
    for content in (b"", b"no pickle", pickle.dumps({"storage_data": {}}), pickle.dumps(Namespace(storage_data={}))):
        (directory / ".metadata").write_bytes(content)
        reported = refusal(tmp_path)
        assert f"{directory / '.metadata'} cannot be read: " in reported
        assert "\n" not in reported


def job_of(load: Path, extra: str = "", environ: dict[str, str] | None = None) -> tuple[JobArguments, Namespace]:
    words = [*REST.split(), "--use-checkpoint-args", "--load", str(load), *extra.split()]
    return parse_job(words, environ)


def refusal(load: Path, extra: str = "") -> str:
    with pytest.raises(ConfigError) as error:
        job_of(load, extra)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_job_without_a_shape_flag_has_the_shape_of_its_checkpoint(tmp_path: Path) -> None:
    where = checkpoint(tmp_path).rename(tmp_path / folder.RELEASE)
    job, ns = job_of(tmp_path, "--finetune")
    wanted = {name: value for name, value in SAVED.items() if name in (*checkpoint_args.MODEL, *checkpoint_args.SIZES)}
    assert {name: getattr(ns, name) for name in wanted} == wanted
    assert (ns.seq_length, ns.max_position_embeddings, ns.padded_vocab_size) == (64, 128, 256)
    assert (ns.layernorm_epsilon, ns.tokenizer_type, ns.lr) == (1e-6, "NullTokenizer", 1e-3)
    assert job.shape.group_size == 1, "TP and PP are the command line's"
    assert job.transformer["qk_layernorm"] is True
    assert type(ns.rotary_base) is int
    (reported,) = (note for note in job.notes if note.startswith("--use-checkpoint-args: "))
    assert "num_layers 4, " in reported
    assert reported.endswith(f"from {where}")
    assert "rotary_percent" not in reported, "it is what it would be anyway"


@pytest.mark.parametrize(
    ("given", "sizes", "others"),
    [
        ({}, "", []),
        ({"num_attention_heads": 8}, "--num-attention-heads 4, but this job's has 8", []),
        ({"num_layers": 2}, "--num-layers 4, but this job's has 2", []),
        ({"num_layers": 2, "hybrid_layer_pattern": "*-"}, "", []),
        ({"position_embedding_type": "none"}, "", ["position_embedding_type rope, here none"]),
        ({"rotary_base": 10000}, "", ["rotary_base 500000.0, here 10000"]),
        ({"qk_layernorm": False, "lr": 1.0}, "", ["qk_layernorm True, here False"]),
        ({"moe_router_topk": 7, "num_experts": None}, "", []),
    ],
)
def test_weights_of_the_same_shapes_are_not_those_of_another_model(
    tmp_path: Path, given: dict[str, Any], sizes: str, others: list[str]
) -> None:
    """Other heads, or other positions, load without a word from anyone."""
    args = read_args(checkpoint(tmp_path, moe_router_topk=2, swiglu=True))
    _, ns = job_of(tmp_path)
    ns = Namespace(**{**vars(ns), **given})
    reported = checkpoint_args.other_sizes(ns, args, tmp_path)
    assert sizes in reported
    assert bool(reported) == bool(sizes)
    assert checkpoint_args.other_model(ns, args) == others


@pytest.mark.parametrize(
    ("saved", "now", "tensor", "found"),
    [
        (256, 256, 2, ""),
        (None, 256, 2, ""),
        (128, 256, 2, "128 more have new weights, so the loss is another; --padded-vocab-size 128 goes on with"),
        (256, 128, 1, "the last 128 are left out, so the loss is another; --padded-vocab-size 256 goes on with"),
        (129, 256, 2, "127 more have new weights, so the loss is another$"),
        (64, 128, 1, "64 more have new weights, so the loss is another$"),
    ],
)
def test_rows_that_no_token_has_count_in_the_loss(
    tmp_path: Path, saved: int | None, now: int, tensor: int, found: str
) -> None:
    """Their number follows from the tensor-parallel size."""
    ns = Namespace(padded_vocab_size=now, spare_vocabulary_ids=100, tensor_model_parallel_size=tensor)
    reported = checkpoint_args.other_rows(ns, {"padded_vocab_size": saved}, tmp_path)
    assert bool(reported) == bool(found)
    assert re.search(found, reported)


def test_a_hybrid_model_has_more_layers_than_the_gpt_that_is_refused_elsewhere(tmp_path: Path) -> None:
    """Where the sentence says what to do."""
    checkpoint(tmp_path)
    _, ns = job_of(tmp_path)
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        saved = {**vars(ns), "num_layers": 2 * ns.num_layers, "hybrid_layer_pattern": None}
        assert "--num-layers" in checkpoint_args.other_sizes(ns, saved, tmp_path)
        assert checkpoint_args.other_sizes(ns, {**saved, name: "*-*-"}, tmp_path) == ""


def test_the_check_shows_what_came_from_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = checkpoint(tmp_path)
    with pytest.raises(SystemExit):
        job_of(tmp_path, "--spare-check --seq-length 32 --rotary-base 10000")
    out = capsys.readouterr().out
    shown = out[out.index(f"from the checkpoint {where}:\n") :]
    assert "\n  num_layers = 4\n" in shown
    assert f"  --seq-length 32 is given, but {where} was saved with 64: the command line's counts\n" in shown
    assert f"  --rotary-base 10000 is given, but {where} was saved with 500000: the checkpoint's counts\n" in shown


@pytest.mark.parametrize(
    ("words", "dest", "value", "sentence"),
    [
        ("--hidden-dropout 0.2", "hidden_dropout", 0.0, "--hidden-dropout 0.2 .* saved with 0.0: the checkpoint's"),
        ("--squared-relu", "squared_relu", False, "--squared-relu is given, .* saved without it: the checkpoint's"),
        ("--num-experts 4", "num_experts", None, "--num-experts 4 is given, .* saved without it: the checkpoint's"),
        ("--seq-length 32", "seq_length", 32, "--seq-length 32 is given, .* saved with 64: the command line's"),
        ("--encoder-seq-length 32", "seq_length", 32, "--seq-length 32 is given, .* with 64: the command line's"),
        ("--norm-epsilon 1e-3", "layernorm_epsilon", 1e-3, "--norm-epsilon 0.001 .* with 1e-06: the command line's"),
        ("--padded-vocab-size 512", "padded_vocab_size", 512, "--padded-vocab-size 512 .* 256: the command line's"),
        ("--tokenizer-type TikTokenizer", "tokenizer_type", "NullTokenizer", "TikTokenizer .*: the checkpoint's"),
    ],
)
def test_a_flag_that_contradicts_is_said_with_both_values_and_which_counts(
    tmp_path: Path, words: str, dest: str, value: Any, sentence: str
) -> None:
    checkpoint(tmp_path, squared_relu=False)
    job, ns = job_of(tmp_path, words)
    assert getattr(ns, dest) == value
    (reported,) = (note for note in job.notes if " is given, but " in note)
    assert re.search(sentence, reported), reported


def test_equal_values_are_no_contradiction(tmp_path: Path) -> None:
    checkpoint(tmp_path, num_experts=4, moe_layer_freq=[0, 1, 0, 1], window_size=(7, 0))
    extra = "--num-layers 4 --swiglu --moe-layer-freq ([0]+[1])*2 --window-size 7,0 --rotary-base 500000"
    job, ns = job_of(tmp_path, extra)
    assert not [note for note in job.notes if " is given, but " in note]
    assert (ns.moe_layer_freq, ns.window_size) == ([0, 1, 0, 1], (7, 0))


@pytest.mark.parametrize("words", ["--num-layers 6", "--hidden-size 128", "--kv-channels=16", "--encoder-num-layers 6"])
def test_another_size_is_refused(tmp_path: Path, words: str) -> None:
    where = checkpoint(tmp_path)
    reported = refusal(tmp_path, words)
    flag, value = words.replace("=", " ").replace("encoder-", "").split()
    saved = SAVED[flag.removeprefix("--").replace("-", "_")]
    assert reported == (
        f"{flag} {value} is given, but with --use-checkpoint-args the model of {where} counts, which has {saved}; "
        f"leave {flag} out"
    )


def test_learned_positions_are_weights(tmp_path: Path) -> None:
    checkpoint(tmp_path, position_embedding_type="learned_absolute")
    assert "leave --max-position-embeddings out" in refusal(tmp_path, "--max-position-embeddings 256")
    checkpoint(tmp_path)
    assert job_of(tmp_path, "--max-position-embeddings 256")[1].max_position_embeddings == 256


def test_the_tokenizer_may_stay_that_of_the_command_line(tmp_path: Path) -> None:
    checkpoint(tmp_path, tokenizer_type="HuggingFaceTokenizer", tokenizer_model="there")
    assert job_of(tmp_path)[1].tokenizer_model == "there"
    own = "--no-use-tokenizer-model-from-checkpoint-args --tokenizer-type NullTokenizer"
    ns = job_of(tmp_path, own)[1]
    assert (ns.tokenizer_type, ns.tokenizer_model) == ("NullTokenizer", None)


def test_degrees_of_parallelism_are_taken_when_asked_for_and_the_launcher_knows_them(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    words = [*REST.split(), "--use-checkpoint-args", "--load", str(tmp_path), "--use-mp-args-from-checkpoint-args"]
    assert parse_job(words)[0].shape.group_size == 4
    options = ["--num-groups", "2", "--run-dir", str(tmp_path / "run"), "pretrain_gpt.py", *words]
    assert launch.launch_of(launch.parser().parse_args(options)).group_size == 4
    words.remove("--use-checkpoint-args")
    with pytest.raises(ConfigError, match="--use-mp-args-from-checkpoint-args is only for --use-checkpoint-args; add"):
        parse_job(words)


def test_a_script_may_ask_for_it(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    words = [*REST.split(), "--load", str(tmp_path)]
    assert parse_job(words, None, None, {"use_checkpoint_args": True})[1].num_layers == 4
    with pytest.raises(ConfigError, match="--num-layers is missing"):
        parse_job(words)


def test_without_a_directory_or_without_args_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        parse_job([*REST.split(), "--use-checkpoint-args"])
    assert str(error.value) == (
        "--use-checkpoint-args needs --load, the directory of the checkpoint whose args are taken; give it"
    )
    where = tmp_path / "iter_0000010"
    for common in ({"iteration": 10}, {"iteration": 10, "args": Namespace(consumed_train_samples=3)}):
        write_common(where, pickle.dumps(common))
        assert refusal(tmp_path) == (
            f"--use-checkpoint-args: the checkpoint in {where} was saved without args, so its model is not known; "
            "leave --use-checkpoint-args out and give the model's flags"
        )


def test_a_directory_without_a_checkpoint_gives_nothing(tmp_path: Path) -> None:
    reported = refusal(tmp_path)
    assert reported.startswith("--num-layers is missing; ")
    assert reported.endswith(f" (--use-checkpoint-args found no checkpoint in --load {tmp_path})")
    assert "it has no checkpoint" in refusal(tmp_path, "--exit-on-missing-checkpoint")
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
    job, _ = job_of(tmp_path / "nowhere", shape + " --tokenizer-type NullTokenizer")
    assert any(note.endswith("has no checkpoint, so all flags are the command line's") for note in job.notes)


def test_the_newest_good_iteration_counts_or_the_one_asked_for(tmp_path: Path) -> None:
    checkpoint(tmp_path, 10, num_layers=2)
    checkpoint(tmp_path, 20, num_layers=4)
    newest = checkpoint(tmp_path, 30, num_layers=6)
    assert job_of(tmp_path)[1].num_layers == 6
    assert job_of(tmp_path, "--ckpt-step 10")[1].num_layers == 2
    assert "--ckpt-step 11: " in refusal(tmp_path, "--ckpt-step 11")
    data = bytearray((newest / "common.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "common.pt").write_bytes(data)
    assert job_of(tmp_path)[1].num_layers == 4


def test_older_files_and_damaged_ones_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "old" / "iter_0000001" / "mp_rank_00").mkdir(parents=True)
    assert "holds mp_rank files; spare-convert --model-type GPT --loader core --saver core" in refusal(tmp_path / "old")
    directory = tmp_path / "bad" / "iter_0000001"
    write_common(directory, b"\x80\x04.")
    assert f"{directory / 'common.pt'} cannot be read: " in refusal(tmp_path / "bad")
    (directory / "common.pt").write_bytes(b"no archive")
    assert f"{directory / 'common.pt'} cannot be read: " in refusal(tmp_path / "bad")


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"num_layers": "4"}, "have num_layers '4', which --num-layers does not take"),
        ({"swiglu": 1}, "have swiglu 1, which --swiglu does not take"),
        ({"rotary_base": 1.5}, "have rotary_base 1.5, which --rotary-base does not take"),
        ({"hidden_dropout": float("nan")}, "have hidden_dropout nan, which --hidden-dropout does not take"),
        ({"normalization": Path("x")}, "have normalization .not a plain value., which --normalization does not take"),
        ({"is_hybrid_model": True}, "is of a model with is_hybrid_model True, and its args do not write out"),
        ({"position_embedding_type": "mrope"}, r"mrope is not supported: .*\(--use-checkpoint-args took --position"),
    ],
)
def test_args_that_no_flag_could_have_are_refused(tmp_path: Path, other: dict[str, Any], sentence: str) -> None:
    checkpoint(tmp_path, **other)
    with pytest.raises(ConfigError, match=sentence) as error:
        job_of(tmp_path)
    assert "\n" not in str(error.value)


def test_a_rule_that_a_taken_value_breaks_says_where_it_came_from(tmp_path: Path) -> None:
    where = checkpoint(tmp_path)
    reported = refusal(tmp_path, "--pipeline-model-parallel-size 3")
    assert reported.startswith("4 layers cannot be divided by 3 = ")
    assert reported.endswith(f" (--use-checkpoint-args took --num-layers from {where})")


class Evil:
    """Runs a command when it is unpickled as its author meant it."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_nothing_that_stands_in_the_file_is_run(tmp_path: Path) -> None:
    struck = tmp_path / "struck"
    checkpoint(tmp_path, evil=Evil(f"touch {struck}"))
    job_of(tmp_path)
    # a class that is asked for by name, whose attribute is then set: it must not be the real one
    write_common(tmp_path / "iter_0000020", b"cargparse\nNamespace\n(N}Vstruck\nI1\nstb.")
    assert read_args(tmp_path / "iter_0000020") == {}
    assert not hasattr(Namespace, "struck")
    assert not struck.exists()


def test_what_is_saved_can_be_taken_again() -> None:
    values = {"moe_layer_freq": [0, 1], "window_size": (7, 0), "split": None, "object": Path("x"), "nested": [[1], "a"]}
    assert plain(values).keys() == values.keys() - {"object"}
    assert "object" not in plain({"object": [Path("x")]})


def test_each_name_is_a_flag_of_megatron_that_is_honoured() -> None:
    honoured = {spec.dest for spec in all_specs()}
    sides = [*checkpoint_args.MODEL, *checkpoint_args.SIZES, *checkpoint_args.COMMAND_LINE, *checkpoint_args.TOKENIZER]
    sides += [
        checkpoint_args.PATTERN,
        checkpoint_args.TOKENIZER_PATTERN,
        *checkpoint_args.PARALLEL,
        checkpoint_args.CHUNKS,
    ]
    assert len(sides) == len(set(sides)), "one side counts"
    assert set(sides) <= honoured
    assert set(checkpoint_args.UNSUPPORTED) <= megatron_table().keys() - honoured


CHECK = """
import sys
from spare_megatron.config.errors import ConfigError
from spare_megatron.worker.job_arguments import parse_job
try:
    parse_job(sys.argv[1:])
except ConfigError as error:
    print(error)
print([name for name in ("torch", "megatron.core", "numpy") if name in sys.modules])
"""


def test_a_checkpoints_args_are_read_without_torch(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    words = [*REST.split(), "--use-checkpoint-args", "--load", str(tmp_path), "--spare-redundancy", "9"]
    done = subprocess.run(
        [sys.executable, "-c", CHECK, *words], capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    assert done[0].startswith("--spare-redundancy 9 is not between 1 and the 1 groups")
    assert done[1] == "[]"


def test_the_check_needs_no_checkpoint_that_another_machine_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--use-checkpoint-args", "--load", str(tmp_path / "elsewhere"), *REST.split(), "--async-strategy", "mcore"]
    with pytest.raises(SystemExit) as left:
        parse_job(["--spare-check", *words])
    assert left.value.code == 0
    reported = capsys.readouterr().out
    assert reported.startswith("nothing is wrong with the flags that are here, and the model's are not: ")
    assert f"  a checkpoint in {tmp_path / 'elsewhere'}, for --use-checkpoint-args (not here)\n" in reported
    assert "  --async-strategy: checkpoints are written by this framework's own writer" in reported
    with pytest.raises(ConfigError, match="--num-layers is missing"):
        parse_job(words)
    words += ["--exit-on-missing-checkpoint"]
    with pytest.raises(SystemExit):
        parse_job(["--spare-check", *words])
    assert capsys.readouterr().out.startswith("nothing is wrong with the flags that are here, ")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ConfigError, match="elsewhere: it has no checkpoint; give a directory with a checkpoint"):
        parse_job(["--spare-check", *words])
    with pytest.raises(ConfigError, match="--num-layers is missing"):
        parse_job(["--spare-check", *words[:-1]])


def test_a_checkpoint_of_the_older_format_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    load = tmp_path / "old"
    model = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
    words = [*model.split(), *REST.split(), "--tokenizer-type", "NullTokenizer", "--load", str(load)]
    words += ["--ckpt-format", "torch"]
    job, _ = parse_job(words)
    assert any(note.startswith("--ckpt-format torch: checkpoints are written in mega") for note in job.notes)
    (load / "iter_0000005").mkdir(parents=True)
    (load / "iter_0000009" / "mp_rank_00").mkdir(parents=True)
    command = f"spare-convert .* --load-dir {load} --save-dir {load}-torch_dist makes it loadable"
    with pytest.raises(ConfigError, match=f"^--load {load}: {load}/iter_0000009 holds mp_rank files; {command}"):
        parse_job(words)
    with pytest.raises(ConfigError, match=command):
        parse_job([*words, "--ckpt-step", "9"])
    parse_job([*words, "--ckpt-step", "5"])
    assert folder.damage(load / "iter_0000009").startswith(f"{load}/iter_0000009 holds mp_rank files; ")
    (load / "iter_0000005" / ".metadata").touch()
    own = folder.damage(load / "iter_0000005")
    assert "the format of Megatron's FSDP modes (fsdp_dtensor or torch_dcp), then spare-convert --model-type" in own
    with pytest.raises(ConfigError, match=f"Megatron's FSDP modes .* --load-dir {load} "):
        parse_job([*words, "--use-checkpoint-args", "--ckpt-step", "5"])
