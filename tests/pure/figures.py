"""Where the measured figures of README.md and docs/ come from: a claim for each, or a reason why it has none.

A claim is a page, words of it with ``{}`` in place of each figure, and the figures' places in a file of
benchmarks/results. A figure agrees when the file's value, rounded as the page shows it, is what the page says.

    python -m tests.pure.figures        writes the files' values into the pages

Words match whatever the line breaks. ``test_figures.py`` compares, and looks for figures that nobody claims.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
HISTORY, GENERATED = "docs/log.md", "docs/flags.md"
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
TWO_GROUPS, FOUR_GROUPS = "PP2 x 2 groups, K=8", "1 x 4 groups, K=8"


@dataclass(frozen=True)
class Figure:
    """A value of a results file, and the words that say where it stands."""

    value: float | str
    source: str

    def times(self, factor: float) -> Figure:
        return Figure(float(self.value) * factor, f"{self.source}, times {factor:g}")


@dataclass(frozen=True)
class Claim:
    """``words`` of ``page`` hold these figures, in this order."""

    page: str
    words: str
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Results:
    """One file of benchmarks/results."""

    name: str

    @functools.cached_property
    def content(self) -> dict[str, Any]:
        return dict(json.loads((RESULTS / self.name).read_text()))

    def __call__(self, key: str, **row: object) -> Figure:
        """The value of ``key`` in the only row of the results that has these values."""
        rows = [one for one in self.content["results"] if all(one[name] == value for name, value in row.items())]
        where = ", ".join(f"{name}={value}" for name, value in row.items())
        assert len(rows) == 1, f"{self.name} has {len(rows)} rows with {where}"
        return Figure(rows[0][key], f"{self.name}: {key} ({where})")

    def config(self, key: str) -> Figure:
        return Figure(self.content["config"][key], f"{self.name}: config.{key}")

    def every(self, key: str, **row: object) -> list[float]:
        """The values of ``key`` in all rows that have these values."""
        rows = (one for one in self.content["results"] if all(one[name] == value for name, value in row.items()))
        return [float(one[key]) for one in rows]

    def of(self, value: float, words: str) -> Figure:
        """A value made of several of the file's, as the words say."""
        return Figure(value, f"{self.name}: {words}")


def claims() -> Iterator[Claim]:
    """All of them, in the order of the pages."""
    yield from _readme()
    yield from _demo()
    yield from _operation()
    yield from _design()
    yield from _returns()
    yield from _journal()
    yield from _exact_errors()
    yield from _exact_cost()
    yield from _simulator_table()
    yield from _simulator_rest()
    yield from _theory()


def _soaked(*names: str) -> Iterator[Figure]:
    """Minutes of each run; faults, returns and steps of all together."""
    runs = [Results(name) for name in names]
    assert all(run("value", what="verdict").value == "as it should be" for run in runs)
    yield runs[0].config("minutes")
    for kind in ("fault:", "returns", "steps"):
        rows = (row for run in runs for row in run.content["results"] if row["what"].startswith(kind))
        yield Figure(sum(row["value"] for row in rows), f"{' and '.join(names)}: {kind}")


