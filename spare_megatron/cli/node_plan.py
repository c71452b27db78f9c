"""The part of spare-plan about nodes: what their repairs cost with 0 to 8 spare ones, and how many to have.

It simulates nodes that break and are repaired (:mod:`spare_megatron.simulator.node_losses`), with the places and shapes
of groups as the launcher chooses them, and beside it a job that restarts from its checkpoint at each interruption.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from spare_megatron.cli.commands import refuse_without
from spare_megatron.cli.shape_flags import add_shape_flags, shapes_given
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.plural import counted
from spare_megatron.planning.cluster_figures import ClusterFigures
from spare_megatron.simulator.node_losses import (
    CheckpointRestarts,
    NodeFigures,
    mean_lost_share,
    mean_restarted_lost_share,
    trials_for,
)

SPARE_NODES_MAX = 8
FLAG = "--gpus-per-node"
LOST = {
    "lost_by_restarts": "all restart from checkpoints",
    "lost_without_salvage": "no salvage",
    "lost": "salvage",
    "lost_with_shapes": "salvage, smaller shapes",
}
"""Key of a row -> how it is called for users."""


def add_node_flags(made: argparse.ArgumentParser) -> None:
    """The nodes of the cluster and their repairs."""
    add = made.add_argument
    add(
        FLAG,
        type=int,
        metavar="G",
        help="GPUs of a node: also simulates nodes that are repaired, with 0 to "
        f"{SPARE_NODES_MAX} spare ones, where groups that wait put theirs together (spare-slurm)",
    )
    add("--node-repair-h", type=float, metavar="H", help="mean time of a node's repair, hours (default: 24)")
    add(
        "--node-share",
        type=float,
        metavar="S",
        help="share of the losses that take a node out; after the others the group starts again on it (default: 0.7)",
    )
    add("--group-restart-s", type=float, metavar="S", help="time of a group's restart, seconds (default: 300)")
    add_shape_flags(made)


def node_figures(args: argparse.Namespace, cluster: ClusterFigures) -> NodeFigures | None:
    """The nodes that the flags describe; None without them. Raises ConfigError."""
    if args.gpus_per_node is None:
        refuse_without(args, f"{FLAG} G", "node_repair_h", "node_share", "group_restart_s")
    shapes = shapes_given(args, FLAG, args.gpus_per_node)
    if args.gpus_per_node is None:
        return None
    if args.gpus_per_node < 1 or args.gpus_per_group % args.gpus_per_node:
        raise ConfigError(
            f"--gpus-per-group {args.gpus_per_group} is no multiple of {FLAG} {args.gpus_per_node}; only "
            "groups of whole nodes are simulated"
        )
    stages = args.pipeline_model_parallel_size
    if stages and args.gpus_per_group % stages:
        raise ConfigError(
            f"--gpus-per-group {args.gpus_per_group} is no multiple of --pipeline-model-parallel-size {stages}; each "
            "stage has as many GPUs as the others"
        )
    times = {"repair_h": args.node_repair_h, "taken_out": args.node_share}
    times["restart_h"] = None if args.group_restart_s is None else args.group_restart_s / 3600
    return NodeFigures(
        groups=cluster.num_groups,
        nodes_per_group=args.gpus_per_group // args.gpus_per_node,
        mtbf_h=cluster.mtbf_s * args.gpus / args.gpus_per_node / 3600,
        **shapes,
        **{name: value for name, value in times.items() if value is not None},
    )


def node_plan(figures: NodeFigures, cluster: ClusterFigures) -> dict[str, Any]:
    """The share of the groups' time that is lost for each number of spare nodes, and the number that is advised, as
    parts of the object that --json prints. A key of ``LOST`` is left out where no smaller shape is allowed."""
    trials = trials_for(figures)
    restarts = CheckpointRestarts.at_best(figures, cluster.restart_s / 3600, cluster.save_s / 3600)
    shapes, figures = figures, figures.at_home()
    rows = []
    for spares in range(SPARE_NODES_MAX + 1):
        row = {
            "lost_by_restarts": mean_restarted_lost_share(figures, spares, restarts, trials),
            "lost_without_salvage": mean_lost_share(figures, spares, False, trials),
            "lost": mean_lost_share(figures, spares, True, trials),
        }
        if shapes.shapes:
            row["lost_with_shapes"] = mean_lost_share(shapes, spares, True, trials)
        rows.append({"spare_nodes": spares, **{name: round(value, 5) for name, value in row.items()}})
    nodes = figures.groups * figures.nodes_per_group
    best = "lost_with_shapes" if shapes.shapes else "lost"

    def cost(row: dict[str, float]) -> float:
        return (1 + cluster.standby_price * row["spare_nodes"] / nodes) / (1 - row[best])

    advised = min(rows, key=cost)
    return {
        "spare_nodes": rows,
        "spare_nodes_advised": advised["spare_nodes"],
        "spare_nodes_reason": _why(advised, rows[0], best, nodes, cost(rows[0]) / cost(advised)),
        "shapes": list(shapes.shapes),
    }


def _why(advised: dict[str, float], none: dict[str, float], key: str, nodes: int, ratio: float) -> str:
    """Why so many spare nodes, in a sentence."""
    count = int(advised["spare_nodes"])
    if not count:
        return f"spare nodes do not pay: without them {none[key]:.2%} is lost"
    return (
        f"{counted(count, 'spare node')} beside {nodes} ({count / nodes:.2%} more): {advised[key]:.2%} is lost; "
        f"without {none[key]:.2%}, which costs {ratio:.3f} times as much for the same training"
    )


def node_lines(found: dict[str, Any]) -> Iterator[str]:
    """The same for a terminal."""
    rows = found["spare_nodes"]
    names = {name: title for name, title in LOST.items() if name in rows[0]}
    yield "share of the groups' time that is lost while nodes are repaired:"
    yield "spare nodes  " + "  ".join(names.values())
    for row in rows:
        mark = "*" if row["spare_nodes"] == found["spare_nodes_advised"] else " "
        cells = (f"{row[name]:.2%}".rjust(len(title)) for name, title in names.items())
        yield f"{mark} {row['spare_nodes']:>9}  " + "  ".join(cells)
    yield found["spare_nodes_reason"]


def draw_nodes(found: dict[str, Any], axis: Any) -> None:
    """Draw the shares over the number of spare nodes."""
    rows = found["spare_nodes"]
    for name, title in LOST.items():
        if name in rows[0]:
            lost = [100 * row[name] for row in rows]
            axis.plot([row["spare_nodes"] for row in rows], lost, marker="o", markersize=3, label=title)
    axis.axvline(found["spare_nodes_advised"], color="0.7", linestyle="--")
    axis.set(xlabel="spare nodes", title="lost to repairs, %", ylim=(0, None))
    axis.legend(fontsize="small")
