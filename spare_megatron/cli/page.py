"""spare-page RUN_DIR... shows jobs in a browser while they train, and ended ones; Prometheus reads /metrics of it.

It reads the run directories and changes nothing; it may be started, killed and started again at any time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spare_megatron.cli.commands import command
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.extras import extra
from spare_megatron.config.host_port import join_address
from spare_megatron.config.version_flag import add_version
from spare_megatron.runtime.run_directory import RunDirectory

if TYPE_CHECKING:
    from spare_megatron.monitor.page.page_server import PageServer

EXAMPLE = "example: spare-page runs/first --listen 127.0.0.1:8080"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser("spare-page", description=__doc__, epilog=EXAMPLE)
    add_version(made)
    made.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="the --run-dir of a job")
    made.add_argument(
        "--listen",
        default="127.0.0.1:8080",
        metavar="HOST:PORT",
        help="where; anything but this machine's own loopback address needs a token; port 0: any free one; "
        "default: 127.0.0.1:8080",
    )
    made.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="a file with a secret of at least 16 characters, which every request must then carry",
    )
    return made


@command("spare-page")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code (spare_megatron.config.exits)."""
    args = parser().parse_args(argv)
    with extra("page", "spare-page"):
        from spare_megatron.monitor.page.followed_run import FollowedRun, names_of
        from spare_megatron.monitor.page.page_door import listen_address, read_token
        from spare_megatron.monitor.page.page_server import PageServer
    token = read_token(args.token_file)
    host, port = listen_address(args.listen, token)
    run_dirs = [RunDirectory(path) for path in args.run_dirs]
    names = names_of(run_dirs)
    runs = [FollowedRun(n, name, one) for n, (name, one) in enumerate(zip(names, run_dirs, strict=True))]
    asyncio.run(_serve(PageServer(runs, token), host, port, token))
    return int(ExitCode.FINISHED)


async def _serve(server: PageServer, host: str, port: int, token: str) -> None:
    from spare_megatron.monitor.page.page_server import opened

    runner, port = await opened(server, host, port)
    following = asyncio.ensure_future(server.follow())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, following.cancel)
    secret = "?token=..., with the content of the token file," if token else ""
    sys.stdout.write(f"spare-page: http://{join_address(host, port)}/{secret} until Ctrl-C\n")
    sys.stdout.flush()
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await following
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    sys.exit(main())
