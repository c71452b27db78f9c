"""A fine-tuned model goes back to Hugging Face with all that it came with: Hugging Face to core, steps of a job, and
back. transformers then loads it without a missing or unused name, with the logits that core has."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from spare_megatron.megatron_adapter.versions import release
from tests.megatron.hugging_face_models import SEED, flags_of, logits_of, make, run
from tests.process.harness import launch

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = [pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]

WORDS, ROWS, STEPS, LENGTH = 300, 320, 5, 64
"""Ids of the tokenizer; rows of the model, which has more of them; steps; the model's length."""
TEXT = "the quick brown fox jumps over the lazy dog and 13 grey wolves run through the night"
TOLERANCE = 1e-5
FLAGS = (
    "--use-checkpoint-args --finetune --mock-data --split 100,0,0 --micro-batch-size 1 --global-batch-size 2 "
    f"--train-iters {STEPS} --lr 1e-3 --transformer-impl local --seq-length 32 --seed {SEED} --save-interval 1000 "
    "--eval-iters 0 --log-interval 10"
)
MORE = ("qwen3", "gpt2", "qwen3-moe", "deepseek-v2", "deepseek-v3", "glm4-moe", "gpt-oss-yarn")
KINDS = ("llama", "mixtral", *(pytest.param(kind, marks=pytest.mark.full) for kind in MORE))


def model_of(kind: str, folder: Path) -> None:
    """A tiny model with everything that belongs to one: special ids, generation config, a trained tokenizer."""
    short = {"n_layer": 2} if kind == "gpt2" else {"num_hidden_layers": 2}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = make(kind, folder, vocab_size=ROWS, **short, **special, initializer_range=0.05)
    model.generation_config.update(max_new_tokens=9, repetition_penalty=1.25, **special)
    model.generation_config.save_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    own = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = tokenizers.decoders.ByteLevel()
    names = ["<pad>", "<s>", "</s>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=WORDS, special_tokens=names, initial_alphabet=alphabet)
    own.train_from_iterator([TEXT] * 9, trainer)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template="{{ messages }}"
    )
    assert len(made) == WORDS
    made.save_pretrained(folder)


def train(top: Path, *words: str) -> None:
    """A job that begins with the converted model."""
    paths = ("--load", str(top / "core"), "--save", str(top / "trained"))
    job = launch(top / "run", *FLAGS.split(), *paths, *words, groups=1, group_size=None, script="pretrain_gpt.py")
    assert [line["step"] for line in job.finish(timeout_s=240)] == list(range(1, STEPS + 1))


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())  # type: ignore[no-any-return]


