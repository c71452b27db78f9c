"""spare-plan computes redundancy, planned restart and save interval for a cluster, before the job starts."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spare_megatron.cli.commands import command, given, json_line, lines_of, refuse_without
from spare_megatron.cli.figure_limits import GROUPS_MAX, check_range
from spare_megatron.cli.node_plan import add_node_flags, draw_nodes, node_figures, node_lines, node_plan
from spare_megatron.cli.piece_flags import add_flags, given_cost_flags, pieces_of, share_of
from spare_megatron.cli.plots import load_pyplot, write_plot
from spare_megatron.cli.transfer_flags import add_transfer_flags, transfer_of
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.flags import flag_name
from spare_megatron.config.piece_sizes import CHOSEN_FOR
from spare_megatron.config.spare import SpareConfig
from spare_megatron.config.version_flag import add_version
from spare_megatron.placement import build_placement
from spare_megatron.placement.domains import parse_topology, spread_over_domains
from spare_megatron.planning.choose import RedundancyPlan, choose, choose_granularity
from spare_megatron.planning.cluster_figures import LLAMA3_MTBF_GPU_HOURS, ClusterFigures
from spare_megatron.planning.memory import GRADIENT_BYTES, Shape, fitting, memory
from spare_megatron.planning.piece_size import PieceSize, with_figures, without_figures
from spare_megatron.planning.standby_choice import SHARE_MAX, CostedPair, choose_pair
from spare_megatron.planning.state_choice import StatePlan, StateRates, choose_state_copies
from spare_megatron.planning.trace import parse_trace
from spare_megatron.simulator.node_losses import NodeFigures

EXAMPLE = (
    "example: spare-plan --gpus 600000 --gpus-per-group 600 --mtbf-s 300 --restart-s 3600 --save-s 60 "
    "--compute-s 64 --reduce-s 10; where lost groups come back: ... --rejoin-s 600 --state-gib 40; with nodes that "
    "are repaired, 0 to 8 spare ones, and smaller shapes: ... --gpus-per-node 8 --pipeline-model-parallel-size 16; "
    "with the copies of the optimizer's state that a GPU has room for: ... --params 405e9 --gpu-memory-gib 80 "
    "--reduce exact32"
)
COLUMNS = (
    ("redundancy", "r"),
    ("endurable_failures", "endured"),
    ("mean_work", "mean work"),
    ("restart_after_failures", "restart after"),
    ("save_interval_steps", "save every"),
    ("availability", "availability"),
    ("time_to_train_ratio", "time to train"),
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser("spare-plan", description=__doc__, epilog=EXAMPLE, allow_abbrev=False)
    add_version(made)
    _add_times(made)
    _add_returns(made)
    _add_choices(made)
    return made


def _add_times(made: argparse.ArgumentParser) -> None:
    """The cluster, its losses and the durations of a step, a save and a restart."""
    add = made.add_argument
    add("--gpus", type=int, required=True, help="number of GPUs of the cluster that train")
    add(
        "--gpus-per-group",
        type=int,
        required=True,
        help="number of GPUs of one group: TP x PP x CP x inner data parallel",
    )
    rate = made.add_mutually_exclusive_group()
    rate.add_argument(
        "--mtbf-s",
        type=float,
        help="mean time between losses anywhere in the cluster, seconds (default: that of a GPU that fails once in "
        f"{LLAMA3_MTBF_GPU_HOURS:g} hours, Llama 3's)",
    )
    rate.add_argument("--trace", type=Path, metavar="CSV", help="file of past losses, lines TIME_S,NODE")
    add(
        "--weibull-shape",
        type=float,
        help="Weibull shape of the times between losses (default: 1, or as the trace shows)",
    )
    add("--restart-s", type=float, required=True, help="time of a restart of the whole job, seconds")
    add("--save-s", type=float, required=True, help="time that training waits for a checkpoint, seconds")
    add("--compute-s", type=float, required=True, help="time in which a group computes one shard, seconds")
    add("--reduce-s", type=float, required=True, help="time of a step's reduction over the groups, seconds")
    add("--rebuild-s", type=float, default=0.1, help="time to form communicators after a loss, seconds (default: 0.1)")
    add_flags(made, auto=" (auto, the default: of the shortest expected steps with --reduce exact, else 1)")


def _add_returns(made: argparse.ArgumentParser) -> None:
    """How lost groups and shards come back."""
    add = made.add_argument
    add(
        "--rejoin-s",
        type=float,
        help="seconds from a loss until the group could take the state of the others (default: only a restart brings "
        "it back)",
    )
    add_transfer_flags(made)
    add(
        "--standby-groups",
        type=int,
        help="number of started groups, beyond --gpus, that can replace lost ones (default: as many as pay)",
    )
    add(
        "--standby-groups-max",
        type=int,
        metavar="N",
        help=f"most standby groups that are tried (default: {SHARE_MAX:.0%}% of the groups that train)",
    )
    add(
        "--standby-price",
        type=float,
        default=1.0,
        metavar="P",
        help="what an idle GPU of a standby group costs, as a share of one that trains (0: nothing; default: 1)",
    )
    adoption = made.add_mutually_exclusive_group()
    adoption.add_argument(
        "--adopt-s",
        type=float,
        default=SpareConfig.adopt_timeout_s,
        metavar="S",
        help="groups adopt a shard that has lost its last host, and open its data in S seconds (default: "
        f"{SpareConfig.adopt_timeout_s:g}, the longest that a job gives them)",
    )
    adoption.add_argument(
        "--no-adoption", action="store_true", help="where a shard has lost its last host the job restarts"
    )


def _add_choices(made: argparse.ArgumentParser) -> None:
    """What is chosen, or given, and how the result is shown."""
    add = made.add_argument
    add("--save-interval-s", type=float, metavar="S", help="save every S seconds (default: the best interval)")
    add(
        "--granularity",
        choices=("auto", "microbatch", "shard"),
        default="auto",
        help="smallest unit that moves between groups (auto: the one that takes less time)",
    )
    add(
        "--data",
        choices=("shared", "staged"),
        default="staged",
        help="shared: every group can read all data; staged: each group has r/N of it (default: staged)",
    )
    add("--data-gib", type=float, default=0.0, help="size of all training data, with --data staged (default: 0)")
    add("--stage-gib-per-s", type=float, default=1.0, help="GiB per second at which a group stages data (default: 1)")
    add("--jitter", type=float, default=0.05, help="relative standard deviation of a group's step time (default: 0.05)")
    add("--steps", type=int, default=10_000, help="number of steps of the job (default: 10000)")
    add("--redundancy", type=int, help="use this redundancy instead of choosing one")
    add("--topology", type=Path, metavar="FILE", help="file of failure domains, lines GROUP,DOMAIN")
    add("--params", type=float, help="number of parameters of the model")
    add("--gpu-memory-gib", type=float, help="memory of one GPU; a job that needs more is refused")
    add(
        "--state-redundancy",
        type=int,
        metavar="R",
        help="number of groups that keep each part of the optimizer's state, --spare-state-redundancy of a job "
        "(default: all where that fits into --gpu-memory-gib, else as few as are safe)",
    )
    add(
        "--gather-gib-per-s",
        type=float,
        metavar="B",
        help="GiB per second that one GPU takes from others when parts of the state are copied again (default: 1)",
    )
    add("--activations-gib", type=float, default=0.0, help="activations and buffers per GPU (default: 0)")
    add("--inner-data-parallel", type=int, default=1, help="data-parallel ranks inside a group (default: 1)")
    add("--context-parallel-size", type=int, default=1, help="context-parallel ranks inside a group (default: 1)")
    add(
        "--reduce",
        choices=sorted(GRADIENT_BYTES),
        default="fp32",
        help="how gradients are summed over groups (default: fp32)",
    )
    add_node_flags(made)
    add("--plot", type=Path, metavar="FILE.png", help="draw the candidates to this file")
    add("--json", action="store_true", help="print one JSON object")


def planned(args: argparse.Namespace) -> dict[str, Any]:
    """The plan for these flags, as the object that --json prints.

    Raises:
        ConfigError: a figure is impossible, the model does not fit, or no redundancy makes progress."""
    cluster, microbatches, size = _cluster(args)
    nodes = node_figures(args, cluster)
    needed = _memory(args, cluster, size if isinstance(size, int) else 1)
    cluster, plan, pairs, other = _plan(args, cluster)
    chosen, advised = _piece_size(args, cluster, plan, microbatches) if size == "auto" else (None, "")
    if chosen is not None:
        needed = _memory(args, cluster, chosen.microbatches)
        if chosen.microbatches > 1:
            pieces = chosen.pieces_per_shard
            cluster, plan, pairs, other = _plan(args, replace(cluster, pieces_per_shard=pieces))
    cluster = replace(cluster, granularity="shard" if plan.chosen.granularity == "shard" else "microbatch")
    shared: dict[str, object] = {
        "inner_data_parallel": args.inner_data_parallel,
        "context_parallel_size": args.context_parallel_size,
        "memory_gib_per_gpu": None if needed is None else needed.chosen.memory.as_json(),
    }
    found: dict[str, Any] = {
        **plan.chosen.as_json(),
        **shared,
        "num_groups": cluster.num_groups,
        "mtbf_s": cluster.mtbf_s,
        "weibull_shape": cluster.weibull_shape,
        "standby_groups": cluster.standby_groups,
        "standby_price": cluster.standby_price,
        "pairs": [pair.as_json() for pair in pairs],
        "adopt_s": cluster.adopt_s,
        "pieces_per_shard": cluster.pieces_per_shard,
        "piece_microbatches": microbatches // cluster.pieces_per_shard,
        "piece_step_times": None if chosen is None else {str(c): round(time, 6) for c, time in chosen.times.items()},
        "state_redundancy": None if needed is None else needed.chosen.copies,
        "state_copies": [] if needed is None else [one.as_json() for one in needed.candidates],
        "reason": "; ".join(filter(None, (plan.reason, other, advised, needed.reason if needed else ""))),
        "candidates": [{**each.as_json(), **shared} for each in plan.candidates],
    }
    if nodes is not None:
        found |= node_plan(_with_shapes_that_fit(args, nodes, needed), cluster)
    if args.topology is not None:
        found["topology"] = _topology(args.topology, cluster.num_groups, plan)
    return found


def _piece_size(
    args: argparse.Namespace, cluster: ClusterFigures, plan: RedundancyPlan, microbatches: int
) -> tuple[PieceSize, str]:
    """The best number of microbatches of a piece, of those whose fp32 sums fit into memory, and why."""
    share, best = share_of(args, args.reduce), plan.chosen
    if best.granularity == "shard":
        size = without_figures([microbatches], share, moves=False)
    else:
        restart_after = best.outcome.restart_after if best.outcome is not None else None
        size = with_figures(cluster, best.redundancy, [microbatches], share, restart_after)
    if size.microbatches == 1:
        return size, size.reason
    try:
        _memory(args, cluster, size.microbatches)
    except ConfigError:
        why = f"pieces of 1 microbatch, because the fp32 sums of pieces of {size.microbatches} do not fit into a GPU"
        return replace(size, microbatches=1, pieces_per_shard=microbatches), why
    return size, size.reason


def _plan(
    args: argparse.Namespace, cluster: ClusterFigures
) -> tuple[ClusterFigures, RedundancyPlan, tuple[CostedPair, ...], str]:
    """The cluster with the standby groups that are given or chosen, the plan, the pairs that it was chosen among, and
    why not another number of standbys or the other granularity."""
    plan: RedundancyPlan | None = None
    pairs: tuple[CostedPair, ...] = ()
    why: list[str] = []
    if args.standby_groups is None:
        found = choose_pair(cluster, args.redundancy, args.standby_groups_max)
        cluster, plan, pairs, why = found.cluster, found.plan, found.pairs, [found.reason]
    if args.granularity != "auto":
        return cluster, plan or choose(cluster, args.redundancy), pairs, "; ".join(why)
    plan, other = choose_granularity(cluster, args.redundancy, plan)
    return cluster, plan, pairs, "; ".join([*why, other])


def _cluster(args: argparse.Namespace) -> tuple[ClusterFigures, int, int | str]:
    """The cluster with the pieces that are given, with C = 1 where C is to be chosen; the microbatches of a shard; and
    C or 'auto'."""
    microbatches, size = pieces_of(args)
    chosen = args.reduce in CHOSEN_FOR
    if size is None or size == "auto":
        size = "auto" if chosen else 1
    if (cost_flags := given_cost_flags(args)) and size != "auto":
        what = "where the pieces are given" if chosen else f"with --reduce {args.reduce}"
        raise ConfigError(
            f"{cost_flags[0]} has no effect {what}; use --reduce exact --piece-microbatches auto, or leave it out"
        )
    share_of(args, args.reduce)
    for name in ("params", "gpu_memory_gib", "inner_data_parallel", "context_parallel_size"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{flag_name(name)} is {value}, but must be a finite number above 0")
    if args.gpu_memory_gib is not None and args.params is None:
        raise ConfigError(f"--gpu-memory-gib {args.gpu_memory_gib:g} is given without --params; give the model's size")
    if args.standby_groups is not None and args.standby_groups_max is not None:
        raise ConfigError(
            f"--standby-groups-max {args.standby_groups_max} has no effect with --standby-groups "
            f"{args.standby_groups}; leave one of them out"
        )
    if args.standby_groups_max is not None and args.standby_groups_max < 0:
        raise ConfigError(f"--standby-groups-max is {args.standby_groups_max}, but must be at least 0")
    if not 0 <= args.activations_gib < float("inf"):
        raise ConfigError(f"--activations-gib is {args.activations_gib}, but must be at least 0")
    mtbf_s, shape = args.mtbf_s, args.weibull_shape
    if mtbf_s is None and args.trace is None:
        mtbf_s = 3600 * LLAMA3_MTBF_GPU_HOURS / max(1, args.gpus)
    if args.trace is not None:
        trace = parse_trace(lines_of(args.trace, "--trace"), str(args.trace))
        mtbf_s = trace.mtbf_s
        shape = trace.weibull_shape() if shape is None else shape
    transfer_s, result_s = transfer_of(args, args.rejoin_s)
    figures = {
        **given(args, ClusterFigures),
        "mtbf_s": mtbf_s,
        "weibull_shape": 1.0 if shape is None else shape,
        "pieces_per_shard": microbatches // (size if isinstance(size, int) else 1),
        "transfer_s": transfer_s,
        "result_s": result_s,
        "adopt_s": None if args.no_adoption else args.adopt_s,
        "granularity": "shard" if args.granularity == "shard" else "microbatch",
    }
    cluster = ClusterFigures(**figures)
    if cluster.num_groups > GROUPS_MAX:
        raise ConfigError(
            f"--gpus {args.gpus} with --gpus-per-group {args.gpus_per_group} are {cluster.num_groups} groups, but a "
            f"plan is for at most {GROUPS_MAX}; use larger groups"
        )
    return cluster, microbatches, size


def _memory(args: argparse.Namespace, cluster: ClusterFigures, piece_microbatches: int) -> StatePlan | None:
    """The memory of a GPU with the chosen copies of the optimizer's state; None where the model's size is not given."""
    shape = Shape(args.gpus, args.gpus_per_group, args.inner_data_parallel, args.context_parallel_size)
    shape.check()
    if args.params is None:
        refuse_without(args, "--params P", "state_redundancy", "gather_gib_per_s")
        return None
    speed = 1.0 if args.gather_gib_per_s is None else args.gather_gib_per_s
    if not 0 < speed < float("inf"):
        raise ConfigError(f"--gather-gib-per-s is {speed:g}, but must be a finite number above 0")
    sizes = (args.params, shape, args.reduce)
    needs = (args.activations_gib, piece_microbatches)
    # restart, and half of Young's interval between saves
    cost_s = cluster.restart_s + (cluster.save_s * cluster.mtbf_s / 2) ** 0.5
    rates = StateRates(cluster.num_groups, cluster.mtbf_s, speed, cost_s)
    plan = choose_state_copies(
        lambda copies: memory(*sizes, *needs, state_copies=copies), rates, args.gpu_memory_gib, args.state_redundancy
    )
    fitting(*sizes, args.gpu_memory_gib, *needs, state_copies=plan.chosen.copies)
    return plan


def _with_shapes_that_fit(args: argparse.Namespace, nodes: NodeFigures, needed: StatePlan | None) -> NodeFigures:
    """``nodes`` with those of its smaller shapes whose ranks, which keep several stages each, fit into a GPU; with none
    where groups keep only some of the optimizer's state, which a job refuses."""
    if needed is None or args.gpu_memory_gib is None:
        return nodes
    if needed.chosen.copies < nodes.groups:
        return nodes.at_home()
    home = needed.chosen.memory.total - args.activations_gib
    room = args.gpu_memory_gib - args.activations_gib
    return replace(nodes, shapes=tuple(one for one in nodes.shapes if home * nodes.stages / one <= room))


