"""The figures of docs/exact_reduction.md."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from tests.pure.claim import FOUR_GROUPS, TWO_GROUPS, Claim, Figure, Results


def exact_errors() -> Iterator[Claim]:
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


def layout_cost(page: str) -> Iterator[Claim]:
    cost = Results("layout_cost.json")
    norm, states = (cost(f"{name}_extra_share").times(100) for name in ("norm", "states"))
    yield Claim(
        page,
        "{} ns an element against core's {}, and {}% more of a step of {} ms.",
        (cost("norm_ns"), cost("core_norm_ns"), norm, cost("step_ms")),
    )
    yield Claim(page, "setting them takes {} us a layer, {}% of that step.", (cost("states_us"), states))
    yield Claim(page, "as the last of several stages has it; there {} times the step.", (cost("tied_apart_ratio"),))


def exact_cost() -> Iterator[Claim]:
    page = "docs/exact_reduction.md"
    yield from layout_cost(page)
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
            page, f"| {mode}, {tokens} ({{}} rounds) | {{}} | {{}} | {{}} | {{}} |", (source.config("rounds"), *figures)
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
    yield from step_lines(page)
    checks, checks32 = Results("checksum_cost.json"), Results("checksum_cost32.json")
    keys = ("step_ms", "weights_ms", "result_ms", "result_digest_ms", "ratio")
    yield Claim(
        page,
        "a step of {} ms of 2,048 tokens): digest of the weights {} ms, checksums of the result {} ms, digest of its "
        "scalars {} ms, together {} times",
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


def step_lines(page: str) -> Iterator[Claim]:
    source = Results("step_lines.json")
    columns = ("fp32_ms", "exact_ms", "exact4_ms", "floor_ms")
    lines = [str(row["line"]) for row in source.content["results"]]
    for line in lines:
        yield Claim(page, f"| {line} |" + " {} |" * len(columns), tuple(source(key, line=line) for key in columns))
    yield Claim(page, "a copy ({} GB/s read and written) or", (source.config("copy_gb_s"),))
    yield Claim(page, "of a sum ({} GB/s) of", (source.config("read_gb_s"),))
    whole, together = float(source("fp32_ms", line="whole rank").value), "lines together"
    more = [
        float(source(key, line=together).value) - float(source("fp32_ms", line=together).value)
        for key in ("exact_ms", "exact4_ms")
    ]
    more.append(float(source("floor_ms", line=together).value))
    yield Claim(
        page,
        "exact sums cost {} times fp32's CPU time, and {} with C=4; at least {}, if",
        tuple(source.of(1 + ms / whole, "1 + more of lines together / whole rank of fp32") for ms in more),
    )
