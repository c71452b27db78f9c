"""Measured figures of README.md and docs/ are those of benchmarks/results, and each has a file there or a reason."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.pure.claim import GENERATED, HISTORY, PAGES, RESULTS, ROOT, Claim, pattern, shown
from tests.pure.figures import claims

CLAIMS = tuple(claims())
WRITE = "python -m tests.pure.figures writes the files' values into the pages"


@pytest.mark.parametrize("page", sorted({claim.page for claim in CLAIMS}))
def test_a_page_says_what_the_results_say(page: str) -> None:
    text = (ROOT / page).read_text()
    wrong = [line for claim in CLAIMS if claim.page == page for line in _disagreements(claim, text)]
    assert not wrong, "\n".join([*wrong, WRITE])


def _disagreements(claim: Claim, text: str) -> Iterator[str]:
    found = list(pattern(claim.words).finditer(text))
    if len(found) != 1:
        yield f"{claim.page} has {len(found)} times, not once, the words: {claim.words}"
        return
    for reported, figure in zip(found[0].groups(), claim.figures, strict=True):
        if reported != shown(figure.value, reported):
            where = " ".join(found[0].group().split())
            yield f"{claim.page} says {reported}, but {figure.value} is in {figure.source}: {where}"


def test_a_figure_that_differs_is_reported_with_page_and_file() -> None:
    claim = next(claim for claim in CLAIMS if claim.words.startswith("A masked failure takes"))
    value = claim.figures[0].value
    assert list(_disagreements(claim, "A masked failure takes 9.99\ns from")) == [
        f"README.md says 9.99, but {value} is in masked_failure.json: median_s (part=total_s, shape=PP2 x 4, "
        "hidden=128): "
        "A masked failure takes 9.99 s from"
    ]
    assert next(_disagreements(claim, "A masked failure takes long")).startswith("README.md has 0 times")


@pytest.mark.parametrize(
    ("value", "like", "is_shown"),
    [
        (1.0631, "1.06", "1.06"),
        (-2.26, "0.2", "-2.3"),
        (2.694, "+2.1", "+2.7"),
        (1237, "9,999", "1,237"),
        (2.5463e-08, "1.1e-8", "2.5e-8"),
        (1.2e-4, "1.1e-4", "1.2e-4"),
        (0.0, "0", "0"),
        ("73aca4cb", "00000000", "73aca4cb"),
    ],
)
def test_a_value_is_shown_as_precisely_as_the_page_does(value: float | str, like: str, is_shown: str) -> None:
    assert shown(value, like) == is_shown


MACHINES = {
    "page.json": ("Intel(R) Xeon(R) Processor", "docs/operating.md", "(two cores of an Intel Xeon without GPU,"),
    "watched_job.json": ("Intel(R) Xeon(R) Processor", "docs/operating.md", "(on an Intel Xeon, `benchmarks/"),
    "step_overhead_avx2.json": ("Intel(R) Xeon(R) Processor", "docs/measurements.md", "Xeon that used AVX2 only;"),
    "step_lines.json": ("Intel(R) Xeon(R) Processor", "docs/exact_reduction.md", "step_lines.json`, the Intel Xeon:"),
    "checksum_cost.json": ("Intel(R) Xeon(R) Processor", "docs/exact_reduction.md", "cost.json`, the Intel Xeon,"),
    "checksum_cost32.json": ("Intel(R) Xeon(R) Processor", "docs/exact_reduction.md", "cost32.json`, there too)"),
    "reduce_kernels_avx2.json": ("Intel(R) Xeon(R) Processor", "docs/exact_reduction.md", "thread, one Intel Xeon;"),
    "reduce_kernels_avx512.json": ("Intel(R) Xeon(R) Processor", "docs/exact_reduction.md", "thread, one Intel Xeon;"),
    "piece_size.json": ("Intel(R) Xeon(R) Processor", "docs/theory.md", "two seeds, on an Intel Xeon;"),
    "relief_model.json": ("Intel(R) Xeon(R) Processor", "docs/simulator.md", "run on an Intel Xeon"),
}
"""Results of another machine than all others: its name there, and the page that says so and how."""


def test_the_results_name_the_machine_that_the_pages_name() -> None:
    """docs/measurements.md says so once for all of its figures, other pages where they have timings."""
    used = {
        source for claim in CLAIMS for figure in claim.figures for source in re.findall(r"[\w.]+\.json", figure.source)
    }
    found = {source: json.loads((RESULTS / source).read_text())["hardware"] for source in sorted(used)}
    for source, (name, page, words) in MACHINES.items():
        assert (found.pop(source)["cpu"], words in (ROOT / page).read_text()) == (name, True), source
    machines = {(one["cpu"], one["cores"], tuple(one.get("gpus", ()))) for one in found.values()}
    assert machines == {("AMD EPYC", 2, ())}, "docs/measurements.md names the machine"
    assert "**Measured** on two cores of an AMD EPYC, without GPU" in (ROOT / "docs" / "measurements.md").read_text()


# Figures without a results file. A heading stands for its whole section, other words for themselves. A reason says why
# no file is needed; what was measured belongs into a file of benchmarks/results and a claim.
EXEMPT: dict[str, tuple[tuple[str, str], ...]] = {
    "settings, as the code has them": (
        ("docs/checkpoints.md", "GLM 4.5"),
        ("docs/design.md", "30 minutes by default"),
        ("docs/design.md", "gathers losses for 3 ms"),
        ("docs/design.md", "256 times"),
        ("docs/design.md", "a part of 32 MiB is ended"),
        ("docs/design.md", "every 4 MiB the state"),
        ("docs/design.md", "changes under 20%"),
        ("docs/exact_reduction.md", "used for 16 MB each or more"),
        ("docs/exact_reduction.md", "four buckets of 16 MiB"),
        ("docs/operating.md", "the data time-out (15 s)"),
        ("docs/reference.md", "after 5, 10, 20 ... 300 s"),
        (
            "docs/reference.md",
            "unless it takes more than 30 s, a signal comes meanwhile, the journal has more than 4 GiB",
        ),
        ("docs/operating.md", "if its coordinator started within 10 minutes"),
        ("docs/operating.md", "The server polls the directory every 0.5 s"),
        ("docs/operating.md", "Every 10 s the host is checked again"),
        ("docs/operating.md", "no commit for 15 minutes"),
        ("docs/operating.md", "waits for a command, for 5 s at most"),
        ("docs/operating.md", "A command is killed after 30 s"),
        ("docs/operating.md", "## The check of a host"),
        ("docs/operating.md", "torchrun kills its ranks 30 s after SIGTERM"),
        ("docs/waits_and_writes.md", "## Who waits, and who judges it"),
        ("docs/operating.md", "they are written every 2 s, or less often"),
        ("docs/operating.md", "takes long (8 s at most)"),
        ("docs/operating.md", "older than 10 s and the job has not ended"),
        ("docs/operating.md", "groups without a message for more than 2 s"),
        ("docs/operating.md", "32 MiB each before compression"),
        ("docs/operating.md", "some 40 MiB that are not compressed yet"),
        ("docs/slurm.md", "`--spare-heartbeat-timeout-s`, 5 s)"),
        ("docs/slurm.md", "5 s). A candidate"),
        ("docs/slurm.md", "about 10 s, and a heartbeat"),
        ("docs/slurm.md", "SIGUSR1 (120 s before"),
        ("docs/slurm.md", "answer within 20 s"),
        ("docs/slurm.md", "and masked. 5 s later"),
        ("docs/slurm.md", "less than 5 minutes are left"),
        ("docs/theory.md", "changes under 20%"),
        ("docs/theory.md", "Sizes within 0.1% are equal"),
        ("docs/troubleshooting.md", "Groups have 600 s to connect"),
        ("docs/simulator.md", "for at most 5 s, then it is sent back"),
        ("docs/simulator.md", "jitter of 5 and 20%"),
        ("docs/simulator.md", "(r = 6, pieces of 1/64, jitter of 5%)"),
        ("docs/simulator.md", "(`--balance`, pieces of 1/64, jitter of 5%)"),
        ("docs/operating.md", "in most of 18 steps (1.15 times the median or more)"),
        ("docs/operating.md", "is slow for long (2.00 times as long"),
        ("docs/protocol.md", "took at least 1.15 times as long"),
        ("docs/walk.md", "after 0.3 s, kills"),
        ("docs/walk.md", "closed for 0.5 s is a death, or 5 s without"),
        ("docs/walk.md", "known within 3 ms"),
        ("docs/walk.md", "waits 0.2 s (`VIEW_GRACE_S`)"),
        ("docs/when_a_gpu_dies.md", "(5 s). A rank"),
        ("docs/when_a_gpu_dies.md", "(60 s). Everything"),
    ),
    "versions of Slurm": (
        ("docs/slurm.md", "Since 24.05 Slurm itself"),
        ("docs/slurm.md", "Debian's Slurm 22.05 and 24.11"),
        ("docs/slurm.md", "slurmctld 23.11 to 24.11.5 may"),
    ),
    "what was run: a benchmark's or an example's own input": (
        ("docs/choosing_redundancy.md", "15 minutes for a restart"),
        ("docs/choosing_redundancy.md", "of which 70% take the node for a day on average"),
        (
            "docs/choosing_redundancy.md",
            "start in 5 minutes; the job that restarts does so in 10 minutes and waits 2 s",
        ),
        ("docs/choosing_redundancy.md", "(0.4% more to pay)"),
        ("docs/design.md", "F = 0.05, 0.25 and 1"),
        ("docs/simulator.md", "re-join after 600 s"),
        ("docs/simulator.md", "take 0.1 to 30 s to form anew"),
        ("docs/simulator.md", "restart in exactly 60 min"),
        ("docs/simulator.md", "`Reading.patch_work` = 0.07 shards"),
        ("docs/simulator.md", "patch work 0 / 0.28"),
        ("docs/simulator.md", "0.1 s against 30 s"),
        ("docs/simulator.md", "Up to 3 s"),
        ("docs/simulator.md", "every 200,000 s"),
        ("docs/theory.md", "Cost of R = 30 s against 0.1 s"),
        ("docs/theory.md", "(mean 300 s, shape 0.78, jitter 0.05)"),
        ("docs/theory.md", "*come back*: after 600 s;"),
        *(
            ("docs/theory.md", f"| {groups} | {words} |")
            for groups in (200, 1000)
            for words in ("after T = 600 s", "after T = 3600 s", "after T = 600 s, S = 300 s, rho = 20 s")
        ),
    ),
    "published by others, whose systems the page names": (
        ("docs/operating.md", "about 20 s with warm standbys at 1024 GPUs"),
        ("docs/operating.md", "150 s for a restart of 4800 devices"),
        ("docs/operating.md", "under 2 minutes (HyperPod"),
        ("docs/operating.md", "a stall of 3 minutes for each failure"),
    ),
    "goals": (
        ("docs/exact_reduction.md", "Goals are 0.9 of a copy"),
        ("docs/simulator.md", "The goal of 2 s"),
        ("docs/gpu_day.md", "# The first day on GPUs"),
    ),
    "arithmetic: who reads can compute it again": (
        ("docs/choosing_redundancy.md", "floor(log2 N + 0.833)"),
        ("docs/exact_reduction.md", "## A roofline for GPUs"),
        ("docs/gpu_costs.md", "# What sums cost on GPUs"),
        ("docs/theory.md", "floor(log2 N + 0.833)"),
        ("docs/exact_reduction.md", "y + 1.5 * 2^52"),
        ("docs/exact_reduction.md", "*-0.0* counts as 0: a sum of zeros is +0.0"),
        ("docs/exact_reduction.md", "T^1.5"),
        ("docs/holes.md", "until 0.749 of a lease after the claim, the new one serves from 0.5 on."),
        ("docs/holes.md", "within the 10 ms in which"),
        ("docs/when_a_gpu_dies.md", "up to 1.5 times as long"),
    ),
    "what spare-plan prints: the command is beside it": (
        ("docs/choosing_redundancy.md", "in shards: 1.35 = its steps take 1.35 times as long"),
        ("docs/choosing_redundancy.md", "within 0.5% of the best"),
        ("docs/choosing_redundancy.md", "most of the 1.134 is the save (30 s that"),
        ("docs/simulator.md", "## 600,000 GPUs"),
        ("docs/theory.md", "## 9. The order of a group's pieces"),
        ("docs/theory.md", "## 7. Worked example: 600,000 GPUs, staged and shared data"),
    ),
    "computed from the page's formulas": (
        ("docs/theory.md", "| 64 | 1.269 | 1.060 | 1.019 | 1.006 | 1.001 |"),
        ("docs/theory.md", "| 200 | 1.329 | 1.083 | 1.030 | 1.010 | 1.003 | 1.001 | 1.001 |"),
        ("docs/theory.md", "| 1000 | 1.357 | 1.075 | 1.025 | 1.011 | 1.005 | 1.003 | 1.001 |"),
        ("docs/theory.md", "the factor is below 1.002"),
        ("docs/theory.md", "With c = 74 s, a = 10 s a rebuild of 3 s costs 0.4 s a loss, one of 30 s 9 s."),
        ("docs/theory.md", "(7.5 with r = 2, 0.75 with 5, 0 with 17)"),
        ("docs/theory.md", "re-join r = 6 +2.2 /"),
        ("docs/theory.md", "r = 7 +1.7 /"),
        ("docs/theory.md", "shared +2.4 /"),
        ("docs/theory.md", "With a restart of 3,600 s and m = 300 s: 7,743 / 7,253 / 7,130 s"),
        ("docs/theory.md", "with shape 0.78 that is 1.28 at L = 0.85"),
        ("docs/theory.md", "and 2.5 groups away on the mean, 15.8 are without work"),
        ("docs/theory.md", "| 5.64 | {} | 2.921 | {} | 2.03 |"),
        ("docs/theory.md", "| 4.33 | {} | 2.471 | {} | 1.67 |"),
        ("docs/theory.md", "| 3.97 | {} | 2.331 | {} | 1.56 |"),
        ("docs/theory.md", "## 5. Choice (`planning/choose.py`)"),
    ),
    "found once, without a results file, and the page says so": (
        ("docs/theory.md", "made the theory 2 to 3% too high"),
        ("docs/theory.md", "## 2. Losses endured (`planning/endured.py`)"),
        ("docs/theory.md", "the mean work was 3% low at"),
        ("docs/theory.md", "the work was 1.4% high at"),
        ("docs/theory.md", "| no re-join, no planned restart |" + " {} / {} |" * 9),
        ("docs/theory.md", "| planned restart | | |" + " {} / {} |" * 7),
        ("docs/theory.md", "up to 16% too low where a restart comes every few losses (r = 3): clocks of shape 0.78"),
        ("docs/theory.md", "both agree within 3%"),
        ("docs/theory.md", "are 14% too low at r = 2, 10% too low to 1% too high at 3, and 0 to 3% too low"),
        ("docs/theory.md", "## 6. Failure domains (`placement/domains.py`)"),
        ("docs/when_a_gpu_dies.md", "## The timeline"),
    ),
}
PENDING = () if (RESULTS / "demo.json").exists() else (("README.md", "## Demo"),)
"""The demo's figures, as long as nobody has written benchmarks/results/demo.json."""

