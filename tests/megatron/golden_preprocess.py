"""What Megatron-LM's own preprocess tool makes of a corpus: sums of its files, in tests/data/preprocess/golden.json.

Make them anew with a checkout of Megatron-LM (its ``megatron.training`` needs the packages six and triton):

    python -m tests.megatron.golden_preprocess PATH_OF_MEGATRON_LM

The corpus is made by ``benchmarks/_corpus.py``, the tokenizers lie in tests/data/preprocess (trained by
``benchmarks/_tokenizers.py``). Megatron's tool runs in that folder, because its GPT-2 tokenizer is read from the folder
``gpt2`` there: with no network it takes no other.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks._corpus import tokenizer_flags, write_corpus
from spare_megatron.megatron_adapter.versions import release

FOLDER = Path(__file__).resolve().parents[1] / "data" / "preprocess"
GOLDEN = FOLDER / "golden.json"
VOCABULARY, MEGABYTES = 2000, 5
COMMON = ["--append-eod", "--workers", "2", "--log-interval", "100000"]


def numbers_before(end: int) -> list[str]:
    """Flags of a tokenizer of numbers whose last token, the end of a document, is ``end``: the size of the vocabulary
    counts it since megatron-core 0.18."""
    return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(end + (release() >= (0, 18)))]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sums(prefix: Path) -> dict[str, str]:
    """Of the one pair of files whose names begin with ``prefix``."""
    found = {}
    for end in ("bin", "idx"):
        (path,) = prefix.parent.glob(f"{prefix.name}_*.{end}")
        found[end] = sha256(path)
    return found


def main() -> None:
    megatron = Path(sys.argv[1]).resolve()
    commit = subprocess.run(
        ["git", "-C", str(megatron), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    cases: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        write_corpus(corpus, MEGABYTES)
        for kind, flags in tokenizer_flags(Path("."), VOCABULARY).items():
            prefix = Path(folder) / kind
            words = ["tools/preprocess_data.py", "--input", "corpus.jsonl", "--output-prefix", kind, *COMMON, *flags]
            command = [sys.executable, "-W", "ignore", *words]
            command[3] = str(megatron / words[0])
            command[5], command[7] = str(corpus), str(prefix)
            subprocess.run(command, cwd=FOLDER, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=True)
            cases[kind] = {"command": shlex.join(["python", *words]), **sums(prefix)}
        record = {"megatron_lm_commit": commit, "input_sha256": sha256(corpus), "cases": cases}
    GOLDEN.write_text(json.dumps(record, indent=1) + "\n")
    print(GOLDEN.read_text())


if __name__ == "__main__":
    main()