def _readme() -> Iterator[Claim]:
    masked = Results("masked_failure.json")
    rest = "all_but_patch_and_reduce_s"
    yield Claim("README.md", "A masked failure takes {} s from", (masked("median_s", part="total_s"),))
    yield Claim(
        "README.md",
        "Without the patch and the reduction that is {} s, and {} s at most",
        (masked("median_s", part=rest), masked("max_s", part=rest)),
    )
    yield Claim(
        "README.md",
        "In two runs of {} minutes each the small torch model (6 groups of 2) had {} faults and {} returns in {} "
        "steps, in two of {} minutes each a Megatron job (3 groups of PP2) {} and {} in {} steps",
        (*_soaked("soak_toy_11.json", "soak_toy_12.json"), *_soaked("soak_megatron_13.json", "soak_megatron_14.json")),
    )
    back = Results("recovery.json")
    start = sum(back("median_s", part=part).value for part in ("imports and flags", "world"))
    yield Claim(
        "README.md",
        "computes pieces again {} s after the signal, the median of ten kills; the others commit their step after {} s",
        (back("median_s", part="whole again"), back("median_s", part="next commit")),
    )
    yield Claim(
        "README.md",
        "{} s are the start of its processes, {} s the transfer",
        (back.of(start, "imports and world"), back("median_s", part="transfer")),
    )
    kept = Results("goodput.json")
    systems = ("spare_megatron", "torchrun", "torchft")
    yield Claim(
        "README.md",
        "one seeded schedule of {} kills in {} minutes). From a kill to the next new step it takes {} s (median), "
        "{} s where torchrun starts plain megatron-core again from checkpoints at their best interval, and {} s with "
        "torchft",
        (
            *(kept.config(key) for key in ("kills", "minutes")),
            *(kept("next_new_step_s", system=system) for system in systems),
        ),
    )
    yield Claim(
        "README.md",
        "Useful steps per second are {}, {} and {} of each",
        tuple(kept("ratio", system=system) for system in systems),
    )
    yield Claim(
        "README.md",
        "In all they are {}, {} and {} steps a second",
        tuple(kept("steps_per_s", system=system) for system in systems),
    )
    step = Results("step_overhead_avx2.json")
    two, four = ({"case": case, "against": "plain"} for case in (TWO_GROUPS, FOUR_GROUPS))
    yield Claim(
        "README.md",
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
        "README.md",
        "With exact sums it takes {} and {} times as long; in CPU time, {} and {}; and",
        tuple(step(key, reduce="exact", **case) for key in ("ratio", "cpu_ratio") for case in (two, four)),
    )
    yield Claim(
        "README.md",
        "and with pieces of 4 microbatches {} and {} times; in CPU time, {} and {}.",
        tuple(step(key, reduce="exact, C=4", **case) for key in ("ratio", "cpu_ratio") for case in (two, four)),
    )
    yield Claim("README.md", "turns of {} steps, {} rounds", (step.config("steps"), step.config("rounds")))


def _demo() -> Iterator[Claim]:
    """README's table of the demo, from the file that ``./scripts/demo.sh --json`` writes; see ``PENDING``."""
    if not (RESULTS / "demo.json").exists():
        return
    demo = Results("demo.json")
    parts = ("detect", "agree", "rebuild", "patch", "reduce")
    row = functools.partial(demo, steps=100)
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


def _operation() -> Iterator[Claim]:
    save = Results("checkpoint.json")
    beside, waits = {"mode": "beside training"}, {"mode": "training waits"}
    yield Claim(
        "docs/checkpoints.md",
        "a step waits {} ms ({} % of it) for a save beside the training, and {} ms ({} %) for one that it waits for",
        tuple(save(key, **mode) for mode in (beside, waits) for key in ("stall_ms", "stall_percent_of_step")),
    )
    yield Claim(
        "docs/checkpoints.md",
        "at {} GB/s beside the training and at {} GB/s alone; a plain copy has {} and {} GB/s",
        tuple(save(key, **mode) for key in ("write_gb_s", "copy_gb_s") for mode in (beside, waits)),
    )
    yield Claim("docs/checkpoints.md", "With {} MB on", (save("megabytes", **beside),))
    plan, keys = Results("controller.json"), ("plan_median_ms", "plan_p99_ms")
    yield Claim(
        "docs/choosing_redundancy.md",
        "{} ms in the median and {} ms in 99 of 100 cases; in shard granularity {} ms and {} ms (",
        tuple(plan(key, groups=1000, granularity=unit) for unit in ("microbatch", "shard") for key in keys),
    )
    tool = Results("preprocess.json")
    yield Claim(
        "docs/from_megatron.md",
        "{} times (tiktoken) to {} times (GPT-2) as fast",
        tuple(tool("rate_ratio", tokenizer=name) for name in ("tiktoken", "gpt2")),
    )
    masked = Results("masked_failure.json")
    yield Claim(
        "docs/when_a_gpu_dies.md",
        "the median of {} kills was {} s",
        (masked.config("kills"), masked("median_s", part="total_s")),
    )


