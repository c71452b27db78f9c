"""spare-checkpoint prints the digest of a checkpoint's weights, verifies its files, or lists its
contents."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from spare_megatron.checkpoint.folder import (
    CONFIG,
    TRACKER,
    damage,
    iteration_name,
    iterations,
    pointer_damage,
    to_begin_with,
)
from spare_megatron.cli.commands import command, json_line
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.plural import counted
from spare_megatron.config.version_flag import add_version
from spare_megatron.megatron_adapter.checkpoint.manifest_version import MANIFEST, read_whole

EXAMPLE = """examples:
  spare-checkpoint digest checkpoints/            sha256 of the weights of the last good checkpoint
  spare-checkpoint verify checkpoints/iter_0000100
  spare-checkpoint inspect checkpoints/ --json"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        "spare-checkpoint", description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_version(made)
    made.add_argument(
        "action",
        choices=("digest", "verify", "inspect"),
        help="print a digest of the weights, check files against their checksums, or list the tensors",
    )
    made.add_argument("directory", type=Path, metavar="DIR", help="a --save directory, or one iteration of it")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


@command("spare-checkpoint")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns exit code 0, 1 when ``verify`` finds damage, 2 when there is no good checkpoint."""
    options = parser().parse_args(argv)
    if options.action == "verify":
        return _verify(options.directory, options.json)
    directory = _one(options.directory)
    if options.action == "digest":
        return _digest(directory, options.json)
    return _inspect(directory, options.json)


def _one(directory: Path) -> Path:
    """The checkpoint's directory: the given one, or that of a --save directory with which a job would begin."""
    if not iterations(directory):
        reason = damage(directory)
        if reason:
            raise ConfigError(f"{reason}; give a --save directory or one iteration of it")
        return directory
    begins = to_begin_with(directory)
    for one in begins.passed:
        sys.stderr.write(f"spare-checkpoint: skipped a damaged checkpoint: {one.reason}\n")
    if begins.directory is None:
        why = begins.passed[0].reason if begins.passed else pointer_damage(directory)
        raise ConfigError(f"{directory} has no good checkpoint: {why}")
    return begins.directory


def _digest(directory: Path, as_json: bool) -> int:
    from spare_megatron.megatron_adapter.checkpoint.digest import digest

    value = digest(directory)
    sys.stdout.write(
        json_line({"digest": value, "directory": str(directory)}) if as_json else f"{value}  {directory}\n"
    )
    return 0


def _verify(directory: Path, as_json: bool) -> int:
    """Verify every checkpoint of a --save directory and its tracker file, or the one checkpoint that is given."""
    found = iterations(directory)
    places = [directory / iteration_name(step) for step in found] or [directory]
    reasons = {str(place): _damage(place) for place in places}
    if found:
        reasons[str(directory / TRACKER)] = pointer_damage(directory)
    if as_json:
        sys.stdout.write(json_line({"damaged": {k: v for k, v in reasons.items() if v}, "checked": len(reasons)}))
    else:
        sys.stdout.writelines(f"{place}: {reason or _praise(Path(place))}\n" for place, reason in reasons.items())
    return int(ExitCode.FAILED) if any(reasons.values()) else 0


def _damage(place: Path) -> str:
    try:
        with read_whole(place):
            return damage(place)
    except ConfigError as error:  # a job has replaced it
        return str(error)


def _praise(place: Path) -> str:
    """The text for a place without damage; a checkpoint of Megatron-LM has no checksums, so it cannot be called
    good."""
    unknown = place.is_dir() and not (place / MANIFEST).exists()
    return f"has a {CONFIG}, but no {MANIFEST} to check it against" if unknown else "good"


def _inspect(directory: Path, as_json: bool) -> int:
    from spare_megatron.megatron_adapter.checkpoint.digest import model_tensors
    from spare_megatron.megatron_adapter.checkpoint.group_checkpoint import read_common

    common = read_common(directory)
    tensors = {
        name: {"shape": list(entry.size), "dtype": str(entry.properties.dtype).removeprefix("torch.")}
        for name, entry in model_tensors(directory).items()
    }
    parameters = sum(entry.size.numel() for entry in model_tensors(directory).values())
    if as_json:
        reported = {
            "directory": str(directory),
            "step": common.get("iteration"),
            "parameters": parameters,
            "tensors": tensors,
        }
        sys.stdout.write(json_line(reported))
        return 0
    count = counted(len(tensors), "tensor")
    sys.stdout.write(f"{directory}: step {common.get('iteration')}, {parameters:,} values in {count}\n")
    for name, entry in tensors.items():
        sys.stdout.write(f"  {name}  {entry['dtype']}  {'x'.join(map(str, entry['shape']))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
