"""A launcher starts no script that would train with Megatron's own loop."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from spare_megatron.cli.launch import SED, import_lines, script_command
from spare_megatron.config.errors import ConfigError
from spare_megatron.runtime.script_sources import source_digests

USERS = Path(__file__).parents[2] / "examples" / "own_script" / "pretrain_own.py"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("import torch\nfrom megatron.training import (\n    get_args,\n)\n", [2]),
        ("from megatron.training.utils import unwrap_model\nimport megatron.training.arguments as a\n", [1, 2]),
        ("def f():\n    from megatron import training\n", [2]),
        ("import megatron.training; import os\n", [1]),
        ("try:\n    import megatron.training as m\nexcept ImportError:\n    m = None\n", [2]),
        ("try:\n    import spare_megatron.training as m\nexcept ImportError:\n    import megatron.training as m\n", []),
        ("if TYPE_CHECKING:\n    from megatron.training import x\nelse:\n    import megatron.training\n", [4]),
        ("from megatron.core import mpu\nfrom spare_megatron.training import pretrain\n", []),
        ("from megatron.training_tools import x\nfrom .megatron.training import y\n", []),
    ],
)
def test_imports_of_megatrons_loop_are_found(text: str, lines: list[int]) -> None:
    assert import_lines(ast.parse(text)) == lines


def test_a_script_that_was_not_ported_is_refused_with_the_command_that_ports_it(tmp_path: Path) -> None:
    lines = import_lines(ast.parse(USERS.read_text()))
    assert len(lines) == 4
    with pytest.raises(ConfigError) as error:
        script_command(str(USERS), False, ())
    assert f"in 4 lines ({', '.join(map(str, lines))})" in str(error.value)
    ported = tmp_path / "own.py"
    ported.write_text(USERS.read_text().replace("from megatron.training", "from spare_megatron.training"))
    assert script_command(str(ported), False, ("--lr", "1"))[1:] == (str(ported), "--lr", "1")
    broken = tmp_path / "broken.py"
    broken.write_text("from megatron.training import (\n")
    assert script_command(str(broken), False, ())[1:] == (str(broken),)


@pytest.mark.parametrize(
    "line",
    [
        "from megatron.training import get_args",
        "    import megatron.training.utils as u",
        "from megatron import training",
        "import megatron.legacy.model  # isort: skip",
    ],
)
def test_the_command_that_is_named_ports_a_line_once(tmp_path: Path, line: str) -> None:
    script = tmp_path / "own.py"
    script.write_text(line + "\n")
    for _ in range(2):
        subprocess.run(["sed", "-i", SED, str(script)], check=True)
        assert script.read_text() == line.replace("megatron", "spare_megatron", 1) + "\n"


def test_packages_beside_the_script_are_read_too(tmp_path: Path) -> None:
    script, package = tmp_path / "own.py", tmp_path / "models" / "gpt"
    package.mkdir(parents=True)
    script.write_text("from models.gpt import provider\n")
    (package.parent / "__init__.py").touch()
    (package / "provider.py").write_text("import megatron.training\n")
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    with pytest.raises(ConfigError, match=re.escape(f"is imported by {package / 'provider.py'} in 1 line (1): ")):
        script_command(str(script), False, ())


def test_modules_beside_the_script_are_read_too(tmp_path: Path) -> None:
    script, builders, unused = (tmp_path / f"{name}.py" for name in ("own", "gpt_builders", "unused"))
    script.write_text("from provider import model_provider\nimport torch\n")
    (tmp_path / "provider.py").write_text("import gpt_builders\nimport own\n")
    builders.write_text("\nfrom megatron.training import get_args\n")
    unused.write_text("from megatron.training import get_args\n")
    with pytest.raises(ConfigError) as error:
        script_command(str(script), False, ())
    assert f"is imported by {builders} in 1 line (2): " in str(error.value)
    assert str(error.value).endswith(f"sed -i '{SED}' {builders}")


def test_a_script_that_another_one_runs_is_read_too(tmp_path: Path) -> None:
    """Megatron's pretrain_mamba.py is its older name of pretrain_hybrid.py, and runs that."""
    (tmp_path / "newer.py").write_text("import megatron.training\n")
    older = tmp_path / "older.py"
    older.write_text(
        "import os, runpy\nhere = os.path.dirname(__file__)\nrunpy.run_path(os.path.join(here, 'newer.py'))\n"
    )
    with pytest.raises(ConfigError, match=r"newer\.py in 1 line "):
        script_command(str(older), False, ())


@pytest.mark.parametrize("name", [None, "models.own"])
def test_a_digest_stands_for_what_the_script_and_its_modules_do(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that comes back with other code trains another job. Started by its path, or with -m."""
    package = tmp_path / "models"
    package.mkdir()
    script, layers, other = (
        package / "own.py" if name else tmp_path / "own.py",
        package / "layers.py",
        package / "x.py",
    )
    script.write_text("import torch\nfrom models.gpt import provider\n")
    (package / "gpt.py").write_text("from . import layers\nfrom .layers import Norm\n")
    main = SimpleNamespace(__file__=str(script), __spec__=name and SimpleNamespace(name=name))
    monkeypatch.setitem(sys.modules, "__main__", main)  # type: ignore[arg-type]

    def digest(file: Path, text: str) -> Mapping[str, str]:
        file.write_text(text)
        return source_digests.__wrapped__()

    first = digest(layers, "EPSILON = 1e-5\n")
    assert digest(other, "EPSILON = 1e-5\n") == first, "nobody imports it"
    assert digest(layers, "EPSILON = 1e-5  # as in the paper\n") == first
    changed = digest(layers, "EPSILON = 1e-6\n")
    assert {file for file in first if changed[file] != first[file]} == {"models/layers.py"}
    main.__file__ = str(tmp_path / "no_source.so")
    assert source_digests.__wrapped__() == {}
