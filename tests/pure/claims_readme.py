"""The figures of README.md and docs/measurements.md."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from tests.pure.claim import FOUR_GROUPS, RESULTS, SMALL, TWO_GROUPS, Claim, Figure, Results

MEASURED = "docs/measurements.md"


def readme() -> Iterator[Claim]:
    """The few of README.md's section on why."""
    masked, back = Results("masked_failure.json"), Results("recovery.json")
    yield Claim("README.md", "A masked failure takes {} s from", (masked("median_s", part="total_s", **SMALL),))
    yield Claim("README.md", "group computes pieces again {} s after", (back("median_s", part="whole again"),))
    kept = Results("goodput.json")
    systems = ("spare_megatron", "torchrun", "torchft")
    yield Claim(
        "README.md",
        "With the same {} kills in {} minutes, the median time from a kill to the next new step is {} s; with torchrun "
        "and checkpoints at their best interval it is {} s, with torchft {} s. In all, the three commit {}, {} and {} "
        "steps a second",
        (
            *(kept.config(key) for key in ("kills", "minutes")),
            *(kept(key, system=system) for key in ("next_new_step_s", "steps_per_s") for system in systems),
        ),
    )
    step = Results("step_overhead_avx2.json")
    yield Claim(
        "README.md",
        "A step without failures takes {} times as long as with plain megatron-core with fp32 sums, and {} to {} times",
        (
            step("ratio", reduce="fp32", case=TWO_GROUPS, against="plain"),
            *(step("ratio", reduce="exact", case=case, against="plain") for case in (TWO_GROUPS, FOUR_GROUPS)),
        ),
    )


def measurements() -> Iterator[Claim]:
    masked = Results("masked_failure.json")
    rest = "all_but_patch_and_reduce_s"
    yield Claim(MEASURED, "A masked failure takes {} s from", (masked("median_s", part="total_s", **SMALL),))
    yield Claim(
        MEASURED,
        "Without the patch and the reduction that is {} s, and {} s at most",
        (masked("median_s", part=rest, **SMALL), masked("max_s", part=rest, **SMALL)),
    )
    yield Claim(
        MEASURED,
        "In two runs of {} minutes each the small torch model (6 groups of 2) had {} faults and {} returns in {} "
        "steps, in two of {} minutes each a Megatron job (3 groups of PP2) {} and {} in {} steps",
        (*_soaked("soak_toy_11.json", "soak_toy_12.json"), *_soaked("soak_megatron_13.json", "soak_megatron_14.json")),
    )
    back = Results("recovery.json")
    start = sum(back("median_s", part=part).value for part in ("imports and flags", "world"))
    yield Claim(
        MEASURED,
        "computes pieces again {} s after the signal, the median of ten kills; the others commit their step after {} s",
        (back("median_s", part="whole again"), back("median_s", part="next commit")),
    )
    yield Claim(
        MEASURED,
        "{} s are the start of its processes, {} s the transfer",
        (back.of(start, "imports and world"), back("median_s", part="transfer")),
    )
    kept = Results("goodput.json")
    systems = ("spare_megatron", "torchrun", "torchft")
    yield Claim(
        MEASURED,
        "one seeded schedule of {} kills in {} minutes). From a kill to the next new step it takes {} s (median), "
        "{} s where torchrun starts plain megatron-core again from checkpoints at their best interval, and {} s with "
        "torchft",
        (
            *(kept.config(key) for key in ("kills", "minutes")),
            *(kept("next_new_step_s", system=system) for system in systems),
        ),
    )
    yield Claim(
        MEASURED,
        "Useful steps per second are {}, {} and {} of each",
        tuple(kept("ratio", system=system) for system in systems),
    )
    yield Claim(
        MEASURED,
        "In all they are {}, {} and {} steps a second",
        tuple(kept("steps_per_s", system=system) for system in systems),
    )
    samples = float(kept("samples_ratio", system="torchft").value) / float(kept("ratio", system="torchft").value)
    yield Claim(
        MEASURED,
        "torchft's steps have {} of the samples. Without kills they were {}, {} and {}:",
        (kept.of(samples, "samples of a step"), *(kept("calm_steps_per_s", system=system) for system in systems)),
    )
    step = Results("step_overhead_avx2.json")
    two, four = ({"case": case, "against": "plain"} for case in (TWO_GROUPS, FOUR_GROUPS))
    yield Claim(
        MEASURED,
        "A step with fp32 sums takes {} times as long as one of plain megatron-core data parallelism on the same ranks "
        "(PP2 x 2 groups, steps of {} s) and {} times (1 x 4 groups, {} s); in CPU time, {} and {}.",
        tuple(
            step(key, reduce="fp32", **case)
            for key, case in (
                *(("ratio", two), ("step_s", two), ("ratio", four), ("step_s", four)),
                *(("cpu_ratio", two), ("cpu_ratio", four)),
            )
        ),
    )
    yield Claim(
        MEASURED,
        "where plain has one as well it is {} and {} of its CPU time.",
        tuple(
            step("cpu_ratio", case=case, reduce="fp32", against="plain, one gloo device")
            for case in (TWO_GROUPS, FOUR_GROUPS)
        ),
    )
    yield Claim(
        MEASURED,
        "With exact sums it takes {} and {} times as long; in CPU time, {} and {}; and",
        tuple(step(key, reduce="exact", **case) for key in ("ratio", "cpu_ratio") for case in (two, four)),
    )
    yield Claim(
        MEASURED,
        "and with pieces of 4 microbatches {} and {} times; in CPU time, {} and {}.",
        tuple(step(key, reduce="exact, C=4", **case) for key in ("ratio", "cpu_ratio") for case in (two, four)),
    )
    yield Claim(MEASURED, "turns of {} steps, {} rounds", (step.config("steps"), step.config("rounds")))
    yield Claim(
        MEASURED,
        "another of its kind came out at {} and {} of its CPU time",
        tuple(step("cpu_ratio", reduce="fp32 again", case=case) for case in (TWO_GROUPS, FOUR_GROUPS)),
    )