def _topology(path: Path, num_groups: int, plan: RedundancyPlan) -> dict[str, object]:
    domains = parse_topology(lines_of(path, "--topology"), str(path), num_groups)
    spread = spread_over_domains(build_placement(num_groups, plan.chosen.redundancy), domains)
    return spread.as_json()


def text_of(found: dict[str, Any]) -> str:
    """The plan as text: a table of candidates with the chosen one marked, the memory, the reason."""
    rows = [[title for _, title in COLUMNS]]
    for each in found["candidates"]:
        rows.append([_cell(each[key]) for key, _ in COLUMNS])
        rows[-1][0] = ("* " if each["redundancy"] == found["redundancy"] else "  ") + rows[-1][0]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    needed = found["memory_gib_per_gpu"]
    if needed is not None:
        plain = needed["plain_megatron"]
        parts = ", ".join(f"{name} {value:g}" for name, value in needed.items() if name != "plain_megatron")
        others = ", ".join(f"{name} {value:g}" for name, value in plain.items())
        lines += [f"GiB per GPU: {parts}", f"plain Megatron: {others}"]
        lines += _state_lines(found)
    if "spare_nodes" in found:
        lines += node_lines(found)
    if "topology" in found:
        lines += [_numbers(found["topology"]["group_numbers"]), found["topology"]["reason"]]
    lines.append(found["reason"])
    return "\n".join(lines)


