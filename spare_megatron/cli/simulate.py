"""spare-simulate runs a policy on a modelled cluster, with the protocol machine of real jobs.

Defaults are those of the published simulation (arXiv 2603.00357): 10,000 steps, a failure every 5 minutes, 64 s to
compute a shard.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from spare_megatron.cli.commands import command, given, json_line, lines_of, refuse_without
from spare_megatron.cli.figure_limits import check_range
from spare_megatron.cli.piece_flags import add_flags, given_cost_flags, pieces_of, share_of
from spare_megatron.cli.plots import load_pyplot, write_plot
from spare_megatron.cli.shape_flags import add_shape_flags, shapes_given
from spare_megatron.cli.transfer_flags import add_transfer_flags, transfer_of
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.flags import flag_name
from spare_megatron.config.injection import FORM
from spare_megatron.config.version_flag import add_version
from spare_megatron.coordinator.journal import JournalError
from spare_megatron.placement import build_placement
from spare_megatron.placement.domains import parse_topology, spread_over_domains
from spare_megatron.planning.trace import Trace, parse_trace
from spare_megatron.simulator.cluster import POLICIES, Cluster, Policy, Reading
from spare_megatron.simulator.failures import Ring
from spare_megatron.simulator.policy_trial import RATIO_MAX, TrialResult
from spare_megatron.simulator.replay import losses
from spare_megatron.simulator.script import scripted
from spare_megatron.simulator.trials import Case, run_many, summary

EXAMPLE = (
    "example: spare-simulate --policy microbatch --num-groups 200 --redundancy 6 --pieces-per-shard 64 --rejoin-s 600 "
    "--trials 3; with the state on its way to those that come back: ... --state-gib 40 --transfer-gib-per-s 0.5; "
    "with three slow groups that are relieved: ... --stragglers 3 --straggler-slowdown 2 --balance; with nodes that "
    "are repaired, and groups that train with fewer pipeline stages meanwhile: --num-groups 16 --nodes-per-group 16 "
    "--spare-nodes 1 --pipeline-model-parallel-size 16 --mtbf-s 89000 --rejoin-s 300 --balance"
)


@dataclass(frozen=True)
class _Defaults:
    cluster: Cluster
    policy: Policy


_D = _Defaults(Cluster(1), Policy())


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser("spare-simulate", description=__doc__, epilog=EXAMPLE, allow_abbrev=False)
    add_version(made)
    _add_times(made)
    _add_nodes(made)
    _add_policy(made)
    _add_script(made)
    return made


def _add_times(made: argparse.ArgumentParser) -> None:
    """The job, its failures and the durations of a step, a save and a restart."""
    add = made.add_argument
    add(
        "--policy",
        default=_D.policy.name,
        metavar="NAME",
        help=f"{', '.join(POLICIES)}; 'microbatch' is that of this framework (default: {_D.policy.name})",
    )
    add("--num-groups", type=int, required=True, help="number of groups, N")
    add(
        "--redundancy",
        type=int,
        help="number of hosts of a shard (default: 8, at most N); with N every group reads every shard",
    )
    add("--steps", type=int, default=_D.policy.steps, help=f"number of steps of the job (default: {_D.policy.steps})")
    add(
        "--mtbf-s",
        type=float,
        help=f"mean seconds between failures in the whole cluster (default: {_D.cluster.mtbf_s:g}, or that of the "
        "trace)",
    )
    add(
        "--weibull-shape",
        type=float,
        help=f"shape of the times between failures; 1 is exponential (default: {_D.cluster.weibull_shape:g})",
    )
    add(
        "--clocks",
        metavar="group|system",
        help=f"one failure clock for each group or for the whole cluster (default: {_D.cluster.clocks})",
    )
    add(
        "--compute-s",
        type=float,
        default=_D.cluster.compute_s,
        help=f"seconds in which a group computes one shard (default: {_D.cluster.compute_s:g})",
    )
    add("--reduce-s", type=float, help="seconds of the reduction over the groups (default: N / 100)")
    add(
        "--rebuild-s",
        type=float,
        help=f"seconds from a death to new communicators (default: {_D.cluster.rebuild_s:g}; for replication 0, as "
        "published)",
    )
    add("--save-s", type=float, default=_D.cluster.save_s, help=f"seconds of a save (default: {_D.cluster.save_s:g})")
    add("--save-interval-s", type=float, help="seconds between saves (default: the published optimum)")
    add(
        "--restart-s",
        type=float,
        default=_D.cluster.restart_s,
        help=f"seconds of a restart of the whole job (default: {_D.cluster.restart_s:g})",
    )


def _add_nodes(made: argparse.ArgumentParser) -> None:
    """How lost groups and their nodes come back, and what that costs."""
    add = made.add_argument
    add(
        "--rejoin-s",
        type=float,
        help="seconds from a group's death until it could take the state of the others (default: it stays away)",
    )
    add(
        "--nodes-per-group",
        type=int,
        metavar="G",
        help="a failure takes one of the G nodes of its group out, or none; --rejoin-s then counts from the moment in "
        "which the group has all its nodes",
    )
    add("--spare-nodes", type=int, metavar="K", help="nodes that take the place of broken ones (default: 0)")
    add(
        "--node-repair-h",
        type=float,
        metavar="H",
        help=f"mean time of a node's repair, hours (default: {_D.cluster.node_repair_h:g})",
    )
    add(
        "--node-share",
        type=float,
        metavar="S",
        help=f"share of the failures that take a node out (default: {_D.cluster.node_share:g})",
    )
    add(
        "--no-salvage",
        action="store_true",
        help="groups that wait for nodes keep their fit ones, instead of putting them together as under spare-slurm",
    )
    add_shape_flags(made)
    add_transfer_flags(made)
    add(
        "--donor-share",
        type=float,
        metavar="S",
        help="what serving a group that comes back adds to a donor's computing, as a share of it (default: 0)",
    )
    add(
        "--jitter",
        type=float,
        default=_D.cluster.jitter,
        help=f"relative standard deviation of a group's step time (default: {_D.cluster.jitter:g})",
    )
    add(
        "--stragglers",
        type=int,
        default=_D.cluster.stragglers,
        metavar="K",
        help=f"number of groups that are slow in all steps (default: {_D.cluster.stragglers})",
    )
    add(
        "--straggler-slowdown",
        type=float,
        metavar="F",
        help=f"how many times as long they take (default: {_D.cluster.straggler_slowdown:g})",
    )


def _add_policy(made: argparse.ArgumentParser) -> None:
    """What the policy does about losses and slow groups."""
    add = made.add_argument
    add_flags(made)
    add(
        "--placement",
        default=_D.policy.placement,
        metavar="independent|consecutive",
        help=f"offsets of the placement (default: {_D.policy.placement})",
    )
    add("--standby-groups", type=int, default=0, help="number of started groups that replace lost ones (default: 0)")
    add("--restart-after", type=int, metavar="K", help="make a planned restart once K groups are lost")
    add(
        "--adopt-s",
        type=float,
        metavar="S",
        help="groups adopt a shard that has lost its last host, and open its data in S seconds (default: the job "
        "restarts)",
    )
    add(
        "--state-redundancy",
        type=int,
        metavar="R",
        help="number of groups that keep each part of the optimizer's state (default: all)",
    )
    add(
        "--rehost-s",
        type=float,
        metavar="S",
        help="with it: seconds in which parts that have lost a copy are copied to other groups (default: 0)",
    )
    add("--balance", action="store_true", help="slow groups give pieces to faster ones during a step (a model of it)")
    add(
        "--relief",
        action="store_true",
        help="the same, decided by the protocol machine in each step; at 1000 groups it takes tenths of a second",
    )
    add("--async-save", action="store_true", help="a save does not stop training")


def _add_script(made: argparse.ArgumentParser) -> None:
    """Failures that are given, and how the trials are made and shown."""
    add = made.add_argument
    add(
        "--trace",
        type=Path,
        metavar="CSV",
        help="file of failures: lines TIME_S,NODE, where a node is the number of a group; or a journal.jsonl",
    )
    add("--inject", action="append", default=[], metavar="SPEC", help=f"script a death: {FORM}")
    add("--topology", type=Path, metavar="FILE", help="file of failure domains: lines GROUP,DOMAIN")
    add("--domain-mtbf-s", type=float, help="mean seconds between failures of one whole domain")
    add(
        "--topology-as-listed",
        action="store_true",
        help="keep the group numbers of the topology, instead of numbers that put hosts into different domains",
    )
    add("--check", action="store_true", help="test every invariant of the protocol machine after each event")
    add("--trials", type=int, default=3, help="number of trials (default: 3)")
    add(
        "--seed", type=int, default=0, help="seed of the first trial; the others have the numbers after it (default: 0)"
    )
    add("--plot", type=Path, metavar="PNG", help="draw time to train, availability and mean work of every trial")
    add("--json", action="store_true", help="print one JSON object")


def case_of(args: argparse.Namespace) -> Case:
    """The case that the flags describe; ConfigError where it cannot be simulated."""
    _refuse_without_effect(args)
    groups, trace = args.num_groups, _trace(args.trace, args.num_groups)
    pieces, share = _pieces(args)
    transfer_s, result_s = transfer_of(args, args.rejoin_s)
    if transfer_s == 0:
        refuse_without(args, "--state-gib G", "donor_share")
    of_trace = {} if trace is None else {"mtbf_s": _mtbf_s(trace)}
    figures = {"reduce_s": groups / 100, **of_trace, **given(args, Cluster)}
    figures |= shapes_given(args, "--nodes-per-group", args.nodes_per_group)
    cluster = Cluster(**figures, salvage=not args.no_salvage, transfer_s=transfer_s, result_s=result_s)
    chosen = {
        "redundancy": min(_D.policy.redundancy, groups),
        **given(args, Policy),
        "name": args.policy,
        "pieces_per_shard": pieces,
        "exact_share": share,
        "reading": Reading(replication_rebuilds=args.rebuild_s is not None),
        "injections": scripted(args.inject, groups, pieces),
    }
    policy = Policy(**chosen)
    policy.check(cluster)
    if trace is None:
        policy.check_failures(cluster)
    if args.trials < 1:
        raise ConfigError(f"--trials is {args.trials}, but must be at least 1")
    if args.seed < 0:
        raise ConfigError(f"--seed is {args.seed}, but must not be negative")
    return Case(cluster, policy, trace, _domains(args, policy), args.check)


def _pieces(args: argparse.Namespace) -> tuple[int, float]:
    """Pieces of a shard, and what exact sums add to their computing: nothing without --piece-microbatches."""
    microbatches, size = pieces_of(args)
    if args.piece_microbatches is None:
        if cost_flags := given_cost_flags(args):
            raise ConfigError(f"{cost_flags[0]} has no effect without --piece-microbatches C; give both")
        return microbatches, 0.0
    if args.policy != "microbatch":
        raise ConfigError(
            f"--piece-microbatches is only for --policy microbatch, but the policy is {args.policy}; leave it out"
        )
    assert isinstance(size, int)
    return microbatches // size, share_of(args, "exact")(size)


def _refuse_without_effect(args: argparse.Namespace) -> None:
    """Raise ConfigError for a flag that has no effect with the others."""
    for name in ("mtbf_s", "weibull_shape", "clocks", "topology", "domain_mtbf_s"):
        if args.trace is not None and getattr(args, name) is not None:
            raise ConfigError(
                f"--trace {args.trace} has all failures, so {flag_name(name)} {getattr(args, name)} has no "
                "effect; leave one of them out"
            )
    if not args.stragglers:
        refuse_without(args, "--stragglers K", "straggler_slowdown")
    if args.nodes_per_group is None:
        refuse_without(args, "--nodes-per-group G", "spare_nodes", "node_repair_h", "node_share", "no_salvage")
    elif args.nodes_per_group < 1:
        raise ConfigError(f"--nodes-per-group is {args.nodes_per_group}, but must be at least 1")
    if args.state_redundancy is None:
        refuse_without(args, "--state-redundancy R", "rehost_s")
    if args.topology is None and args.domain_mtbf_s:
        raise ConfigError(f"--domain-mtbf-s {args.domain_mtbf_s:g} has no effect without --topology FILE; give both")
    if not args.domain_mtbf_s:
        refuse_without(args, "--domain-mtbf-s above 0", "topology")
    if args.topology is None:
        refuse_without(args, "--topology FILE", "topology_as_listed")
    if args.policy == "checkpoint" and args.rebuild_s is not None:
        raise ConfigError(
            f"--rebuild-s {args.rebuild_s:g} has no effect with --policy checkpoint, where any death restarts the job; "
            "leave it out"
        )


def _trace(path: Path | None, groups: int) -> list[Ring] | None:
    if path is None:
        return None
    if path.suffix == ".jsonl":
        return _losses_of_a_run(path, groups)
    lines = lines_of(path, "--trace")
    trace = parse_trace(lines, str(path))
    # Every line that is not empty is a loss, except for a heading before them.
    numbers = [number for number, line in enumerate(lines, 1) if line.strip()][-len(trace.nodes) :]
    rings: list[Ring] = []
    for number, at, node in zip(numbers, trace.times_s, trace.nodes, strict=True):
        if not node.isdecimal() or int(node) >= groups:
            raise ConfigError(
                f"--trace {path} line {number} is of node {node!r}, but the groups are 0 to {groups - 1}; give the "
                "number of a group"
            )
        rings.append((at, int(node)))
    return rings


def _mtbf_s(rings: Sequence[Ring]) -> float:
    """Mean seconds between failures in the whole cluster, computed as in spare-plan."""
    rings = sorted(rings)
    return Trace(tuple(at for at, _ in rings), tuple(str(group) for _, group in rings)).mtbf_s


def _losses_of_a_run(path: Path, groups: int) -> list[Ring]:
    try:
        path.open("rb").close()
        rings = losses(path)
    except (OSError, JournalError) as error:
        raise ConfigError(f"--trace {path} cannot be read: {error}") from None
    if max(rings, default=(0.0, 0))[0] <= 0:
        raise ConfigError(f"--trace {path} has no loss after the job began; give the journal of a run that has one")
    beyond = [group for _, group in rings if group >= groups]
    if beyond:
        raise ConfigError(f"--trace {path} has a loss of group {beyond[0]}, but the groups are 0 to {groups - 1}")
    return rings


def _domains(args: argparse.Namespace, policy: Policy) -> Mapping[str, Sequence[int]] | None:
    if args.topology is None:
        return None
    domains = parse_topology(lines_of(args.topology, "--topology"), str(args.topology), args.num_groups)
    numbers: Sequence[int] = range(args.num_groups)
    if not args.topology_as_listed:
        placement = build_placement(args.num_groups, policy.redundancy, policy.placement)  # type: ignore[arg-type]
        numbers = spread_over_domains(placement, domains).numbers
    members: dict[str, list[int]] = {}
    for number, domain in zip(numbers, domains, strict=True):
        members.setdefault(domain, []).append(number)
    return members


def table_of(found: Mapping[str, Any]) -> Table:
    """The summary as a table for users."""
    table = Table("figure", "value", title="spare-simulate")
    ratio = found["time_to_train_ratio"]
    trials = ", ".join("none" if one is None else f"{one:.3f}" for one in ratio["trials"])
    mean = "none" if ratio["mean"] is None else f"{ratio['mean']:.3f}"
    table.add_row("time to train / failure-free", f"{mean}  ({trials})")
    if ratio["mean"] is None:
        table.add_row("", f"stopped at {RATIO_MAX:g} times the failure-free time: the job makes no progress")
    table.add_row("availability", f"{found['availability']:.2%}")
    for name, value in found.items():
        if isinstance(value, float) and name != "availability":
            table.add_row(name.replace("_", " "), f"{value:.2f}")
    table.add_row("seeds", ", ".join(map(str, found["seeds"])))
    return table


def _plot(outcomes: Sequence[TrialResult], path: Path) -> None:
    """Draw a bar for every trial; the ratio of a trial without progress has none."""
    panels: dict[str, list[Any]] = {
        "time to train / failure-free": [outcome.ratio for outcome in outcomes],
        "availability": [outcome.availability for outcome in outcomes],
        "mean work, shards": [outcome.mean_work for outcome in outcomes],
    }
    seeds = [str(outcome.seed) for outcome in outcomes]
    figure, axes = load_pyplot().subplots(1, len(panels), figsize=(12, 3.6), layout="constrained")
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        axis.bar(seeds, [0.0 if value is None else value for value in values])
        axis.set(xlabel="seed", title=title)
    write_plot(figure, path)


@command("spare-simulate")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code (spare_megatron.config.exits)."""
    args = parser().parse_args(argv)
    check_range(args)
    case = case_of(args)
    if args.plot is not None:
        load_pyplot()
    jobs = [(case, args.seed + n) for n in range(args.trials)]
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("trials", total=len(jobs))
        outcomes = run_many(jobs, done=lambda done: progress.update(task, completed=done))
    found = summary(outcomes, args.seed)
    if args.json:
        sys.stdout.write(json_line(found))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(table_of(found))
    if args.plot is not None:
        _plot(outcomes, args.plot)
    return int(ExitCode.FINISHED)


if __name__ == "__main__":
    sys.exit(main())