UNIT = r"(?:ns|us|ms|s|min|minutes|seconds|hours|h|times|points|[kMG]i?B(?:/s)?)\b|%"
FIGURE = re.compile(rf"(?<![\w.,/:#-])[+-]?(?:\d[\d,]*\.\d+(?:e-?\d+)?|\d[\d,]*(?:e-?\d+)?(?=\s*(?:{UNIT})))")
"""A number with a decimal point, or one before a unit."""
NO_TEXT = re.compile(
    r"```.*?```|`[^`\n]*`|\]\([^)\s]*\)|arXiv [\d.]+|\b\d+\.\d+\.\d+\b|^ {4}[^\n]*$"
    r"|\b(?:Python|Slurm|megatron-core|torch|NCCL)\s\d+\.\d+(?:(?:,|\s(?:or|to))\s\d+\.\d+)*",
    re.DOTALL | re.MULTILINE,
)
"""Code, link targets, numbers of papers and of versions, and formulas that stand by themselves."""


def _blank(text: str, start: int, end: int) -> str:
    return text[:start] + re.sub(r"[^\n]", " ", text[start:end]) + text[end:]


def _section(text: str, heading: str) -> tuple[int, int]:
    """From the heading to the next one of its rank or above; (-1, -1) where there is none."""
    start = (f"\n{text}").find(f"\n{heading}\n")
    if start < 0:
        return -1, -1
    following = re.compile(rf"^#{{1,{heading.count('#')}}} ", re.MULTILINE).search(text, start + 1)
    return start, following.start() if following else len(text)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in (HISTORY, *GENERATED)])
