"""A run directory with wrong bytes: what its readers (spare-status, spare-report) make of it, beside what the journal
and the metrics really hold."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import strategies as st

from spare_megatron.cli import report, status
from tests.fuzz import EDITS, Edit, edited, outcome
from tests.pure.scripted_job import ScriptedJob
from tests.pure.written_job import Written

CASES = st.lists(
    st.tuples(
        st.integers(0, 30), st.one_of(EDITS, st.none(), st.sampled_from([b"null", b"[]", b"{}", b"5", b"\xff", b""]))
    ),
    max_size=2,
)
"""(number of a file, what becomes of it: edits, None: it is removed, or other bytes)."""


def examine(folder: Path, case: list[tuple[int, list[Edit] | bytes | None]]) -> None:
    run = Written(folder, ScriptedJob())
    run.job.step()
    run.job.lose(1)
    run.job.step()
    run.job.step()
    run.go_on()
    run.status()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    before = {path: path.read_bytes() for path in files}
    for number, how in case:
        path = files[number % len(files)]
        if how is None:
            path.unlink(missing_ok=True)
        elif isinstance(how, list):
            path.write_bytes(edited(path.read_bytes() if path.exists() else b"", how))
        else:
            path.write_bytes(how)
    changed = [path for path in files if not path.exists() or path.read_bytes() != before[path]]
    code, out, reported = outcome(status.main, [str(folder), "--json"])
    assert code == 0 or run.dir.status in changed, reported
    if code == 0 and run.dir.status not in changed:
        assert json.loads(out)["step"] == 3
    outcome(status.main, [str(folder)])
    outcome(status.main, [str(folder), "--wall-time"])
    code, _, reported = outcome(report.main, [str(folder), "-o", str(folder / "out.html")])
    assert code == 0 or changed, reported