def loaded(folder: Path) -> Any:
    """The model as transformers loads it, which must miss nothing and find nothing that it does not use."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_a_fine_tuned_model_goes_back_whole(kind: str, tmp_path: Path) -> None:
    model_of(kind, tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "core", "hf", "core")
    # a length below the model's: the training's, not the model's. With learned positions it cannot be another
    length = () if kind == "gpt2" else ("--max-position-embeddings", "32")
    train(tmp_path, *length)
    run(tmp_path / "trained", tmp_path / "back", "core", "hf")
    back, before = loaded(tmp_path / "back"), loaded(tmp_path / "hf")
    assert config(tmp_path / "back") == config(tmp_path / "hf")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "vocab_size", "max_position_embeddings"):
        assert getattr(back.config, name) == getattr(before.config, name) is not None
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    # it has learned, and every row of the vocabulary is there
    first = before.get_input_embeddings().weight
    assert first.shape[0] == back.get_input_embeddings().weight.shape[0] == ROWS
    assert not torch.equal(first, back.get_input_embeddings().weight)
    tokens = torch.randint(0, ROWS, (2, 32), generator=torch.Generator().manual_seed(SEED))
    with torch.no_grad():
        theirs = back(tokens).logits
    ours = logits_of(flags_of(tmp_path / "core"), tmp_path / "trained" / f"iter_{STEPS:07d}", tokens, 384)[..., :ROWS]
    difference = (ours - theirs).abs().max().item()
    print(f"{kind}: logits differ by {difference:.1e} at most, of {theirs.abs().max():.1f}")
    assert difference < TOLERANCE
    # transformers generates, by its generation config, with the tokenizer beside the model
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    prompt = tokenizer("the quick wolves", return_tensors="pt")["input_ids"]
    assert prompt.tolist() == [
        transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")("the quick wolves").input_ids
    ]
    assert back.generation_config.to_dict() == before.generation_config.to_dict()
    made = back.generate(prompt, do_sample=False)
    assert prompt.shape[1] < made.shape[1] <= prompt.shape[1] + 9
    assert isinstance(tokenizer.decode(made[0]), str)
    # one iteration by itself is converted the same
    run(tmp_path / "trained" / f"iter_{STEPS:07d}", tmp_path / "alone", "core", "hf")
    for path in (tmp_path / "back").iterdir():
        assert path.read_bytes() == (tmp_path / "alone" / path.name).read_bytes(), path.name


def test_what_training_changed_is_changed_and_no_row_is_lost(tmp_path: Path) -> None:
    """NullTokenizer's own end is one row more than its --vocab-size, and the job has another epsilon and a longer
    context; all else is as it came."""
    from safetensors.torch import load_file

    model_of("llama", tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "core", "hf", "core")
    null = ("--no-use-tokenizer-model-from-checkpoint-args", "--tokenizer-type", "NullTokenizer", "--vocab-size")
    longer = ("--max-position-embeddings", "128", "--norm-epsilon", "1e-4")
    train(tmp_path, *null, str(ROWS + (release() >= (0, 18))), *longer)  # which counts the end among them
    run(tmp_path / "trained", tmp_path / "back", "core", "hf")
    changed = {"vocab_size": ROWS + 1, "max_position_embeddings": 128, "rms_norm_eps": 1e-4}
    assert config(tmp_path / "back") == {**config(tmp_path / "hf"), **changed}
    back = loaded(tmp_path / "back")
    tokens = torch.arange(ROWS - 31, ROWS + 1).reshape(1, 32)
    with torch.no_grad():
        theirs = back(tokens).logits
    (tmp_path / "core" / "model_flags.txt").write_text(
        (tmp_path / "core" / "model_flags.txt").read_text().replace("1e-06", "1e-4")
    )
    ours = logits_of(flags_of(tmp_path / "core"), tmp_path / "trained" / f"iter_{STEPS:07d}", tokens, 384)
    assert (ours[..., : ROWS + 1] - theirs).abs().max() < TOLERANCE
    # and the way back in has the row too, with another padding
    for number, (loader, saver, origin) in enumerate(
        (("hf", "core", "back"), ("core", "legacy", "0"), ("core", "hf", "1"))
    ):
        words = ("--make-vocab-size-divisible-by", "1") if saver == "legacy" else ()
        run(tmp_path / origin, tmp_path / str(number), loader, saver, *words)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("back", "2"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert config(tmp_path / "2") == config(tmp_path / "back")


def test_files_of_another_model_are_moved_aside(tmp_path: Path) -> None:
    from spare_megatron.checkpoint.convert.tokenizer_files import FOLDER, carry

    for name, text in (("one", "1"), ("other", "2")):
        (tmp_path / name / FOLDER).mkdir(parents=True)
        (tmp_path / name / FOLDER / "config.json").write_text(text)
    save = tmp_path / "save"
    assert carry(tmp_path / "one" / "iter_0000001", save) is None
    assert carry(tmp_path / "one", save) is None
    assert sorted(path.name for path in save.iterdir()) == [FOLDER]
    aside = carry(tmp_path / "other", save)
    assert aside is not None
    assert ((save / FOLDER / "config.json").read_text(), (aside / "config.json").read_text()) == ("2", "1")
    assert carry(save, save) is None
    assert carry(tmp_path / "without", save) is None
    assert (save / FOLDER / "config.json").read_text() == "2"


@pytest.mark.parametrize("before", [False, True])
def test_all_groups_carry_at_once(before: bool, tmp_path: Path) -> None:
    from spare_megatron.checkpoint.convert.tokenizer_files import FOLDER, carry

    (tmp_path / "one" / FOLDER).mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "vocab.json"):
        (tmp_path / "one" / FOLDER / name).write_text(name * 100)
    for number in range(20):
        save = tmp_path / f"save{number}"
        if before:
            (save / FOLDER).mkdir(parents=True)
            (save / FOLDER / "config.json").write_text("other")
        gate = threading.Barrier(8)

        def group(save: Path = save, gate: threading.Barrier = gate) -> Path | None:
            gate.wait()
            return carry(tmp_path / "one", save)

        with ThreadPoolExecutor(8) as groups:
            moved = [one.result() for one in [groups.submit(group) for _ in range(8)]]
        assert (save / FOLDER / "vocab.json").read_text() == "vocab.json" * 100
        left = {path.name for path in save.iterdir()}
        assert left == {FOLDER, *(path.name for path in moved if path)}
        olds = [(save / name / "config.json").read_text() for name in left - {FOLDER}]
        assert ("other" in olds) == before
