"""The documentation site is built without a warning: every link and every anchor leads somewhere there too."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.pure.claim import PAGES, ROOT


def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = {Path(page).stem for page in PAGES} - {"README", "index"} | {"overview", "examples", "contributing"}
    assert {path.parent.name for path in tmp_path.glob("*/index.html")} >= names
    text = (tmp_path / "overview" / "index.html").read_text()
    assert re.search(r'<a href="\.\./architecture/">', text)
    assert (tmp_path / "files" / "examples" / "torch_only" / "train.py").read_bytes() == (
        ROOT / "examples" / "torch_only" / "train.py"
    ).read_bytes()
