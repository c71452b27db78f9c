"""What --spare-audit-rate costs in runs without a fault: about its share in compute, and next to nothing beside it.

    python benchmarks/audit_cost.py [--rates 0.05 0.25 1] [--rounds 2] [--steps 24]

Runs with and without audits in turn; a step goes from commit to commit. ``ratio`` is the mean step with audits over
the mean step without (the number of audited pieces changes from step to step), ``audited_share`` the pieces that were
computed twice. ``beside`` is what the median step costs beyond its pieces: its time for each piece, audited ones
counted too, over that of the run without audits; 1 means that audits cost their compute and nothing else.

All ranks share this machine's cores, so the whole compute counts here; where each has its own, a step waits for the
group with the most pieces and audits.
"""

from __future__ import annotations

import argparse
import statistics

from _report import report
from step_overhead import CASES, model, run_ours


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="*", default=[0.05, 0.25, 1.0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    rows = []
    for name, (groups, _, layout, pieces) in CASES.items():
        batch = ("--global-batch-size", str(groups * pieces), "--train-iters", str(options.steps))
        flags = (*model(), *layout, *batch, "--spare-redundancy", "2")
        for rate in options.rates:
            audits = ("--spare-audit-rate", str(rate))
            pairs = [(run_ours(groups, flags), run_ours(groups, (*flags, *audits))) for _ in range(options.rounds)]
            rows.append({"case": name, "rate": rate, **_compared(pairs)})
    report("audit_cost", {"model": " ".join(model()), "rounds": options.rounds, "steps": options.steps}, rows)


def _compared(pairs: list[tuple[list[dict], list[dict]]]) -> dict[str, object]:
    ratios = [_mean(audited, "step_time_s") / _mean(without, "step_time_s") for without, audited in pairs]
    beside = [_per_piece(audited) / _per_piece(without) for without, audited in pairs]
    return {
        "step_s": round(statistics.median(_mean(without, "step_time_s") for without, _ in pairs), 4),
        "step_audited_s": round(statistics.median(_mean(audited, "step_time_s") for _, audited in pairs), 4),
        "audited_share": round(statistics.mean(_mean(a, "pieces_audited") / _mean(a, "pieces") for _, a in pairs), 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
        "beside": round(statistics.median(beside), 4),
    }


def _mean(lines: list[dict], what: str) -> float:
    return statistics.mean(line[what] for line in lines)


def _per_piece(lines: list[dict]) -> float:
    """Median seconds of a step for each piece that was computed in it, once or twice."""
    return statistics.median(line["step_time_s"] / (line["pieces"] + line["pieces_audited"]) for line in lines)


if __name__ == "__main__":
    main()
