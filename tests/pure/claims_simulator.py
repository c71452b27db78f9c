"""The figures of docs/simulator.md."""

from __future__ import annotations

from collections.abc import Iterator

from tests.pure.claim import Claim, Figure, Results


def adoption() -> Iterator[Claim]:
    page, grid = "docs/simulator.md", Results("adoption_grid.json")

    def ratio(groups: int, redundancy: int, standbys: int, adopt_s: float | None) -> Figure:
        return grid("time_to_train", groups=groups, redundancy=redundancy, standbys=standbys, adopt_s=adopt_s)

    both = [ratio(groups, 2, 0, adopt_s) for groups in (200, 600, 1000) for adopt_s in (None, 120.0)]
    yield Claim(
        page,
        "time to train is {} where each wipe-out goes back to a checkpoint and {} with adoption at N = 200, {} and {} "
        "at 600, {} and {} at 1000; with two standby groups, {} and {} at N = 200",
        (*both, ratio(200, 2, 2, None), ratio(200, 2, 2, 120.0)),
    )
    yield Claim(page, "lost groups better: {}, {} and {} with", tuple(ratio(200, r, 0, None) for r in (3, 5, 9)))


def spare_nodes() -> Iterator[Claim]:
    lost = Results("spare_nodes.json")

    def of(groups: int, size: int, spares: int, key: str = "lost_percent") -> Figure:
        return lost(key, groups=groups, gpus_per_group=size, spare_nodes=spares)

    page = "docs/choosing_redundancy.md"
    ways = ("restarts", "without_salvage", "lost", "shapes", "finer_shapes")
    for groups, size, spares in (
        *((4, 32, count) for count in (0, 2)),
        *((16, 128, count) for count in (0, 1, 2)),
        *((4, 512, count) for count in (0, 1, 2)),
        *((32, 512, count) for count in (0, 2, 8)),
    ):
        row = f"| {groups} x {size}, {spares} | {{}}% | {{}}% | {{}}% | {{}}% | {{}}% |"
        yield Claim(page, row, tuple(of(groups, size, spares, f"{way}_percent") for way in ways))
    yield Claim(
        page,
        "it finds {}% without salvage, {}% with it and {}% with smaller shapes of any number of stages",
        tuple(of(16, 128, 0, f"simulated_{way}_percent") for way in ("without_salvage", "lost", "finer_shapes")),
    )


def simulator_table() -> Iterator[Claim]:
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
    yield from _relieved(page)
    yield from _turned_around(page, table)


def _relieved(page: str) -> Iterator[Claim]:
    """Jobs whose slow groups are relieved by the protocol machine itself."""
    jobs = Results("relieved_jobs.json")
    for words, way, stragglers, jitter in (
        ("no relief", "alone", 0, 0.05),
        ("the model, `--balance`", "model", 0, 0.05),
        ("the protocol machine, `--relief`", "relief", 0, 0.05),
        ("the protocol machine, three groups twice as slow in all steps", "relief", 3, 0.05),
        ("no relief, no jitter", "alone", 0, 0.0),
        ("the model, no jitter", "model", 0, 0.0),
        ("the protocol machine, no jitter", "relief", 0, 0.0),
    ):
        row = {"way": way, "stragglers": stragglers, "jitter": jitter}
        figures = tuple(jobs("time_to_train", groups=groups, **row) for groups in (200, 600, 1000))
        yield Claim(page, f"| {words} | {{}} | {{}} | {{}} |", figures)
    spent = jobs("cpu_s_per_step", groups=1000, way="relief", stragglers=0, jitter=0.05)
    yield Claim(page, "`--relief` takes {} s of CPU for a step of 1000 groups", (spent,))


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


def simulator_rest() -> Iterator[Claim]:
    page = "docs/simulator.md"
    grid, wide = Results("plan_grid.json"), Results("plan_grid_600_1000.json")
    cases = (("staged", "-"), ("shared", "-"), ("staged", 600.0))
    for source, groups in ((grid, 200), (wide, 600), (wide, 1000)):
        yield Claim(
            page,
            f"| {groups} | {{}}% | {{}}% | {{}}% |",
            tuple(source("off_percent", groups=groups, data=data, rejoin_s=back) for data, back in cases),
        )
    relief = Results("relief_model.json")
    off = max(abs(float(row["model_off_percent"])) for row in relief.content["results"])
    yield Claim(page, "they differ by at most {}%", (relief.of(off, "the largest model_off_percent"),))
    lasting = Results("lasting_slowness.json")
    for key, words in (
        ("cost_relieved", "jitter of 5%) {}%, {}% and {}% longer"),
        ("cost_by_speed", "with shares by speed, {}%, {}% and {}%"),
        ("ideal_cost", "where {}%, {}% and {}% would be"),
    ):
        figures = (lasting.of(100 * float(row[key]), f"{key} as a share") for row in lasting.content["results"])
        yield Claim(page, words, tuple(figures))
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
        "replication {} s, SPARe {} s, ours {} s and with re-join {} s of CPU, and where slow groups are relieved "
        "(`--balance`, pieces of 1/64, jitter of 5%) {} s;",
        tuple(speed("cpu_s", policy=policy) for policy in (*policies, "microbatch, re-join, relief")),
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
