"""Golden scenarios of the step protocol, one file each; the files say which rule or counterexample they show."""

from pathlib import Path

import pytest

from tests.pure.scenario import FOLDER, run


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda p: p.stem)
def test_scenario_reads_as_recorded(path: Path) -> None:
    recorded = path.read_text()
    assert run(recorded) == recorded, "decisions changed: run `python -m tests.pure.scenario` and read the diff"
