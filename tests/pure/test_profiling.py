"""Which steps --profile covers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spare_megatron.worker.profiling import StepProfiler


class Profile:
    """Torch's profile, as far as it is used."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def __exit__(self, *_: Any) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        self.written.append(path)


@pytest.mark.parametrize(("first", "end", "last"), [(3, 5, 4), (3, 4, 3), (1, 10, 9)])
def test_a_profile_is_written_after_its_last_step(
    first: int, end: int, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, begun, ended = Profile(), [], []
    profiler = StepProfiler(first, end, tmp_path, "rank-0", with_torch=True)
    monkeypatch.setattr(profiler, "_begin", lambda: begun.append(True) or profile)
    for step in range(1, 9):
        begins, ends = len(begun), len(profile.written)
        profiler.before(step)
        assert (len(begun) > begins) == (step == first)
        profiler.after(step)
        ended += [step] * (len(profile.written) - ends)
    profiler.close()
    assert ended == ([last] if last < 9 else []), "one that the job leaves before is ended by its end"
    assert profile.written == [str(tmp_path / "rank-0.pt.trace.json")]
