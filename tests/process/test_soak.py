"""Real processes under a schedule of kills and pauses, with groups that come back: nothing else may happen.

The soak is benchmarks/soak.py's own; a longer one and other seeds run there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks._soak_models import Toy
from benchmarks._soak_samples import growth
from benchmarks._soak_verdict import judge
from benchmarks._soaked_job import Soak
from tests.process.harness import RESTARTS

SEED, FAULTS_S, GAP_S = 5, 17.0, 2.5


@pytest.mark.timeout(400)
def test_a_quarter_of_a_minute_of_chaos(tmp_path: Path) -> None:
    restarts = {RESTARTS: 100, "--spare-group-restart-pause-s": 0.25}
    soak = Soak(Toy(groups=4, piece_s=0.25), SEED, FAULTS_S, GAP_S, tmp_path, print, restarts)
    soak.run()
    assert not judge(soak, growth(soak.samples.found), print)
    assert soak.strikes.carried_out >= 3
    assert soak.strikes.returns >= 1
