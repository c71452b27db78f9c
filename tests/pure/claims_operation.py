"""The figures of the pages about running jobs."""

from __future__ import annotations

from collections.abc import Iterator

from tests.pure.claim import SMALL, Claim, Figure, Results

FUNCTIONAL = ("accepted", "drawn", "steps", "equal", "bits_equal", "largest_difference")


def at_least_0(late: Figure) -> Figure:
    """A page says 0 where a step was as long as the work needs, or a breath shorter."""
    return Figure(max(0.0, float(late.value)), late.source)


def operation() -> Iterator[Claim]:
    save = Results("checkpoint.json")
    beside, waits = {"mode": "beside training"}, {"mode": "training waits"}
    yield Claim(
        "docs/checkpoints.md",
        "a step waits {} ms ({} % of it) for an asynchronous save, and {} ms ({} %) for a synchronous one",
        tuple(save(key, **mode) for mode in (beside, waits) for key in ("stall_ms", "stall_percent_of_step")),
    )
    yield Claim(
        "docs/checkpoints.md",
        "An asynchronous save writes {} GB/s to the disk, checksums included, a synchronous one {} GB/s; a plain copy "
        "of the same files runs at {} and {} GB/s",
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
    trained = Results("functional_configs.json")
    yield Claim(
        "docs/from_megatron.md",
        "Of the {} that passed when this was measured, {} drawn by a seed were made small enough for a machine without "
        "GPU and trained for {} steps. The losses of {} agree with those of plain megatron-core, of {} bit for bit; "
        "the largest relative difference is {} (",
        tuple(trained.config(key) for key in FUNCTIONAL),
    )
    recipes = Results("trained_recipes.json")
    yield Claim(
        "docs/from_megatron.md",
        "Of the {} published recipes that pass with megatron-core 0.19.2, {} drawn by a seed were made small too, and "
        "some of them given Muon, Lion, SOAP, maximal update parametrization or the layers of a hybrid model. In {} "
        "steps the losses of {} agree, of {} bit for bit; the largest relative difference is {} (",
        tuple(recipes.config(key) for key in FUNCTIONAL),
    )
    divided = Results("recipes_state.json")
    yield Claim(
        "docs/operating.md",
        "with {} groups and `--spare-state-redundancy 2`, {} of {} published recipes are taken (",
        tuple(divided.config(key) for key in ("groups", "taken", "recipes")),
    )
    masked = Results("masked_failure.json")
    yield Claim(
        "docs/when_a_gpu_dies.md",
        "the median of {} kills was {} s",
        (masked.config("kills"), masked("median_s", part="total_s", **SMALL)),
    )
    joined = Results("joined_patch.json")
    for shape in ("PP4 x 4", "PP2 x 4"):
        for patch, words in (("drains", "the pipeline drains first"), ("joins", "the patch joins")):
            late = (
                at_least_0(joined("late_s", shape=shape, patch=patch, **{"killed at piece": piece}))
                for piece in (1, 8, 14)
            )
            yield Claim("docs/when_a_gpu_dies.md", f"| {shape[:3]}, {words} | {{}} | {{}} | {{}} |", tuple(late))
    yield Claim("docs/when_a_gpu_dies.md", "sleep for {} s a piece", (joined.config("piece_s"),))
    yield Claim("docs/when_a_gpu_dies.md", "medians of {} kills", (joined.config("rounds"),))


def looking_on() -> Iterator[Claim]:
    shown, page = Results("page.json"), "docs/operating.md"
    waited = Results("standby.json")
    yield Claim(
        page,
        "steps of the toy, whose pieces sleep, take {} s with all",
        (waited("step_s", model="toy", way="standby"),),
    )
    for words, model in (("toy", "toy"), ("small Megatron job, PP2", "megatron")):
        ways = ("standby", "relieved", "nothing")
        figures = tuple(waited("full_strength_median_s", model=model, way=way) for way in ways)
        yield Claim(page, f"| {words} | {{}} | {{}} | {{}} |", figures)
    yield Claim(
        page,
        "showed a loss {} s (median) and {} s (at most) after the journal's record of it, and a return after {} s and "
        "{} s. With 1000 groups",
        tuple(shown(key, measured=f"{what} to browser") for what in ("loss", "return") for key in ("median", "max")),
    )
    yield Claim(
        page,
        "drew a change within {} s (median; {} s once)",
        tuple(shown(key, measured="draw a change of 1000 groups") for key in ("median", "max")),
    )
    yield Claim(
        page,
        "process needed {} cores and {} MB (two",
        tuple(shown("median", measured=f"{what} of the page's process") for what in ("CPU", "memory")),
    )
    yield Claim(page, "4 groups with {} losses in turn", (shown.config("kills"),))


def watching() -> Iterator[Claim]:
    cost, page = Results("watching_cost.json"), "docs/operating.md"
    config, share = cost.config, "percent_of_job"
    steps = float(config("steps").value) - 6  # from the commit of step 5 to the last but one
    yield Claim(page, "with steps of {} s", (cost.of(float(config("seconds").value) / steps, "seconds of a step"),))
    yield Claim(page, "{} % of all CPU time went", (cost(share, process="all"),))
    yield Claim(
        page,
        "status.json {} %, lines of metrics {} %, reports of ranks {} %",
        tuple(cost(share, watching=what) for what in ("status", "metrics: lines, iteration line", "reports")),
    )
    many = Results("watched_job.json")
    written = float(many("value", what="status, ms").value)
    yield Claim(page, "takes the coordinator {} ms", (many.of(written, "a write of the status, ms"),))


def relief() -> Iterator[Claim]:
    shown, page = Results("relieved_group.json"), "docs/operating.md"
    first, later = "first step over ideal", "third step on over ideal"
    all_of_them, two = ({"kind": "relieved", "redundancy": hosts} for hosts in (4, 2))
    failure_free = {"what": "calm"}
    yield Claim(
        page,
        "a step takes {} s, and {} s with relief.",
        (shown("alone_s", **failure_free), shown("relieved_s", **failure_free)),
    )
    yield Claim(page, "at half speed: steps take {} times", (shown(later, kind="alone", redundancy=4),))
    yield Claim(
        page,
        "With relief {} times from its third slow step on and {} times in the first, where all groups host all shards; "
        "where two host each, {} and {}.",
        tuple(shown(key, **shape) for shape in (all_of_them, two) for key in (later, first)),
    )
    jitter = "relieved over alone"
    yield Claim(
        page,
        "relief makes steps {} times as long, where the simulator's model predicts {}; with two hosts a shard {}, and "
        "{} are predicted",
        tuple(shown(key, kind=jitter, redundancy=hosts) for hosts in (4, 2) for key in ("measured", "predicted")),
    )


def returns() -> Iterator[Claim]:
    back, transfer, page = Results("recovery.json"), Results("transfer.json"), "docs/operating.md"
    times = {row["part"]: row["median_s"] for row in back.content["results"]}
    for words, parts in (
        ("| the others commit the step in flight | {} |", ("next commit",)),
        ("| decision, check of the host | {} |", ("decision and check",)),
        ("| imports and flags of its ranks | {} |", ("imports and flags",)),
        ("| their process group | {} |", ("world",)),
        ("| model, data, a warm-up microbatch | {} |", ("model", "checkpoint", "data and engine", "piece for nothing")),
        ("| offer and transfer of the state | {} |", ("offer", "transfer")),
        ("| catch-up, verification, admission | {} |", ("catch-up and proof",)),
        ("| its first pieces are committed: at full strength | {} in all |", ("whole again",)),
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
    yield from _smaller_shapes(page)
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


def _smaller_shapes(page: str) -> Iterator[Claim]:
    shapes, copies = Results("smaller_shape.json"), Results("step_state_copies.json")
    own, smaller = ({"part": "first_own_s", "change": change} for change in ("home", "smaller"))
    formed = [
        shapes("median", part="rebuild_s", change=change).times(1000)
        for change in ("smaller", "home", "home beside a smaller one")
    ]
    yield Claim(page, "pieces again after {} s in its home shape", (shapes("median", **own),))
    yield Claim(page, "after {} s with one stage", (shapes("median", **smaller),))
    away = shapes("median", part="away_s", change="way home")
    yield Claim(page, "When it goes home it is away for {} s.", (away,))
    yield Claim(page, "to form them: {} ms instead of {} ms, and {} ms when", tuple(formed))
    two = {"reduce": "exact", "state": "2 copies"}
    yield Claim(
        page,
        "{} times the CPU time of one with whole states in each group (1 x 4 groups with exact sums, and {} for PP2 x "
        "3 groups",
        tuple(copies("cpu_ratio", case=case, **two) for case in ("1 x 4 groups, K=8", "PP2 x 3 groups, K=4")),
    )
    masked, back = Results("masked_failure_state.json"), Results("recovery_state.json")
    yield Claim(
        page,
        "a masked failure takes {} s with two copies and {} s with whole states",
        tuple(masked("median_s", part="total_s", state_copies=number) for number in (2, 4)),
    )
    made = (masked("median_s", part=part, state_copies=2) for part in ("copied_mb", "whole_s"))
    yield Claim(page, "before the next sum: {} MB, {} s after the signal", tuple(made))
    again = (back("median_s", part="whole again", state_copies=number) for number in (2, 4))
    yield Claim(page, "computes pieces again after {} s where it takes {} s with whole states", tuple(again))
    yield Claim(page, "has its parts {} s later", (back("median_s", part="level", state_copies=2),))
