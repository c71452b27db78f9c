"""A special token that a tokenizer does not have arrives as -1 or None: it is never written or compared, and one
sentence says what to give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.data.preprocess import command
from spare_megatron.megatron_adapter.data.tokenizers import needed_eod, special_id
from spare_megatron.worker.tokenizer import END_FLAGS, build_tokenizer
from tests.megatron.test_word_memory import train_sentencepiece
from tests.pure.flags_of_a_job import job_of


def sentencepiece_flags(model: Path) -> list[str]:
    return ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(model)]


def hugging_face_flags(folder: Path) -> list[str]:
    """A tokenizer of words without any special token."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, "[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]


def without_end(folder: Path, kind: str) -> list[str]:
    if kind == "SentencePiece":
        return sentencepiece_flags(train_sentencepiece(folder / "model", "bpe", eos_id=-1, bos_id=-1))
    return hugging_face_flags(folder)


@pytest.mark.parametrize(("kind", "workers"), [("SentencePiece", "1"), ("HuggingFace", "2")])
def test_append_eod_without_an_end_token_is_refused(
    tmp_path: Path, kind: str, workers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"text": "a b a"}) + "\n")
    words = ["--input", str(path), "--output-prefix", str(tmp_path / "out"), *without_end(tmp_path, kind)]
    words += ["--workers", workers]
    assert command.main([*words, "--append-eod"]) == 2
    reported = capsys.readouterr().err.splitlines()
    assert reported[-1].startswith("spare-preprocess: --append-eod needs an end-of-document token, but ")
    assert str(tmp_path) in reported[-1]
    assert f"--tokenizer-type {kind}Tokenizer" in reported[-1]
    assert "leave the flag out" in reported[-1]
    assert not list(tmp_path.glob("out*"))
    assert command.main(words) == 0


def test_flags_that_act_at_ends_need_an_end_token(tmp_path: Path) -> None:
    words = " ".join(without_end(tmp_path, "SentencePiece"))
    drop = ("--mock-data", "--tokenizer-type", "--vocab-size")
    for name in END_FLAGS:
        flag = f"--{name.replace('_', '-')}"
        _, args = job_of(f"{words} {flag} --data-path x", drop=drop)
        with pytest.raises(ConfigError, match=f"^{flag} needs an end-of-document token, but "):
            build_tokenizer(args)
    _, args = job_of(f"{words} --data-path x", drop=drop)
    tokenizer = build_tokenizer(args)
    assert [special_id(tokenizer, name) for name in ("eod", "eos", "bos", "pad", "mask", "nothing")] == [None] * 6
    assert special_id(tokenizer, "unk") == 0


def test_an_end_token_of_id_0_is_one(tmp_path: Path) -> None:
    model = train_sentencepiece(tmp_path / "model", "bpe", eos_id=0, unk_id=1, bos_id=2)
    _, args = job_of(" ".join(sentencepiece_flags(model)), drop=("--tokenizer-type", "--vocab-size"))
    assert needed_eod(build_tokenizer(args), args, "--append-eod") == 0