def _returns() -> Iterator[Claim]:
    back, transfer, page = Results("recovery.json"), Results("transfer.json"), "docs/operating.md"
    times = {row["part"]: row["median_s"] for row in back.content["results"]}
    for words, parts in (
        ("| the others commit the step in flight | {} |", ("next commit",)),
        ("| decision, check of the host | {} |", ("decision and check",)),
        ("| imports and flags of its ranks | {} |", ("imports and flags",)),
        ("| their world | {} |", ("world",)),
        ("| model, data, a piece for nothing | {} |", ("model", "checkpoint", "data and engine", "piece for nothing")),
        ("| offer and transfer of the state | {} |", ("offer", "transfer")),
        ("| catch-up, proof, admission | {} |", ("catch-up and proof",)),
        ("| its first pieces are committed: whole again | {} in all |", ("whole again",)),
    ):
        yield Claim(page, words, (back.of(sum(times[part] for part in parts), f"median_s of {', '.join(parts)}"),))
    yield Claim(page, "each of the {} steps in between", (back.config("median_steps_until_whole"),))
    one, two = ({"donors": donors} for donors in (1, 2))
    yield Claim(
        page,
        "A state of {} MiB takes {} s from one donor and {} s from two, by the loopback device ({} and {} GB/s at one "
        "position), for {} s and {} s of the donors' CPU time for each GB",
        (
            transfer.config("mib"),
            *(transfer(key, **donors) for key in ("fetch_s", "gb_s", "donors_cpu_s_per_gb") for donors in (one, two)),
        ),
    )
    cost = Results("return_cost.json")
    alone, starts, learns = (
        {"steps": f"of 3 groups, {words}"}
        for words in ("nothing comes back", "processes start", "from the offer to the admission")
    )
    slowest = max(float(cost("max_s", **kind).value) for kind in (starts, learns))
    yield Claim(
        page,
        "{} of their length without a return while a group learns, {} while its processes start, and none took more "
        "than {} s where {} s is normal.",
        (
            cost("ratio_to_alone", **learns),
            cost("ratio_to_alone", **starts),
            cost.of(slowest, "the larger max_s of the steps with a return"),
            cost("median_s", **alone),
        ),
    )
    beyond = max(cost.content["config"]["steps_from_the_transfers_end_to_own_pieces"])
    yield Claim(
        page, "first pieces came {} steps after", (cost.of(beyond, "the largest number of steps to own pieces"),)
    )


def _journal() -> Iterator[Claim]:
    page, day = "docs/design.md", functools.partial(Results("journal.json"), groups=1000, hours=24.0)
    yield Claim(
        page,
        "1000 groups write {} MB a day, with a death every five minutes, and its replay takes {} s",
        (day("plain_mb"), day("verify_s")),
    )
    yield Claim(page, "such a day take {} MB, and a restart {} s", (day("disk_mb"), day("restart_s")))


