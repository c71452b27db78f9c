"""--fim-data: documents are rearranged as the paper has it, a sample depends on its index alone, and a job that loses a
group ends with the weights of one that loses none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.config.errors import ConfigError
from spare_megatron.data.preprocess import command
from spare_megatron.megatron_adapter.checkpoint.digest import digest
from spare_megatron.megatron_adapter.data.fill_in_middle import KINDS, Rearrangement, token_id
from tests.process.harness import launch

TOKENS = {kind: 1000 + number for number, kind in enumerate(KINDS)}
SPLIT = 2000
NAMES = {kind: f"<fim_{kind}>" for kind in KINDS if kind != "eod"} | {"eod": "</s>"}
STEPS = 4


def rules(rate: float = 1.0, spm_rate: float = 0.5, **more: Any) -> Rearrangement:
    """Of a tokenizer whose tokens are characters."""
    encode, decode = lambda text: [ord(one) for one in text], lambda ids: "".join(map(chr, ids))
    return Rearrangement(encode, decode, TOKENS, rate, spm_rate, **more)


def restored(ids: list[int]) -> tuple[str, list[int]]:
    """(the form of a rearranged document, its own tokens in their order)."""
    begin, fill, end = (TOKENS[kind] for kind in ("prefix", "middle", "suffix"))
    if ids[:1] != [begin]:
        return "as it was", ids
    at = ids.index(fill)
    if ids[1] == end:  # P S suffix M prefix middle, which nothing stands between
        return "SPM", ids[at + 1 :] + ids[2:at]
    cut = ids.index(end)
    return "PSM", ids[1:cut] + ids[at + 1 :] + ids[cut + 1 : at]


DOCUMENT = st.lists(st.integers(65, 90), max_size=12)


@given(DOCUMENT, st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 1.0]))
def test_a_rearranged_document_has_the_same_tokens(document: list[int], seed: int, spm_rate: float) -> None:
    ids = np.array(document, dtype=np.int64)
    form, found = restored(rules(1.0, spm_rate).document(ids, np.random.default_rng(seed)).tolist())
    assert found == document
    forms = {"SPM"} if spm_rate == 1.0 else {"PSM", "SPM"}  # without a prefix the two look alike
    assert form in (forms if document else {"as it was"})


@given(st.lists(DOCUMENT, min_size=1, max_size=5), st.integers(0, 2**32))
def test_a_sample_keeps_its_length_and_its_ends_of_documents(documents: list[list[int]], seed: int) -> None:
    flat = [one for document in documents for one in (*document, TOKENS["eod"])][:-1]
    ids = np.array([*flat, *[TOKENS["eod"]] * 40], dtype=np.int64)  # room for what is added
    found = rules().sample(ids, np.random.default_rng(seed)).tolist()
    assert len(found) == len(ids)
    parts: list[list[int]] = [[]]
    for one in found:
        parts[-1:] = [parts[-1], []] if one == TOKENS["eod"] else [[*parts[-1], one]]
    assert [restored(part)[1] for part in parts[: len(documents)]] == documents
    assert not any(any(part) for part in parts[len(documents) :])


def test_rates_are_shares_of_documents_and_of_fragments() -> None:
    draws, whole = np.random.default_rng(46), np.arange(65, 465)
    forms = [restored(rules(0.3, 0.25).document(whole, draws).tolist())[0] for _ in range(4000)]
    assert forms.count("as it was") / 4000 == pytest.approx(0.7, abs=0.03)
    assert forms.count("SPM") / 4000 == pytest.approx(0.3 * 0.25, abs=0.02)
    divided = np.array([65, 66, SPLIT, 67, 68, SPLIT, 69, 70])
    fragments = rules(0.5, 0.5, split=SPLIT, fragment_rate=0.4)
    counts = [np.count_nonzero(fragments.document(divided, draws) == TOKENS["prefix"]) for _ in range(4000)]
    assert np.mean(counts) == pytest.approx(0.5 * 3 * 0.4, abs=0.05)


def test_what_begins_with_the_given_text_is_left_as_it_is() -> None:
    kept = rules(no_prefix="AB").document(np.array([65, 66, 67]), np.random.default_rng(1))
    assert kept.tolist() == [65, 66, 67]


def test_a_sample_that_became_shorter_is_filled_up() -> None:
    """The tokenizer makes one token of a text that had several."""
    shorter = Rearrangement(lambda text: [7] if text else [], lambda ids: "x" * len(ids), TOKENS, 1.0, 0.0)
    found = shorter.sample(np.arange(65, 91), np.random.default_rng(3)).tolist()
    assert len(found) == 26
    assert found[6:] == [TOKENS["pad"]] * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of 60 documents and the tokenizer that made them."""
    top = tmp_path_factory.mktemp("fim")
    texts = [f"document {n}: the quick brown fox {n * n} jumps over the lazy dog {n % 7} times" for n in range(60)]
    own = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = tokenizers.decoders.ByteLevel()
    names = ["<pad>", "<s>", *NAMES.values()]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=names, initial_alphabet=alphabet)
    own.train_from_iterator(texts, trainer)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>", pad_token="<pad>")
    made.save_pretrained(top / "tokenizer")
    (top / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ("--input", str(top / "text.jsonl"), "--output-prefix", str(top / "data"), "--append-eod")
    tokenizer = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(top / "tokenizer"))
    assert command.main([*words, *tokenizer]) == 0
    return top


