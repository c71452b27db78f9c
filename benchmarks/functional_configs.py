"""Trains configurations of Megatron-LM's functional tests, made small, with plain megatron-core and here, and compares.

    python benchmarks/functional_configs.py [--count 20] [--seed 2026]
    python benchmarks/functional_configs.py --only moe/deepseek_proxy_fsdp_ep2_fsdp2_1node --folder /tmp/compared

Of the GPT and MoE configurations that train and pass --spare-check (tests/data/megatron_functional_tests.json; hybrid
ones have layers that need a GPU), --count are drawn by --seed. ``_shrinking_rules.py`` says how they are made small
enough for a machine without GPU; each flag without a rule stays. A configuration then trains 10 steps twice, in real
processes and with the same flags:
as one plain megatron-core job (its own DDP, optimizer, schedules and order of samples, see ``_plain_training.py``), and
as a job of 2 groups with --spare-reduce fp32. The losses of each step must be equal up to a relative 1e-5.

Half precision needs no wider tolerance. Both sides compute a microbatch with the same operations, and keep gradients
(Megatron's default for bf16, not for fp16) and the optimizer's weights in fp32. Megatron divides each loss by the
number of microbatches of a rank, here the sum is divided: where that number is a power of two, as the rules make it,
bf16 has the same bits. fp16 has not, as small gradients lose bits at another size of the loss; and as large ones
overflow at another size, the loss scale begins where neither side must skip a step to find it.

Routers with an expert bias count tokens in fp32 on both sides. Megatron counts in the model's precision, and bf16 has
no odd number above 256: of moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed the losses of 10 steps then differ by 2.0e-5
at most, from the step on in which a bias has moved the other way; gradients and other weights are the same until then.

A distributed optimizer sums the squares in the norm of the gradients in an order of its own. That moves an update by
one part in 10^7 and, now and then, a bf16 weight to its neighbour. So the plain job has one exactly where each group
has one (over its inner data ranks, with an instance for each group), and none where the flag splits nothing here.
``split_difference`` is what the plain job's own losses differ by if it has one over all of its data-parallel ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import RESULTS, command, show, write
from benchmarks._shrinking_rules import RULES, STEPS
from benchmarks._shrunk_flags import GROUPS, Shrunk, shrink
from tests.pure.functional_sets import answers_of, functional_sets

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-5
FOLDERS = ("gpt/", "moe/")
PATIENCE_S = 600.0
SPLIT, INSTANCES = "--use-distributed-optimizer", "--num-distributed-optimizer-instances"
SHOWN = (
    *("configuration", "layout", "precision", "loss_first", "loss_last", "difference", "bits_equal"),
    *("split_difference", "verdict"),
)


def main() -> None:
    """Print a line for each configuration and the table, write the JSON; exit code 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="number of configurations to draw")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="compare these instead, and write no results")
    parser.add_argument("--folder", type=Path, help="keep logs there, and do not train again what is there")
    options = parser.parse_args()
    sets = functional_sets()["training"]
    accepted = sorted(name for name, said in answers_of("training").items() if not said and name.startswith(FOLDERS))
    drawn = options.only or sorted(random.Random(options.seed).sample(accepted, options.count))
    print(f"seed {options.seed}: {len(drawn)} of {len(accepted)} configurations", flush=True)
    rows = []
    with _folder(options.folder) as folder:
        for number, name in enumerate(drawn, 1):
            rows.append(compare(name, shrink(sets[name]), folder / name))
            said = {key: rows[-1][key] for key in SHOWN[1:]}
            print(f"{number}/{len(drawn)} {name}: " + ", ".join(f"{k} {v}" for k, v in said.items()), flush=True)
    equal = sum(row["verdict"] == "equal" for row in rows)
    config = {
        "seed": options.seed,
        "accepted": len(accepted),
        "drawn": len(rows),
        "equal": equal,
        "bits_equal": sum(bool(row["bits_equal"]) for row in rows),
        "largest_difference": max((row["difference"] for row in rows if row["difference"] is not None), default=None),
        "tolerance": TOLERANCE,
        "steps": STEPS,
        "groups": GROUPS,
    }
    show("functional_configs", config, [{key: row[key] for key in SHOWN} for row in rows])
    if not options.only:
        config["rules"] = {flag: rule.reason for rule in RULES for flag in rule.flags}
        write(RESULTS / "functional_configs.json", "functional_configs", command(), config, rows)
    sys.exit(int(equal < len(rows)))


def described(name: str, small: Shrunk) -> dict:
    """What was done to a configuration, as its row of the results has it."""
    there = {flag: " ".join(values) for flag, values in {**small.kept, **small.dropped}.items()}
    return {
        "configuration": name,
        "layout": " x ".join([f"{k}{v}" for k, v in small.layout.items() if v > 1] + [f"{GROUPS} groups"]),
        "precision": next((kind for kind in ("bf16", "fp16") if f"--{kind}" in small.kept), "fp32"),
        "kept": " ".join(f"{flag} {there[flag]}".strip() for flag in small.kept),
        "changed": ", ".join(
            f"{flag} {' '.join(old)} -> {' '.join(new)}" for flag, (old, new) in small.changed.items()
        ),
        "dropped": " ".join(f"{flag} {there[flag]}".strip() for flag in small.dropped),
        "added": " ".join(small.added),
    }