def _design() -> Iterator[Claim]:
    page = "docs/design.md"
    audit = Results("audit_cost.json")
    rates = (0.05, 0.25, 1.0)
    yield Claim(
        page,
        "steps {}, {} and {} times as long (PP2 x 2 groups) and {}, {} and {} (1 x 4)",
        tuple(audit("ratio", case=case, rate=rate) for case in (TWO_GROUPS, FOUR_GROUPS) for rate in rates),
    )
    beside = audit.every("beside")
    yield Claim(
        page,
        "for each piece computed {} to {} times",
        (audit.of(min(beside), "least of beside"), audit.of(max(beside), "largest of beside")),
    )
    overlap = Results("step_overlap.json")
    one, two = {"case": "1 x 2 groups, K=2"}, {"case": "PP2 x 2 groups, K=4"}
    loopback = [overlap("hidden_share", link_mbit="", **case).times(100) for case in (one, two)]
    loopback += [overlap("ratio", link_mbit="", **case) for case in (one, two)]
    yield Claim(
        page,
        "over plain loopback {} % (1 x 2 groups) and {} % (PP2 x 2) of the time between the last gradient and its sums "
        "is hidden, and the step takes {} and {} times as long",
        tuple(loopback),
    )
    slow = [overlap("hidden_share", link_mbit=2000, **case).times(100) for case in (one, two)]
    slow += [overlap("ratio", link_mbit=2000, **case) for case in (one, two)]
    yield Claim(page, "with 2 Gbit/s {} % and {} % are hidden, and the step takes {} and {} times", tuple(slow))


def _exact_errors() -> Iterator[Claim]:
    page = "docs/exact_reduction.md"
    made_up = Results("exact_error.json")
    forms = ("int64", "exact32", "fp32", "bf16")
    for pieces in (8, 32, 256):
        figures = tuple(made_up(f"{form}_relative_l2", pieces=pieces, spread_bits=16) for form in forms)
        above = "|---|---|---|---|---| " if pieces == 8 else ""
        yield Claim(page, f"{above}| {pieces} | {{}} | {{}} | {{}} | {{}} |", figures)
    few, many = (
        made_up.of(
            float(made_up("exact32_relative_l2", pieces=pieces, spread_bits=16).value)
            / float(made_up("fp32_relative_l2", pieces=pieces, spread_bits=16).value),
            f"exact32 / fp32 (pieces={pieces}, spread_bits=16)",
        )
        for pieces in (8, 256)
    )
    yield Claim(page, "({} times fp32 with 8 pieces, {} times with 256)", (few, many))
    real = Results("real_gradients.json")
    forms = ("exact", "exact32", "fp32", "bf16")
    rows = [row for row in real.content["results"] if row["tensor"] != "worst"]
    yield Claim(page, "median over the steps, {} tensors", (real.of(len(rows), "rows of a tensor"),))
    for what, name in (("sum", "sum"), ("update", "Adam update")):
        middle = [real.of(median(row[f"{form}_{what}"] for row in rows), f"median {form}_{what}") for form in forms]
        worst = [real(f"{form}_{what}", tensor="worst") for form in forms]
        yield Claim(page, f"| {name}, median tensor | {{}} | {{}} | {{}} | {{}} |", tuple(middle))
        yield Claim(page, f"| {name}, worst tensor | {{}} | {{}} | {{}} | {{}} |", tuple(worst))
        if what == "sum":
            exact32, fp32, bf16 = (float(figure.value) for figure in middle[1:])
            yield Claim(
                page,
                "its error is {} times fp32's and {} times bf16's (",
                (
                    real.of(exact32 / fp32, "median exact32_sum / fp32_sum"),
                    real.of(exact32 / bf16, "median exact32_sum / bf16_sum"),
                ),
            )
            yield Claim(page, "Its {} is the last rounding to fp32", (middle[0],))
            yield Claim(page, "| exact | one rounding to fp32; {} relative |", (middle[0],))


