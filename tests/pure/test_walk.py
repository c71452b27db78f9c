"""docs/walk.md and README's table name files and packages that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "spare_megatron"


def test_every_path_of_the_walk_is_there() -> None:
    text = (ROOT / "docs" / "walk.md").read_text()
    paths = set(re.findall(r"`([\w/]+(?:\.py|/))`", text)) | set(re.findall(r"`(tests/[\w/.]+)`", text))
    assert len(paths) > 40
    missing = sorted(path for path in paths if not ((PACKAGE / path).exists() or (ROOT / path).exists()))
    assert not missing, f"docs/walk.md names what is not there: {missing}"


def test_every_package_has_a_row_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| package | |") :].split("\n\n")[0]
    words = {
        word for cell in re.findall(r"^\| (.+?) \|", table, re.MULTILINE) for word in re.findall(r"`([\w.]+)`", cell)
    }
    there = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} | {"failpoints.py"}
    assert words == there
