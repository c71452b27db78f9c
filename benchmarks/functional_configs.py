"""Trains configurations of Megatron-LM's functional tests, made small, with plain megatron-core and here, and compares.

    python benchmarks/functional_configs.py [--count 20] [--seed 2026]
    python benchmarks/functional_configs.py --only moe/deepseek_proxy_fsdp_ep2_fsdp2_1node --folder /tmp/compared
    python benchmarks/functional_configs.py --recipes [--count 30] [--seed 2026] [--patience-s 180]

Of the GPT and MoE configurations that train and pass --spare-check (tests/data/megatron_functional_tests.json; hybrid
ones have layers that need a GPU), --count are drawn by --seed. ``_shrinking_rules.py`` says how they are made small
enough for a machine without GPU; each flag without a rule stays. A configuration then trains 10 steps twice, in real
processes and with the same flags:
as one plain megatron-core job (its own DDP, optimizer, schedules and order of samples, see ``_plain_training.py``), and
as a job of 2 groups with --spare-reduce fp32. The losses of each step must be equal up to a relative 1e-5.

Half precision needs no wider tolerance. Both sides compute a microbatch with the same operations, and keep gradients
(Megatron's default for bf16, not for fp16) and the optimizer's weights in fp32. Megatron divides each loss by the
number of microbatches of a rank, here the sum is divided: where that number is a power of two, as the rules make it,
bf16 has the same bits. In fp16 small gradients lose bits, and large ones overflow, at another size of the loss; so the
plain job's loss scale begins that number of times higher, which makes the sizes equal, and where neither side must
skip a step to find it. With a batch schedule the number changes, and both sides begin with the same scale.

Routers with an expert bias count tokens in fp32 on both sides. Megatron counts in the model's precision, and bf16 has
no odd number above 256: of moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed the losses of 10 steps then differ by 2.0e-5
at most, from the step on in which a bias has moved the other way; gradients and other weights are the same until then.

A distributed optimizer sums the squares in the norm of the gradients in an order of its own. That moves an update by
one part in 10^7 and, now and then, a bf16 weight to its neighbour. So the plain job has one exactly where each group
has one (over its inner data ranks, with an instance for each group), and none where the flag splits nothing here.
``split_difference`` is what the plain job's own losses differ by if it has one over all of its data-parallel ranks.

With --recipes the configurations are published recipes (tests/data/recipes), drawn and made small by
``_shrunk_recipes.py``: hybrid models too, and some with an optimizer, a kind of layers or a parametrization that no
recipe asks for. That needs megatron-core 0.19 and emerging-optimizers. Rows come smallest groups first, without
``split_difference``, and each is written to trained_recipes.json as soon as it is known; one whose side does not end
within --patience-s says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import RESULTS, command, show, write
from benchmarks._shrinking_rules import RULES, STEPS
from benchmarks._shrunk_flags import GROUPS, Shrunk, shrink
from benchmarks._shrunk_recipes import MORE_RULES, accepted_recipes, drawn_recipes, features_of
from tests import preloaded
from tests.pure.functional_sets import answers_of, functional_sets

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-5
FOLDERS = ("gpt/", "moe/")
HYBRID = {"--hybrid-layer-pattern", "--hybrid-override-pattern"}
SCALE = "--initial-loss-scale"
SPLIT, INSTANCES = "--use-distributed-optimizer", "--num-distributed-optimizer-instances"
SHOWN = (
    *("configuration", "layout", "precision", "loss_first", "loss_last", "difference", "bits_equal"),
    *("split_difference", "verdict"),
)


def main() -> None:
    """Print a line for each configuration and the table, write the JSON; exit code 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", action="store_true", help="train published recipes")
    parser.add_argument("--count", type=int, help="number of configurations to draw (20, or 30 recipes)")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--patience-s", type=float, default=600.0, help="the most seconds that a side may take")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="compare these instead, and write no results")
    parser.add_argument("--folder", type=Path, help="keep logs there, and do not train again what is there")
    options = parser.parse_args()
    accepted, drawn = _drawn(options.recipes, options.count, options.seed, options.only)
    print(f"seed {options.seed}: {len(drawn)} of {accepted} configurations", flush=True)
    name = "trained_recipes" if options.recipes else "functional_configs"
    rules = {flag: rule.reason for rule in (*RULES, *(MORE_RULES if options.recipes else ())) for flag in rule.flags}
    rows: list[dict] = []
    config: dict[str, object] = {}
    with _folder(options.folder) as folder:
        for number, (one, small) in enumerate(drawn.items(), 1):
            row = compare(one, small, folder / one, options.patience_s, split=not options.recipes)
            rows.append({**row, "features": " ".join(features_of(small))} if options.recipes else row)
            reported = {key: row[key] for key in SHOWN[1:]}
            print(f"{number}/{len(drawn)} {one}: " + ", ".join(f"{k} {v}" for k, v in reported.items()), flush=True)
            config = {"seed": options.seed, "accepted": accepted, **summary(rows)}
            if not options.only and (options.recipes or number == len(drawn)):
                write(RESULTS / f"{name}.json", name, command(), {**config, "rules": rules}, rows)
    show(name, config, [{key: row[key] for key in SHOWN} for row in rows])
    sys.exit(int(any(row["verdict"] != "equal" for row in rows)))