def _exact_cost() -> Iterator[Claim]:
    page = "docs/exact_reduction.md"
    step, modes = Results("step_overhead_avx2.json"), Results("step_modes.json")
    longer = Results("step_modes_1024.json")
    rows = ((step, "exact", 256), (step, "exact, C=4", 256), (longer, "exact", 1024), (modes, "exact32", 256))
    for source, mode, tokens in rows:
        figures = [
            source(key, case=case, reduce=mode, against="fp32")
            for case in (TWO_GROUPS, FOUR_GROUPS)
            for key in ("ratio", "cpu_ratio")
        ]
        yield Claim(
            page,
            f"| {mode}, {tokens} ({{}} rounds) | {{}} | {{}} | {{}} | {{}} |",
            (source.config("rounds"), *figures),
        )
    spread = [
        abs(row[quarter] - row["ratio"])
        for source, mode, _ in rows
        for row in source.content["results"]
        if (row["reduce"], row["against"]) == (mode, "fp32")
        for quarter in ("ratio_quarter", "ratio_three_quarters")
    ]
    largest = Figure(max(spread), "step_overhead_avx2.json, step_modes*.json: farthest quarter of a ratio in the table")
    yield Claim(page, "up to {} from these medians", (largest,))
    checks, checks32 = Results("checksum_cost.json"), Results("checksum_cost32.json")
    keys = ("step_ms", "weights_ms", "accumulators_ms", "result_ms", "result_digest_ms", "ratio")
    yield Claim(
        page,
        "a step of {} ms of 2,048 tokens): digest of the weights {} ms, checksums of accumulators {} ms and of the "
        "result {} ms, digest of the result's scalars {} ms, together {} times",
        tuple(checks(key, mode="exact") for key in keys),
    )
    yield Claim(page, "`exact32` {} times (", (checks32("ratio", mode="exact32"),))
    older, kernels = Results("reduce_kernels_avx2.json"), Results("reduce_kernels_avx512.json")
    for name in dict.fromkeys(row["kernel"] for row in kernels.content["results"]):
        cells = [
            source(key, kernel=name, threads=1)
            for source in (older, kernels)
            for key in ("ns_per_element", "of_copy", "times_torch_sequence")
        ]
        yield Claim(page, f"| {name} |" + " {} | {} | {} |" * 2, tuple(cells))
    yield Claim(
        page,
        "adding a gradient takes {} times as long (",
        (kernels("times_fallback", kernel="accumulate float32", threads=1),),
    )
    registers = Results("cuda_registers.json")
    spilled = sum(registers.every("spill_stores_bytes") + registers.every("spill_loads_bytes"))
    yield Claim(page, "sm_100 with {} bytes of spilled registers", (registers.of(spilled, "sum of spills"),))


def _simulator_table() -> Iterator[Claim]:
    page = "docs/simulator.md"
    table = Results("reproduce_spare.json")
    for policy, groups, redundancy in (
        *(("replication", groups, 3) for groups in (200, 600, 1000)),
        *(("spare", groups, r) for groups, r in ((200, 9), (600, 8), (1000, 9))),
    ):
        row = {"policy": policy, "groups": groups, "redundancy": redundancy, "pieces": 1}
        name = {("replication", 200): "replication, r = 3", ("spare", 200): "SPARe, r = 9"}.get((policy, groups))
        name = name or {"replication": "", "spare": f"SPARe, r = {redundancy}"}[policy]
        yield Claim(
            page,
            f"| {groups} | {name + ' ' if name else ''}| {{}} | {{}} | {{}}% | {{}}% | {{}}% |",
            tuple(
                table(key, **row)
                for key in (
                    *("ratio", "published_ratio", "off_percent"),
                    *("availability_percent", "published_availability_percent"),
                )
            ),
        )
    yield Claim(
        page,
        "a standard deviation of {} points from seed to seed",
        (table("availability_sd_points", policy="replication", groups=200, redundancy=3, pieces=1),),
    )
    up_time = [
        abs(value)
        for value in table.every("up_time_off_percent", groups=200, policy="replication", redundancy=3, pieces=1)
    ]
    yield Claim(
        page, "what training itself took, is {}% apart", (table.of(up_time[0], "up_time_off_percent, N = 200"),)
    )
    yield Claim(page, "{} minutes of CPU)", (table.config("cpu_s").times(1 / 60),))
    for policy, name, pieces in (("spare", "SPARe", 1), ("microbatch", "ours", 16)):
        best: list[Figure] = []
        for groups in (200, 600, 1000):
            rows = [
                (row["ratio"], row["redundancy"])
                for row in table.content["results"]
                if (row["policy"], row["groups"], row["pieces"]) == (policy, groups, pieces)
            ]
            best += [table.of(value, f"best {policy}, N = {groups}") for value in min(rows)]
        yield Claim(page, f"{name} {{}} (r = {{}}), {{}} (r = {{}}), {{}} (r = {{}});", tuple(best))
    for words, policy in (
        ("pieces of 1/16 shard, r = 7, lost groups stay lost", "microbatch"),
        ("shared data, planned restart after 80 / 180 / 250 losses", "shared data, planned restart"),
        ("re-join after 600 s, r = 6, pieces of 1/64", "re-join"),
        ("the same without jitter", "re-join, no jitter"),
        (
            "the same, saves do not block, slow groups give pieces up (`--balance`)",
            "re-join, balance, saves do not block",
        ),
        ("replication, r = 3, re-join after 600 s", "replication, re-join"),
    ):
        extra = {"redundancy": 7} if policy == "microbatch" else {}
        figures = tuple(table("ratio", policy=policy, groups=groups, **extra) for groups in (200, 600, 1000))
        yield Claim(page, f"| {words} | {{}} | {{}} | {{}} |", figures)
    yield from _turned_around(page, table)


