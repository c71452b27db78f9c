"""The command line of this process: read once, by ``pretrain`` or before it by a script's own call.

Scripts of megatron-core 0.18 and newer call ``parse_and_validate_args`` before they build what they pass to
``pretrain``. A wrong flag ends the process there with one sentence, as ``pretrain`` does.
"""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.place import Place
from spare_megatron.flags.supported import all_specs
from spare_megatron.megatron_adapter.core_differences import QuietLogs, explain_import
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.worker import user_state
from spare_megatron.worker.job_arguments import JobArguments, parse_job
from spare_megatron.worker.waiting import PlaceFormatter

_parsed: tuple[JobArguments, Namespace, dict[str, Any]] | None = None
"""What :func:`parse_and_validate_args` has read: the job, its flags, and a copy of them."""


def read(
    extra_args_provider: Callable[..., Any] | None = None, args_defaults: Mapping[str, Any] | None = None
) -> tuple[JobArguments, Namespace]:
    """The job that ``sys.argv`` and the environment describe, and its flags; from now on this process logs. Raises
    ConfigError."""
    job, args = parse_job(sys.argv[1:], os.environ, extra_args_provider, args_defaults)
    _log(job)
    return job, args


def _log(job: JobArguments) -> None:
    """Log with this rank's place, unless the script has set up its own logging. A bare ``logging.basicConfig()``, as
    absl-py makes it when megatron-core 0.19 imports emerging-optimizers, is a library's and is replaced."""
    root = logging.getLogger()
    for other in root.handlers[:] if root.level == logging.WARNING else ():
        if type(other) is logging.StreamHandler and getattr(other.formatter, "_fmt", None) == logging.BASIC_FORMAT:
            root.removeHandler(other)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlaceFormatter(job.place))
    handler.addFilter(QuietLogs())
    logging.basicConfig(level=job.logging.logging_level or logging.INFO, handlers=[handler])


def job_runner() -> Callable[..., ExitCode]:
    """The function that builds and runs a rank, with all that it imports. Raises ConfigError where a package is not
    there."""
    try:
        from spare_megatron.worker.megatron_job import run_megatron_job
    except ImportError as error:
        raise explain_import(error) or error from error
    return run_megatron_job


def parse_and_validate_args(
    extra_args_provider: Callable[..., Any] | None = None,
    ignore_unknown_args: bool = False,
    args_defaults: Mapping[str, Any] | None = None,
) -> Namespace:
    """All flags by Megatron's names, resolved; ``get_args`` has them from now on. A wrong flag ends this process.

    Args:
        extra_args_provider: adds flags to an argparse parser.
        ignore_unknown_args: refused: a flag that nobody reads would be a silent mistake.
        args_defaults: defaults of flags, by name.
    """
    try:
        if ignore_unknown_args:
            raise ConfigError("parse_and_validate_args(ignore_unknown_args=True) is not supported: give known flags")
        job, args = read(extra_args_provider, args_defaults)
    except ConfigError as error:
        leave(refuse(str(error), None))
    global _parsed
    _parsed = job, args, dict(vars(args))
    user_state.start(user_state.UserState(args))
    return args


def parsed(args: Namespace) -> tuple[JobArguments, Namespace]:
    """The job of flags that :func:`parse_and_validate_args` has returned. Raises ConfigError for others, and for flags
    that were changed since: the job has been checked and made of what they were."""
    if _parsed is None or _parsed[1] is not args:
        raise ConfigError(
            "pretrain() was given flags that parse_and_validate_args() of spare_megatron.training.arguments did not "
            "return; pass on the namespace itself"
        )
    job, _, before = _parsed
    known = {spec.dest for spec in all_specs()}
    changed = [name for name in before if name in known and getattr(args, name, None) != before[name]]
    if changed:
        reported = ", ".join(f"{name} from {before[name]} to {getattr(args, name, None)}" for name in changed)
        raise ConfigError(
            f"the script changed {reported} between parse_and_validate_args() and pretrain(), which has no effect on "
            f"this "
            "job; give the flags on the command line, or defaults as args_defaults of parse_and_validate_args()"
        )
    return job, args


def refuse(sentence: str, place: Place | None) -> ExitCode:
    """Write one sentence to this rank's standard error, and to the run directory, from which the launcher shows it
    once."""
    sys.stderr.write(f"{os.path.basename(sys.argv[0])}: {sentence}\n")
    run_dir = place.run_dir if place is not None else os.environ.get("SPARE_RUN_DIR")
    if run_dir:
        who = "rank" if place is None else f"{place.home.replace(' ', '-')}-rank-{place.position}"
        RunDirectory(run_dir).report_error(f"{who}-{os.getpid()}", sentence)
    return ExitCode.BAD_INPUT


def leave(code: ExitCode, place: Place | None = None) -> NoReturn:
    """End this process at once: other ranks of this group may be dead, so no exit handler may run that waits for
    them."""
    status = int(code)
    if code == ExitCode.FENCED and place is not None:
        from spare_megatron.worker.fenced_end import status_of

        status = status_of(code, place)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