def test_no_figure_is_there_without_a_file_or_a_reason(page: str) -> None:
    whole = text = (ROOT / page).read_text()
    for claim in CLAIMS:
        for match in pattern(claim.words).finditer(whole) if claim.page == page else ():
            for group in range(1, len(claim.figures) + 1):
                text = _blank(text, *match.span(group))
    gone = []
    for where, words in (*(pair for pairs in EXEMPT.values() for pair in pairs), *PENDING):
        if where != page:
            continue
        spans = (
            [_section(whole, words)] if words.startswith("#") else [m.span() for m in pattern(words).finditer(whole)]
        )
        if not spans or spans[0] == (-1, -1):
            gone.append(words)
        for start, end in spans:
            text = _blank(text, start, end) if start >= 0 else text
    assert not gone, f"{page} no longer has what is exempt there: {gone}"
    for match in NO_TEXT.finditer(whole):
        text = _blank(text, *match.span())
    left = [
        f"{page}:{whole.count(chr(10), 0, match.start()) + 1}: {match.group()} in: "
        + " ".join(whole[max(0, match.start() - 50) : match.end() + 30].split())
        for match in FIGURE.finditer(text)
    ]
    assert not left, (
        "figures that neither a claim of tests/pure/claims_*.py nor a reason in EXEMPT covers:\n" + "\n".join(left)
    )