def _turned_around(page: str, table: Results) -> Iterator[Claim]:
    def pair(policy: str) -> tuple[Figure, Figure]:
        return table("ratio", policy=policy), table("availability_percent", policy=policy)

    for name in (
        *("as read", "one system-wide clock", "exponential failures", "no jitter", "restart in exactly 60 min"),
        *("clocks start new at a restart", "every masked failure + 1 layer"),
    ):
        yield Claim(
            page, f"| {name} | {{}}, {{}}% | {{}}, {{}}% |", (*pair(f"replication: {name}"), *pair(f"spare: {name}"))
        )
    yield Claim(
        page,
        "| cyclic instead of blocks; consecutive offsets | {}, {}% | {}, {}% |",
        (*pair("replication: cyclic, no blocks"), *pair("spare: consecutive offsets")),
    )
    for name in ("a patch waits for the slowest", "every death waits for the reduction"):
        yield Claim(page, f"| {name} | | {{}}, {{}}% |", pair(f"spare: {name}"))
    low, high = (pair(f"spare: patch work {work} in the save interval") for work in ("0", "0.28"))
    yield Claim(page, "| patch work 0 / 0.28 in the save interval | | {} / {}, {}% |", (low[0], *high))


def _simulator_rest() -> Iterator[Claim]:
    page = "docs/simulator.md"
    grid, wide = Results("plan_grid.json"), Results("plan_grid_600_1000.json")
    cases = (("staged", "-"), ("shared", "-"), ("staged", 600.0))
    for source, groups in ((grid, 200), (wide, 600), (wide, 1000)):
        yield Claim(
            page,
            f"| {groups} | {{}}% | {{}}% | {{}}% |",
            tuple(source("off_percent", groups=groups, data=data, rejoin_s=back) for data, back in cases),
        )
    sweep = Results("rebuild_sweep.json")
    for words, policy in (
        ("replication", "replication r=3"),
        ("SPARe", "SPARe r=9"),
        ("ours", "microbatch r=7"),
        ("with planned restarts", "shared data, planned restart"),
        ("with re-join", "re-join r=6"),
    ):
        keys = ("at_0.1_s", "at_30_s", "cost_at_30_s_percent")
        yield Claim(page, f"{words} {{}} to {{}} ({{}}%)", tuple(sweep(key, policy=policy) for key in keys))
    to_3_s = max(row["at_3_s"] / row["at_0.1_s"] - 1 for row in sweep.content["results"])
    yield Claim(page, "Up to 3 s nothing costs more than {}%", (sweep.of(100 * to_3_s, "largest at_3_s / at_0.1_s"),))
    racks = Results("failure_domains.json")
    spread = [
        racks("ratio", redundancy=r, machines=machines) for r in (2, 3, 4, 7) for machines in ("as listed", "spread")
    ]
    yield Claim(
        page, "falls from {} to {} at r = 2, {} to {} at 3, {} to {} at 4; it is {} and {} at r = 7", tuple(spread)
    )
    speed, large = Results("simulator.json"), Results("simulator_10000.json")
    policies = ("replication", "spare", "microbatch", "microbatch, re-join")
    yield Claim(
        page,
        "replication {} s, SPARe {} s, ours {} s and with re-join {} s of CPU;",
        tuple(speed("cpu_s", policy=policy) for policy in policies),
    )
    memory = speed.of(max(speed.every("memory_max_mib")), "largest memory_max_mib")
    yield Claim(page, "{} MiB at most", (memory,))
    yield Claim(
        page,
        "(`simulator_10000.json`): {}, {}, {} and {} s, {} MiB",
        (
            *(large("cpu_s", policy=policy) for policy in policies),
            large.of(max(large.every("memory_max_mib")), "largest memory_max_mib"),
        ),
    )