def _soaked(*names: str) -> Iterator[Figure]:
    """Minutes of each run; faults, returns and steps of all together."""
    runs = [Results(name) for name in names]
    assert all(run("value", what="verdict").value == "as it should be" for run in runs)
    yield runs[0].config("minutes")
    for kind in ("fault:", "returns", "steps"):
        rows = (row for run in runs for row in run.content["results"] if row["what"].startswith(kind))
        yield Figure(sum(row["value"] for row in rows), f"{' and '.join(names)}: {kind}")


def demo() -> Iterator[Claim]:
    """README's table of the demo, from the file that ``./scripts/demo.sh --json`` writes; see ``PENDING``."""
    if not (RESULTS / "demo.json").exists():
        return
    demo = Results("demo.json")
    parts = ("detect", "agree", "rebuild", "patch", "reduce")
    row = functools.partial(demo, steps=40)
    yield Claim("README.md", "| steps committed | {} of {} |", (row("steps_committed"), row("steps")))
    yield Claim("README.md", "| failures masked | {} |", (row("failures_masked"),))
    yield Claim("README.md", "| steps lost | {} |", (row("steps_lost"),))
    yield Claim(
        "README.md",
        "| stall | {} s, " + ", ".join(f"{part} {{}} ms" for part in parts) + " |",
        (row("total_s"), *(row(f"{part}_s").times(1000) for part in parts)),
    )
    yield Claim(
        "README.md",
        "| the killed group | back in step {}, {} s later; {} of 4 groups at the end |",
        (row("step_back"), row("back_s"), row("live_groups_last")),
    )
    yield Claim("README.md", "| loss, first to last step | {} to {} |", (row("loss_first"), row("loss_last")))
    yield Claim("README.md", "| loss of the run without failure | {} |", (row("loss_last_without_failure"),))
    yield Claim(
        "README.md", "| largest relative difference of a step's loss | {} |", (row("loss_relative_difference_max"),)
    )
    digest, other = (str(row(key).value) for key in ("digest", "digest_without_failure"))
    yield Claim(
        "README.md",
        "| weights | bit for bit equal, both digests `{}...` |",
        (Figure(digest[:8] if digest == other else "of them differ", "demo.json: both digests"),),
    )