def flags(folder: Path) -> list[str]:
    small = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 48 --max-position-embeddings 48 "
        "--micro-batch-size 1 --global-batch-size 8 --lr 1e-2 --eval-iters 0 --num-workers 0 --transformer-impl local "
        "--tokenizer-type HuggingFaceTokenizer --split 100,0,0 --fim-data --fim-rate 0.7 --fim-eod-token </s>"
    )
    data = ("--data-path", str(folder / "data_text_document"), "--tokenizer-model", str(folder / "tokenizer"))
    ends = ("--train-iters", str(STEPS), "--save-interval", str(STEPS))
    return [*small.split(), *data, *ends]


def test_a_job_that_loses_a_group_ends_as_one_that_loses_none(folder: Path, tmp_path: Path) -> None:
    found = {}
    kill = "sigkill:group=1,step=2,at=backward"
    for name, groups, inject in (("whole", 1, ()), ("killed", 2, (kill,))):
        words = (*flags(folder), "--save", str(tmp_path / name), "--data-cache-path", str(tmp_path / f"{name}-cache"))
        job = launch(
            tmp_path / f"run-{name}",
            *(*words, "--spare-piece-microbatches", "1"),
            groups=groups,
            group_size=None,
            script="pretrain_gpt.py",
            inject=inject,
        )
        lines = job.finish(timeout_s=240)
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        found[name] = digest(tmp_path / name / f"iter_{STEPS:07d}", optimizer=True)
        identity = json.loads((job.run_dir / "job.json").read_text())["identity"]
        assert f"the data of {folder / 'data_text_document'}" in identity, "a group with other data could come back"
    assert found["whole"] == found["killed"]


def test_a_sample_does_not_depend_on_what_was_read_before(folder: Path) -> None:
    import torch

    from spare_megatron.megatron_adapter.data import datasets
    from spare_megatron.megatron_adapter.data.tokenizers import build_tokenizer
    from spare_megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
    from spare_megatron.worker.job_arguments import parse_job

    _, args = parse_job(flags(folder))
    tokenizer = build_tokenizer(args)
    path = str(folder / "data_text_document")

    def made(**other: Any) -> Any:
        tokens = {kind: getattr(args, f"fim_{kind}_token") for kind in KINDS}
        fields = {"fim_rate": 0.7, "fim_spm_rate": 0.5, "fim_extra_tokens": tokens, **other}
        config = GPTFIMDatasetConfig(
            random_seed=1, sequence_length=48, path_to_cache=str(folder / "cache"), tokenizer=tokenizer,
            reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, **fields,
        )  # fmt: skip
        data = datasets.IndexedDataset(path)
        return GPTFIMDataset(data, path, np.arange(60), 40, datasets.Split.train, config)

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        up, down, plain = made(), made(), made(fim_rate=0.0)
        rising = [up[n]["tokens"] for n in range(40)]
        falling = [down[n]["tokens"] for n in reversed(range(40))][::-1]
        assert all(torch.equal(one, other) for one, other in zip(rising, falling, strict=True))
        changed = [not torch.equal(one, plain[n]["tokens"]) for n, one in enumerate(rising)]
        assert sum(changed) > 20
        marks = {token_id(tokenizer, NAMES[kind], "") for kind in ("prefix", "middle", "suffix")}
        assert all(marks & set(one.tolist()) for one, is_new in zip(rising, changed, strict=True) if is_new)
        with pytest.raises(ConfigError, match=r"--fim-pad-token is '<nothing>', which the tokenizer does not have"):
            made(fim_extra_tokens={**{kind: NAMES[kind] for kind in KINDS}, "pad": "<nothing>"})
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--mock-data --fim-data", "--fim-data needs documents, and --mock-data has none; give --data-path"),
        ("--fim-data --fim-rate 1.5", "--fim-rate is 1.5, but it is a share; give a value from 0 to 1"),
        ("--fim-data --fim-split-sample <f>", "--fim-split-sample and --fim-fragment-rate belong together"),
        ("--fim-data --fim-fragment-rate 0.5", "--fim-split-sample and --fim-fragment-rate belong together"),
    ],
)
def test_flags_that_do_not_fit(words: str, sentence: str) -> None:
    from spare_megatron.worker.job_arguments import parse_job

    base = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 48 --max-position-embeddings 48 "
    base += "--micro-batch-size 1 --global-batch-size 8 --lr 1e-2 --train-iters 4 --tokenizer-type NullTokenizer "
    base += "--vocab-size 61 " + ("" if "mock" in words else "--data-path none --spare-check ")
    with pytest.raises(ConfigError, match=sentence):
        parse_job([*base.split(), *words.split()])