def _theory() -> Iterator[Claim]:
    page = "docs/theory.md"
    table = Results("theory_table.json")
    redundancies = (2, 3, 4, 6, 8, 12, 16, 20)
    rows, cells = [], []
    for groups in (64, 200, 600, 1000, 4000):
        there = [r for r in redundancies if table.every("r", groups=groups, r=r)]
        rows.append(f"| {groups} | " + " | ".join("{}" if r in there else "-" for r in redundancies) + " |")
        cells += [table("published_off_percent", groups=groups, r=r) for r in there]
    yield Claim(page, " ".join(rows), tuple(cells))
    error = table.of(max(table.every("error_percent")), "largest error_percent")
    yield Claim(page, "standard error is at most {}%; -:", (error,))
    worst = {"microbatch_off_percent": -float(table.config("worst_microbatch_off_percent").value)}
    yield Claim(
        page,
        "endured within {}%, work of shards within {}%, of pieces of 1/16 within {}% (N = 4000, r = 3: {} orders, "
        "standard error {}%)",
        (
            *(table.config(f"worst_{what}_off_percent") for what in ("ours", "shard", "microbatch")),
            *(table(key, groups=4000, r=3, **worst) for key in ("microbatch_orders", "microbatch_error_percent")),
        ),
    )
    back = Results("rejoin_table.json")
    for groups in (200, 1000):
        for words, one in (
            ("after T = 600 s", {"rejoin_s": 600.0, "transfer_s": 0.0}),
            ("after T = 3600 s", {"rejoin_s": 3600.0, "transfer_s": 0.0}),
            ("after T = 600 s, S = 300 s, rho = 20 s", {"rejoin_s": 600.0, "transfer_s": 300.0}),
        ):
            cells = [back(key, groups=groups, r=r, **one) for r in (5, 7, 10) for key in ("theory", "simulated")]
            yield Claim(page, f"| {groups} | {words} | {{}} / {{}} | {{}} / {{}} | {{}} / {{}} |", tuple(cells))
    yield Claim(page, "The largest gap is {}%. With r = 3", (back.config("worst_off_percent"),))
    sweep = Results("rebuild_sweep.json")
    for words, policy in (
        ("re-join r = 6 +2.2 / {}%,", "re-join r=6"),
        ("r = 7 +1.7 / {}%,", "microbatch r=7"),
        ("shared +2.4 / {}%.", "shared data, planned restart"),
    ):
        yield Claim(page, words, (sweep("cost_at_30_s_percent", policy=policy),))
    simulated = Results("reproduce_spare.json")
    for groups, *theory in ((200, 5.64, 2.921, 2.03), (600, 4.33, 2.471, 1.67), (1000, 3.97, 2.331, 1.56)):
        rows = (("replication", 3, 1), ("spare", 9, 1), ("microbatch", 7, 16))
        figures = [simulated("ratio", policy=name, groups=groups, redundancy=r, pieces=k) for name, r, k in rows]
        cells = " | ".join(f"{{}} | {value}" for value in theory)
        yield Claim(page, f"| {groups} | {cells} |", tuple(figures))
    yield from _piece_size(page)
    time = Results("plan_time.json")
    yield Claim(
        page,
        "takes {} s of CPU (staged) and {} s (shared)",
        tuple(time("cpu_s", data=data) for data in ("staged", "shared")),
    )


