"""Asks --spare-check about the flags of recipes that people run: which are taken, and how long the answer takes.

    python benchmarks/recipes.py [FILE.args ...] [--groups 2] [--also FLAGS] [--json FILE]
    python benchmarks/recipes.py --groups 4 --also '--spare-state-redundancy 2'

A file has one word of a command line on each line (tests/data/recipes has 49, with where they are from). Flags that
neither Megatron-LM nor this framework has, because they are those of a fork, are taken out first with their values, and
counted; so are flags with a value that Megatron-LM's parser refuses and a fork has, such as a tokenizer of its own.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from spare_megatron.flags.specs import megatron_table, own_specs

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "data" / "recipes"
SHOWN = 200


def main() -> None:
    """Print a line for each recipe and the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", help=f"default: those of {FOLDER.relative_to(ROOT)}")
    parser.add_argument("--groups", type=int, default=2, help="groups of the job (default: 2)")
    parser.add_argument("--also", default="", metavar="FLAGS", help="further flags of each recipe, in quotes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for path in options.files or sorted(FOLDER.glob("*.args")):
        words, forks = of_mainline(path.read_text().splitlines())
        code, reported, took_s = asked([*words, *shlex.split(options.also)], options.groups)
        answer = "taken" if code == 0 else "refused" if code == 2 else f"exit code {code}"
        why = "" if code == 0 else reported.strip().replace("\n", " | ")
        print(f"{path.stem}: {answer} {why[:SHOWN]}", flush=True)
        rows.append({"recipe": path.stem, "answer": answer, "fork_flags": len(forks), "seconds": round(took_s, 2)})
    taken = sum(row["answer"] == "taken" for row in rows)
    median_s = statistics.median(float(str(row["seconds"])) for row in rows)
    config = {"groups": options.groups, "also": options.also, "recipes": len(rows), "taken": taken}
    report("recipes", {**config, "median_s": median_s}, rows, options.json)


def of_mainline(words: list[str]) -> tuple[list[str], list[str]]:
    """The words without the flags, or values of a choice, that neither Megatron-LM nor this framework has, and these
    flags."""
    known = _known_flags()
    kept: list[str] = []
    forks: list[str] = []
    into: list[str] = kept
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            choices = known.get(name)
            there = name in known and (choices is None or (value if equals else after) in map(str, choices))
            into = kept if there else []
            forks += [] if into is kept else [name]
        into.append(word)
    return kept, forks


@cache
def _known_flags() -> dict[str, list[str] | None]:
    """Flag -> its choices, None where it has none."""
    of_megatron: dict[str, list[str] | None] = {
        name: row.get("choices") for row in megatron_table().values() for name in row["names"]
    }
    return {name: None for spec in own_specs() for name in spec.names} | of_megatron


def asked(words: list[str], groups: int) -> tuple[int, str, float]:
    """Exit code, output and seconds of --spare-check."""
    environ = {**os.environ, "SPARE_NUM_GROUPS": str(groups)}
    began_s = time.monotonic()
    command = [sys.executable, "pretrain_gpt.py", "--spare-check", *words]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    took_s = time.monotonic() - began_s
    return done.returncode, done.stderr or done.stdout, took_s


if __name__ == "__main__":
    main()