def _drawn(recipes: bool, count: int | None, seed: int, only: list[str] | None) -> tuple[int, dict[str, Shrunk]]:
    """(number of accepted configurations, those that are trained): drawn, or ``only`` some."""
    if recipes:
        accepted = accepted_recipes()
        found = drawn_recipes(accepted, count or 30, seed)
        return len(accepted), {name: one for name, one in found.items() if not only or name in only}
    sets = functional_sets()["training"]
    accepted = sorted(
        name for name, reported in answers_of("training").items() if not reported and name.startswith(FOLDERS)
    )
    names = only or sorted(random.Random(seed).sample(accepted, count or 20))
    return len(accepted), {name: shrink(sets[name]) for name in names}


def summary(rows: list[dict]) -> dict[str, object]:
    """What the rows have in common."""
    return {
        "drawn": len(rows),
        "equal": sum(row["verdict"] == "equal" for row in rows),
        "bits_equal": sum(bool(row["bits_equal"]) for row in rows),
        "largest_difference": max((row["difference"] for row in rows if row["difference"] is not None), default=None),
        "tolerance": TOLERANCE,
        "steps": STEPS,
        "groups": GROUPS,
    }


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


def compare(name: str, small: Shrunk, folder: Path, patience_s: float, split: bool = True) -> dict:
    """The row of one configuration, which is trained unless its row is in ``folder``. ``split``: find
    ``split_difference`` too."""
    reported = described(name, small)
    known = folder / "row.json"
    if known.exists() and (row := json.loads(known.read_text())).items() >= reported.items():
        return row
    folder.mkdir(parents=True, exist_ok=True)
    words = [*small.words, "--spare-reduce", "fp32"]
    try:
        plain = _plain(folder / "plain", words, small, GROUPS if small.inner_data > 1 else 0, patience_s)
        row = {**reported, **judge(plain, _ours(folder / "ours", words, patience_s)), "split_difference": None}
        if split and SPLIT in words:
            other = _plain(folder / "split", words, small, 1, patience_s)
            row["split_difference"] = judge(plain, other)["difference"]
    except UnfinishedError as error:
        return {**reported, **dict.fromkeys([*judge([], []), "split_difference"]), "verdict": str(error)}
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


def _plain(record: Path, words: list[str], small: Shrunk, instances: int, patience_s: float) -> list[dict]:
    """The history of the plain job, whose distributed optimizer, if it has any, has so many instances."""
    record, ranks = record.with_suffix(".jsonl"), GROUPS * small.group_size
    for left in (record, record.with_suffix(".store")):
        left.unlink(missing_ok=True)
    flags = [*words, "--spare-inner-data-parallel", str(GROUPS * small.inner_data)]
    for flag, length in ((INSTANCES, 2), *(() if instances else ((SPLIT, 1),))):
        if flag in flags:
            at = flags.index(flag)
            del flags[at : at + length]
    if "--fp16" in flags and small.value("--global-batch-size"):
        of_step = int(small.value("--global-batch-size")) // int(small.value("--micro-batch-size", "1"))
        last = len(flags) - flags[::-1].index(SCALE)
        flags[last] = str(int(flags[last]) * of_step // (GROUPS * small.inner_data))
    start = [sys.executable, "benchmarks/plain_losses.py", str(record)]
    has = instances if SPLIT in flags else 1
    commands = [[*start, str(rank), str(ranks), str(has), *flags] for rank in range(ranks)]
    _run(commands, record.with_suffix(""), patience_s)
    return _history(record, "plain megatron-core")


def _ours(run_dir: Path, words: list[str], patience_s: float) -> list[dict]:
    start = [sys.executable, "-m", "spare_megatron.cli.launch", "--num-groups", str(GROUPS), "--run-dir", str(run_dir)]
    patience = ("--spare-heartbeat-timeout-s", "120")
    shutil.rmtree(run_dir, ignore_errors=True)
    script = "pretrain_hybrid.py" if HYBRID & set(words) else "pretrain_gpt.py"
    _run([[*start, script, *words, *patience]], run_dir.parent / "launch", patience_s)
    return _history(run_dir / "metrics.jsonl", "the job of groups")


def _run(commands: list[list[str]], log: Path, patience_s: float) -> None:
    """Run processes to their end, or until one fails or ``patience_s`` are over; what they print goes to files. They
    are forked by a process that has made their imports."""
    environ = {
        **preloaded.environment(),
        "TORCHDYNAMO_DISABLE": "1",
        preloaded.LISTENING: preloaded.socket_path(),
    }
    until_s = time.monotonic() + patience_s
    processes = [preloaded.fork(command, environ, Path(f"{log}-{n}.log")) for n, command in enumerate(commands)]
    try:
        for process in processes:
            if process.wait(max(0.0, until_s - time.monotonic())):
                break
    except subprocess.TimeoutExpired:
        raise UnfinishedError(f"{log.name} did not end within {patience_s:g} s") from None
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