def _piece_size(page: str) -> Iterator[Claim]:
    pieces = Results("piece_size.json")
    rows, sizes = pieces.content["results"], (1, 2, 4, 8)
    names = {"rejoin": "come back", "stay": "stay lost", "rare": "rare"}
    costs = {row["cost"]: pieces.of(100 * row["cost"], "cost, in percent") for row in rows}
    yield Claim(page, "{}% was measured on a CPU with 256 tokens, {}% is the roofline", tuple(costs.values()))
    words, cells = "|---|---|---|---|---|---|---|---|---|", []
    for row in rows:
        case = {key: row[key] for key in ("groups", "losses", "cost")}
        words += (
            f" | {row['groups']} | {names[row['losses']]} | {{}}% |" + " {} |" * len(sizes) + " {}: {}% | {}: {}% |"
        )
        choices = (pieces(key, **case) for name in ("auto", "default") for key in (name, f"{name}_off_percent"))
        cells += [costs[row["cost"]], *(pieces(f"at_{size}", **case) for size in sizes), *choices]
    yield Claim(page, words, tuple(cells))
    alone = max(100 * (row["at_1"] / min(row[f"at_{size}"] for size in sizes) - 1) for row in rows)
    yield Claim(
        page,
        "within {}% of the best. The default is up to {}% off, which is what its promise costs; with C = 1 it would be "
        "up to {}%. The last",
        (
            pieces.of(max(pieces.every("auto_off_percent")), "largest auto_off_percent"),
            pieces.of(max(pieces.every("default_off_percent")), "largest default_off_percent"),
            pieces.of(alone, "largest excess of at_1"),
        ),
    )
    config = tuple(pieces.config(key) for key in ("microbatches", "redundancy", "steps"))
    yield Claim(page, "{} microbatches per shard, r = {}, the published cluster with {} steps, two", config)


def pattern(words: str) -> re.Pattern[str]:
    """What the words look like in a page: any white space between them, any word in place of ``{}``."""
    assert not words.endswith("{}"), f"words behind the last figure are missing: {words}"
    parts = [r"\s+".join(map(re.escape, part.split(" "))) for part in words.split("{}")]
    return re.compile(r"([^\s|]+?)".join(parts) + r"(?!\d)")


def shown(value: float | str, like: str) -> str:
    """The value with as many decimals, and in the form, that ``like`` has."""
    if isinstance(value, str):
        return value
    digits, power, _ = like.lower().partition("e")
    decimals = len(digits.partition(".")[2])
    sign = "+" if like.startswith("+") else ""
    if power:
        return re.sub(
            r"e([+-])0*(\d)", lambda match: f"e{match[1].strip('+')}{match[2]}", f"{value:{sign}.{decimals}e}"
        )
    return f"{value:{sign}{',' if ',' in like else ''}.{decimals}f}"


def write() -> None:
    """Puts the files' values into the pages. Words that a page does not have are left to the test."""
    for claim in claims():
        path = ROOT / claim.page
        text = path.read_text()
        for match in reversed(list(pattern(claim.words).finditer(text))):
            for group in range(len(claim.figures), 0, -1):
                start, end = match.span(group)
                text = text[:start] + shown(claim.figures[group - 1].value, match[group]) + text[end:]
        path.write_text(text)


if __name__ == "__main__":
    write()
