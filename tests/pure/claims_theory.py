"""The figures of docs/theory.md."""

from __future__ import annotations

from collections.abc import Iterator

from tests.pure.claim import Claim, Results


def theory() -> Iterator[Claim]:
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
    yield from _adoption(page)
    yield from _piece_size(page)
    yield from _state_losses(page)
    time = Results("plan_time.json")
    yield Claim(
        page,
        "takes {} s of CPU (staged) and {} s (shared), and {} s where lost groups come back",
        tuple(time("cpu_s", data=data) for data in ("staged", "shared", "staged, re-join")),
    )


def _adoption(page: str) -> Iterator[Claim]:
    """How far the predictions for the grid of redundancy and standbys are off, and the chosen pairs."""
    grid = Results("adoption_grid.json")
    config = grid.content["config"]
    rows, cells = [], []
    for redundancy in sorted({row["redundancy"] for row in config["errors"]}):
        both = {row["adoption"]: row for row in config["errors"] if row["redundancy"] == redundancy}
        rows.append(f"| {redundancy} | {{}} | {{}} | {{}} | {{}} |")
        for adoption in (True, False):
            for key in ("mean_off_percent", "largest_off_percent"):
                cells.append(grid.of(both[adoption][key], f"errors: {key} (r={redundancy}, adoption={adoption})"))
    yield Claim(page, " ".join(rows), tuple(cells))
    rows, cells = [], []
    for groups in config["groups"]:
        rows.append(f"| {groups} |" + " {}, {}: {}% |" * 4)
        ways = [(price, adopts) for price in (0.0, 1.0) for adopts in (False, True)]
        for price, adopts in ways:
            (row,) = (
                row
                for row in config["choices"]
                if (row["groups"], row["price"], row["adopt_s"] is not None) == (groups, price, adopts)
                and row["given"] is None
            )
            where = f"choices (N={groups}, price={price}, adoption={adopts})"
            cells += [grid.of(row[key], f"{where}: {key}") for key in ("redundancy", "standbys", "off_percent")]
    yield Claim(page, " ".join(rows), tuple(cells))
    keys = ("adopt_s", "rejoin_s", "transfer_s", "result_s", "steps")
    words = "A = {} s, a return after T = {} s, S = {} s, rho = {} s, no jitter, {} steps, means"
    yield Claim(page, words, tuple(grid.config(key) for key in keys))
    worst = tuple(grid.config(f"{which}_off_percent_max") for which in ("choice", "given"))
    yield Claim(
        page,
        "The largest excess over the grid is {}%; where r = 2 or 3 is given, as on groups without room for more data, "
        "{}%: there",
        worst,
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
        "within {}% of the best. The default is up to {}% off, which is the cost of its guarantee; with C = 1 it would "
        "be up to {}%. The last",
        (
            pieces.of(max(pieces.every("auto_off_percent")), "largest auto_off_percent"),
            pieces.of(max(pieces.every("default_off_percent")), "largest default_off_percent"),
            pieces.of(alone, "largest excess of at_1"),
        ),
    )
    config = tuple(pieces.config(key) for key in ("microbatches", "redundancy", "steps"))
    yield Claim(page, "{} microbatches per shard, r = {}, the published cluster with {} steps, two", config)


def _state_losses(page: str) -> Iterator[Claim]:
    found = Results("state_losses.json")
    for groups, copies in ((4, 2), (5, 2), (8, 2), (16, 2), (8, 3), (16, 3)):
        keys = ("host_sets", "by_formula", "all_different")
        row = tuple(found(key, groups=groups, copies=copies) for key in keys)
        yield Claim(page, f"| {groups} | {copies} | {{}} | {{}} | {{}} |", row)
