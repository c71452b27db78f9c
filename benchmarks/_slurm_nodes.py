"""One job of spare-slurm on virtual nodes, of which some die while others are lent."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import psutil

from spare_megatron.control_plane.group_aggregation import joined_digests
from tests.process.returning import failure_free_pipeline, voted_in
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SlurmJob, lend, live, node_of, submit, until_reported

NODES, GROUPS, SIZE, EVENTS = 7, 3, 2, 5
WAIT_S = 240.0
PATIENT = ("--spare-group-restart-pause-s", "0", "--spare-max-group-restarts", "20")


class Schedule:
    """A job of three groups of two nodes on n1 to n6, and n7, which may be lent."""

    def __init__(self, cluster: Cluster, folder: Path, seed: int) -> None:
        self.cluster, self.folder, self.rng = cluster, folder, random.Random(seed)
        words = until_reported("--piece-s", "0.05", *PATIENT, groups=GROUPS, size=SIZE)
        self.job = submit(cluster, folder, words, nodes=GROUPS * SIZE, ranks=1)
        self.own = set(cluster.nodes[: GROUPS * SIZE])
        self.lending: SlurmJob | None = None
        self.lend_over = False
        self.events: list[str] = []

    @property
    def possible(self) -> int:
        """As many groups as there are nodes for."""
        lent = self.lending is not None and not self.lend_over
        return min(GROUPS, (len(self.own) + lent) // SIZE)

    def play(self) -> None:
        """Play some events, each when the job has answered the one before it."""
        self.job.until_step(3, WAIT_S)
        for _ in range(EVENTS):
            before = live(self.job)
            struck = self._event()
            self.job.until(
                f"the loss of {struck} by {self.events[-1]}",
                lambda before=before, struck=struck: all(live(self.job).get(g) != before[g] for g in struck),
                WAIT_S,
            )
            self.job.until(f"{self.possible} groups", lambda: len(live(self.job)) == self.possible, WAIT_S)
            self.job.until_step(self.job.metrics[-1]["step"] + 2, WAIT_S)

    def _event(self) -> set[str]:
        """Let something happen; returns the groups that are lost by it."""
        on = self._nodes_of_groups()
        # n1 has the batch script, which starts lost groups again
        mortal = [n for n in sorted(self.own - {"n1"}) if any(n not in nodes for nodes in on.values())]
        kinds = ["node"] * 3 * bool(mortal) + ["process"] * (len(on) > 1)
        if self.lending is None:
            kinds += ["lend"] * 2
        elif not self.lend_over:
            kinds += ["leave"] + ["lent node"] * any("n7" not in nodes for nodes in on.values())
        kind = self.rng.choice(kinds)
        if kind == "lend":
            self.lending = lend(self.job, self.folder / "lend", 1, 1, "--nodelist=n7")
            self.job.until("n7 is lent", lambda: "n7 is lent to the job" in self.job.output.read_text(), WAIT_S)
            self.events.append("lend n7")
            return set()
        if kind == "leave":
            assert self.lending is not None
            self.cluster.call("scancel", "--batch", "--signal=USR1", self.lending.id)
            self.lending.until_ended(WAIT_S)
            self.lend_over = True
            self.events.append("n7 leaves")
            return set()
        if kind == "process":
            group = self.rng.choice(sorted(on))
            task = int(group) * SIZE + self.rng.randrange(SIZE)
            os.kill(self.job.ranks()[task], signal.SIGKILL)
            self.events.append(f"rank {task} dies")
            return {group}
        node = "n7" if kind == "lent node" else self.rng.choice(mortal)
        self.cluster.kill_node(node)
        if node == "n7":
            self.lend_over = True
        else:
            self.own.remove(node)
        self.events.append(f"{node} dies")
        return {group for group, nodes in on.items() if node in nodes}

    def _nodes_of_groups(self) -> dict[str, set[str]]:
        """The nodes of each group that trains."""
        found: dict[str, set[str]] = {group: set() for group in live(self.job)}
        for task, pid in self.job.ranks().items():
            with contextlib.suppress(psutil.NoSuchProcess):  # of a group that is lost
                found.get(str(task // SIZE), set()).add(node_of(pid))
        return found


def played(cluster: Cluster, folder: Path, seed: int) -> dict[str, object]:
    """Play a schedule; returns what happened, and how it ended."""
    began_s = time.monotonic()
    one = Schedule(cluster, folder, seed)
    one.play()
    at_end = len(live(one.job))
    cluster.call("scancel", "--batch", "--signal=TERM", one.job.id)
    one.job.until_ended(WAIT_S)
    found = voted_in(one.job.run_dir.journal)
    failure_free = [joined_digests(ranks) for ranks in failure_free_pipeline(max(found), GROUPS, 2, SIZE)]
    summary = json.loads(one.job.run_dir.summary.read_text())
    output = one.job.output.read_text()
    return {
        "events": ", ".join(one.events),
        "steps": max(found),
        "failures_masked": summary["failures_masked"],
        "steps_lost": summary["steps_lost"],
        "to_lent": output.count("to the lent node"),
        "salvaged": output.count("which waits for nodes too"),
        "live_at_end": at_end,
        "live_possible": one.possible,
        "steps_with_other_weights": sum(digests != {failure_free[step]} for step, digests in found.items()),
        "wall_s": round(time.monotonic() - began_s),
    }