def _state_lines(found: dict[str, Any]) -> list[str]:
    """What the numbers of copies of the optimizer's state come to, with the chosen one marked."""
    lines = ["state copies  GiB per GPU  copied again in  last copy of a part lost once in"]
    for each in found["state_copies"]:
        mark = "*" if each["state_redundancy"] == found["state_redundancy"] else " "
        copying, days = each["copying_s"], each["wipe_out_days"]
        again, lasts = ("-", "-") if days is None else (f"{copying:.3g} s", f"{days:.3g} days")
        lines.append(
            f"{mark} {each['state_redundancy']:>10}  {each['memory_gib_per_gpu']:>11.1f}  {again:>15}  {lasts:>32}"
        )
    return lines


def _numbers(numbers: list[int]) -> str:
    """The number that each group of the topology should have, in lines that fit a terminal."""
    listed = ", ".join(str(number) for number in numbers)
    return textwrap.fill(f"numbers for groups 0..{len(numbers) - 1} of the topology: {listed}", 100)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw time to train, availability and mean work over redundancy, and what repairs of nodes cost."""
    keys = ("time_to_train_ratio", "availability", "mean_work")
    panels = len(keys) + ("spare_nodes" in found)
    figure, axes = load_pyplot().subplots(1, panels, figsize=(4 * panels, 3.6), layout="constrained")
    if panels > len(keys):
        draw_nodes(found, axes[-1])
    for key, axis in zip(keys, axes, strict=False):
        points = [(each["redundancy"], each[key]) for each in found["candidates"] if each[key] is not None]
        axis.plot(*zip(*points, strict=True), marker="o", markersize=3)
        axis.axvline(found["redundancy"], color="0.7", linestyle="--")
        axis.set(xlabel="redundancy", title=key.replace("_", " "))
    write_plot(figure, path)


@command("spare-plan")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code (spare_megatron.config.exits)."""
    args = parser().parse_args(argv)
    check_range(args)
    found = planned(args)
    if args.plot is not None:
        plot(found, args.plot)
    sys.stdout.write(json_line(found) if args.json else text_of(found) + "\n")
    return int(ExitCode.FINISHED)


if __name__ == "__main__":
    sys.exit(main())
