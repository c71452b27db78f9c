"""A --save directory with wrong bytes: latest_checkpointed_iteration.txt, manifests, files. The files are read a second
time by their own checksums."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

from hypothesis import strategies as st

from spare_megatron.checkpoint.files import entries_of
from spare_megatron.checkpoint.folder import TRACKER, last_good, partial_directory, publish, write_manifest
from spare_megatron.cli import checkpoint
from spare_megatron.megatron_adapter.checkpoint.manifest_version import MANIFEST
from tests.fuzz import EDITS, Edit, edited

STEPS = (10, 20)
FILES = (TRACKER, *(f"iter_{step:07d}/{name}" for step in STEPS for name in (MANIFEST, "a.bin", "metadata.json")))
CASES = st.lists(
    st.tuples(st.sampled_from(FILES), st.one_of(EDITS, st.none(), st.binary(max_size=30), st.text(max_size=9))),
    max_size=3,
)
"""(file, what becomes of it: edits, None: it is removed, or other bytes or text)."""


def save_directory(folder: Path) -> Path:
    """Two checkpoints, published as a job publishes them."""
    save = folder / "save"
    for step in STEPS:
        partial = partial_directory(save, step, 0, 0, 0)
        partial.mkdir(parents=True)
        (partial / "a.bin").write_bytes(bytes(range(40)) * step)
        (partial / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        write_manifest(partial, entries_of(partial))
        publish(partial, save, step)
    return save


def examine(folder: Path, case: list[tuple[str, list[Edit] | bytes | str | None]]) -> None:
    save = save_directory(folder)
    before = {name: (save / name).read_bytes() for name in FILES}
    for name, how in case:
        path = save / name
        if how is None:
            path.unlink(missing_ok=True)
        elif isinstance(how, list):
            path.write_bytes(edited(path.read_bytes() if path.exists() else b"", how))
        else:
            path.write_bytes(how if isinstance(how, bytes) else how.encode())
    after = {name: (save / name).read_bytes() if (save / name).exists() else None for name in FILES}
    whole = {step: all(after[name] == before[name] for name in FILES if f"{step:07d}" in name) for step in STEPS}
    unchecked = {step: after[f"iter_{step:07d}/{MANIFEST}"] is None for step in STEPS}
    found, passed = last_good(save)
    if not any(unchecked.values()):
        good = [step for step in STEPS if whole[step]]
        assert found == (save / f"iter_{good[-1]:07d}" if good else None), passed
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = checkpoint.main(["verify", str(save), "--json"])
    damaged = json.loads(out.getvalue())["damaged"]
    assert all("\n" not in reason for reason in damaged.values()), damaged
    assert code == bool(damaged)
    for step in STEPS:
        if not unchecked[step]:
            assert (str(save / f"iter_{step:07d}") in damaged) == (not whole[step]), damaged
    reported = after[TRACKER]
    right = reported is not None and reported.decode(errors="replace").strip() in ("10", "20")
    assert (str(save / TRACKER) in damaged) == (not right), (reported, damaged)
