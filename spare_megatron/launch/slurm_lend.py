"""Lends the nodes of a Slurm job to another one, which spare-slurm runs: an agent on each of them, as one step.

The agents leave when their standard input, which srun passes on, is closed: at a signal to this process, or at its end.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence

from spare_megatron.config.allocation import Allocation
from spare_megatron.config.errors import ConfigError
from spare_megatron.launch.node_agent import launcher_address
from spare_megatron.launch.slurm_commands import SRUN, step_names
from spare_megatron.launch.supervisor import on_stop_signals
from spare_megatron.runtime.run_directory import RunDirectory

LEND_STEP = "spare-lend"
"""Name of the step."""
AGENT = 'exec "$0" -m spare_megatron.cli.agent "$@" --name "$SLURMD_NODENAME"'
"""What a node runs."""


async def lend_nodes(
    allocation: Allocation,
    run_dir: RunDirectory,
    srun_options: Sequence[str],
    tls_dir: str,
    announce: Callable[[str], None],
) -> int:
    """Lend until a signal comes or the other job ends; returns the exit code. Raises ConfigError where nothing can be
    lent."""
    launcher_address(run_dir)
    if any(name.startswith("spare-life-") for name in await asyncio.to_thread(step_names, allocation.job)):
        raise ConfigError("this Slurm job trains itself; lend the nodes of a Slurm job of its own")
    count = str(allocation.num_nodes)
    words = [str(run_dir.path), "--places", str(min(allocation.tasks_of_nodes)), "--until-eof"]
    if tls_dir:
        words += ["--tls-dir", tls_dir]
    srun = await asyncio.create_subprocess_exec(
        *(*SRUN, "--no-kill", "--unbuffered", f"--job-name={LEND_STEP}", f"--nodes={count}", f"--ntasks={count}"),
        *("--ntasks-per-node=1", *srun_options, "/bin/sh", "-c", AGENT, sys.executable, *words),
        stdin=asyncio.subprocess.PIPE,
        process_group=0,
    )
    assert srun.stdin is not None
    closed = False

    def leave(reason: str) -> None:
        nonlocal closed
        if not closed:
            closed = True
            announce(f"{reason}: the groups on these nodes are drained, then they leave")
            srun.stdin.close()  # type: ignore[union-attr]

    on_stop_signals(leave)
    try:
        return await srun.wait()
    finally:
        if srun.returncode is None:
            srun.send_signal(signal.SIGKILL)
