"""What a rank does not need is not imported at its start: imports are most of the time of a start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spare_megatron.megatron_adapter.imports import imported_when_used
from tests.spawn import ROOT, environment

START = """
import sys
from spare_megatron.worker.job_arguments import parse_job
from spare_megatron.worker.tokenizer import build_tokenizer
import spare_megatron.worker.megatron_job
words = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --lr 1"
words += " --micro-batch-size 1 --train-iters 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 63"
_, args = parse_job(words.split())
assert build_tokenizer(args).vocab_size in (63, 64)  # since megatron-core 0.18 the end is one of the 63
print([name for name in ("transformers", "scipy.stats", "wandb", "torch._dynamo") if name in sys.modules])
"""


def test_a_rank_imports_no_package_that_it_does_not_use() -> None:
    done = subprocess.run([sys.executable, "-c", START], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_neither_a_coordinator_nor_the_end_of_a_launcher_waits_for_scipy() -> None:
    """A choice needs it, and few jobs make one."""
    code = (
        "import sys, spare_megatron.cli.coordinator, spare_megatron.monitor.html_report; print('scipy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_what_is_imported_at_the_start_is_never_looked_through_for_garbage() -> None:
    """Each generation of the collector would look through it once, some time among the first steps."""
    code = (
        "import gc\nfrom spare_megatron.megatron_adapter.imports import uncollected\n"
        "with uncollected():\n    import xml.dom.minidom\n    inside = gc.isenabled()\n"
        "print(inside, gc.isenabled(), gc.get_freeze_count() > 10_000, len(gc.get_objects()) < 1000)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False True True True\n", "")


def test_what_is_imported_later_does_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "used_later"
    package.mkdir()
    (package / "__init__.py").write_text("class Kind:\n    made = 1\n    def __init__(self, x): self.x = x\n")
    (package / "part.py").write_text("def double(x): return 2 * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "user.py").write_text(
        "import used_later\nfrom used_later import Kind\nfrom used_later.part import double\n"
    )
    with imported_when_used("used_later", "used_later.part"):
        import user  # type: ignore[import-not-found]
    assert "used_later" not in sys.modules
    assert (user.Kind.made, user.Kind(3).x, user.used_later.Kind(x=4).x, user.double(4)) == (1, 3, 4, 8)
    assert not hasattr(user.used_later, "__wrapped__")
    real = sys.modules["used_later"]
    with imported_when_used("used_later"):
        assert sys.modules["used_later"] is real, "what is imported already stays"
    with imported_when_used("not_installed_at_all"):
        assert "not_installed_at_all" not in sys.modules