def compare(name: str, small: Shrunk, folder: Path) -> dict:
    """The row of one configuration, which is trained unless its row is in ``folder``."""
    said = described(name, small)
    known = folder / "row.json"
    if known.exists() and (row := json.loads(known.read_text())).items() >= said.items():
        return row
    folder.mkdir(parents=True, exist_ok=True)
    words = [*small.words, "--spare-reduce", "fp32"]
    try:
        plain = _plain(folder / "plain", words, small, GROUPS if small.inner_data > 1 else 0)
        row = {**said, **judge(plain, _ours(folder / "ours", words)), "split_difference": None}
        if SPLIT in words:
            row["split_difference"] = judge(plain, _plain(folder / "split", words, small, 1))["difference"]
    except UnfinishedError as error:
        return {**said, **dict.fromkeys([*judge([], []), "split_difference"]), "verdict": str(error)}
    known.write_text(json.dumps(row))
    return row


def judge(plain: list[dict], ours: list[dict]) -> dict:
    """What two histories have in common."""
    pairs = list(zip(plain, ours, strict=True))
    difference = max((_relative(a["loss"], b["loss"]) for a, b in pairs), default=0.0)
    same_rates = all(a["lr"] == b["lr"] and a["skipped"] == b["skipped"] for a, b in pairs)
    learnt = not plain or plain[-1]["loss"] < plain[0]["loss"]
    verdict = "equal" if difference <= TOLERANCE else "losses differ"
    if not same_rates:
        verdict = "learning rates or skipped steps differ"
    if not learnt:
        verdict = "the reference learns nothing"
    return {
        "loss_first": plain[0]["loss"] if plain else None,
        "loss_last": plain[-1]["loss"] if plain else None,
        "skipped": sum(a["skipped"] for a, _ in pairs),
        "difference": difference,
        "grad_norm_difference": max((_relative(a["grad_norm"], b["grad_norm"]) for a, b in pairs), default=0.0),
        "bits_equal": all(a["loss"] == b["loss"] for a, b in pairs),
        "verdict": verdict,
    }


def _relative(one: float | None, other: float | None) -> float:
    if not one or not other:
        return 0.0 if one == other else math.inf
    difference = abs(one - other) / abs(one)
    return difference if math.isfinite(difference) else math.inf


class UnfinishedError(Exception):
    """A side did not train all its steps."""


def _plain(record: Path, words: list[str], small: Shrunk, instances: int) -> list[dict]:
    """The history of the plain job, whose distributed optimizer, if it has any, has so many instances."""
    record, ranks = record.with_suffix(".jsonl"), GROUPS * small.group_size
    for left in (record, record.with_suffix(".store")):
        left.unlink(missing_ok=True)
    flags = [*words, "--spare-inner-data-parallel", str(GROUPS * small.inner_data)]
    for flag, length in ((INSTANCES, 2), *(() if instances else ((SPLIT, 1),))):
        if flag in flags:
            at = flags.index(flag)
            del flags[at : at + length]
    start = [sys.executable, "benchmarks/plain_losses.py", str(record)]
    has = instances if SPLIT in flags else 1
    _run([[*start, str(rank), str(ranks), str(has), *flags] for rank in range(ranks)], record.with_suffix(""))
    return _history(record, "plain megatron-core")


def _ours(run_dir: Path, words: list[str]) -> list[dict]:
    start = [sys.executable, "-m", "spare_megatron.cli.launch", "--num-groups", str(GROUPS), "--run-dir", str(run_dir)]
    patience = ("--spare-heartbeat-timeout-s", "120")
    shutil.rmtree(run_dir, ignore_errors=True)
    _run([[*start, "pretrain_gpt.py", *words, *patience]], run_dir.parent / "launch")
    return _history(run_dir / "metrics.jsonl", "the job of groups")


def _run(commands: list[list[str]], log: Path) -> None:
    """Run processes to their end, or until one fails; what they print goes to files."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(Path(f"{log}-{n}.log").open("w")) for n in range(len(commands))]
        processes = [
            subprocess.Popen(command, cwd=ROOT, env=environ, stdout=file, stderr=subprocess.STDOUT)
            for command, file in zip(commands, files, strict=True)
        ]
        try:
            for process in processes:
                if process.wait(PATIENCE_S):
                    break
        finally:
            for process in processes:
                process.terminate()
                process.wait()


def _history(record: Path, side: str) -> list[dict]:
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    if len(lines) != STEPS:
        raise UnfinishedError(f"{side} trained {len(lines)} of {STEPS} steps")
    return lines


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="spare-") as name:
        yield Path(name)


if __name__ == "__main__":
    main()
