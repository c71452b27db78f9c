"""The pages name files, headings, packages and commands that are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from spare_megatron.cli import plan
from spare_megatron.worker.job_arguments import parse_job
from tests.pure import api_page
from tests.pure.claim import HISTORY, PAGES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "spare_megatron"
BASES = (ROOT, PACKAGE, ROOT / "docs", ROOT / "benchmarks" / "results")
"""Paths in pages are below one of these, or the page's own folder."""
ALL_PAGES = (*PAGES, "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "THIRD_PARTY_NOTICES.md", "examples/README.md")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*(?:/|\.(?:cpp|cu|h|json|md|png|proto|py|sbatch|sh|toml|txt))")
MODULE = re.compile(r"(?:spare_megatron\.)?[a-z_]+(?:\.[a-z_]+)+")
EXAMPLE = re.compile(r"^```\n\$ (spare-plan .*?)^```", re.MULTILINE | re.DOTALL)
CHOOSING = ROOT / "docs" / "choosing_redundancy.md"
OF_A_JOB = {
    *("gpu_check.json", "gpu_check.txt"),
    *(
        "accepted-N.json",
        "began.json",
        "ended.json",
        "clock.json",
        "coordinator.err",
        "coordinator.json",
        "coordinator.log",
        "job.json",
        "launcher.json",
        "metrics.jsonl",
        "processes.json",
        "snapshot-000001.json",
        "status.json",
        "summary.json",
    ),
    *("model_flags.txt", "spare_choice.json", "spare_manifest.json"),
    *("config.json", "generation_config.json"),
    *("choice-life-L.json", "choice-life-N.json"),
    *("errors/", "injected/", "leaders/", "logs/", "partial/", "rank_times/", "stage/", "standbys/", "terms/"),
    *("hugging_face/", "release/", "tls/", "RUN_DIR/tls"),
}
"""What a job or a command writes, and folders of a run directory."""
OF_A_USER = {"pretrain_own.py", "release/"}


def _there(path: str, page: str) -> bool:
    return any((base / path).exists() for base in (*BASES, (ROOT / page).parent))


def _is_module(name: str) -> bool:
    """Also a name of a module or of a package; anything that does not begin with a package of ours."""
    package, *rest = name.removeprefix("spare_megatron.").split(".")
    if not rest or not (PACKAGE / package).is_dir():
        there = (PACKAGE / package).exists() or package in (PACKAGE / "__init__.py").read_text()
        return there or not name.startswith("spare_megatron.")
    here = PACKAGE / package
    modules = any((here / rest[0]).with_suffix(suffix).exists() for suffix in ("", ".py"))
    return modules or rest[0] in re.findall(r"\w+", (here / "__init__.py").read_text())


def _anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", ALL_PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    here = ROOT / page
    wrong = []
    for link in LINK.findall(here.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (here.parent / path).resolve() if path else here
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            wrong.append(link)
    assert not wrong, f"{page} links to what is not there: {wrong}"


@pytest.mark.parametrize("page", [page for page in ALL_PAGES if page != HISTORY])
def test_every_path_is_there(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    words = {word.strip(",;:") for code in re.findall(r"`([^`\n]+)`", text) for word in code.split()}
    paths = {word.removeprefix("./") for word in words if PATH.fullmatch(word.removeprefix("./"))}
    folders = tuple(name for name in OF_A_JOB if name.endswith("/"))
    missing = {path for path in paths if not _there(path, page)} - OF_A_USER
    missing = {path for path in missing if Path(path).name not in OF_A_JOB and not path.startswith(folders)}
    missing |= {word for word in words - OF_A_JOB if MODULE.fullmatch(word) and not _is_module(word)}
    assert not missing, f"{page} names what is not there: {sorted(missing)}"


def test_the_walk_goes_through_many_files() -> None:
    text = (ROOT / "docs" / "walk.md").read_text()
    assert len(set(re.findall(r"`([\w/]+(?:\.py|/))`", text))) > 40


def test_the_index_has_a_line_for_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert {f"docs/{name}" for name in re.findall(r"^\| \[[\w.]+\]\(([\w.]+)\) \|", index, re.MULTILINE)} == set(
        PAGES
    ) - {"README.md", "docs/index.md"}


def test_every_picture_is_on_a_page() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    for picture in (*ROOT.glob("*.png"), *(ROOT / "docs").glob("*.png")):
        assert f"{picture.name})" in pages, f"no page shows {picture.name}: a run of a program left it there"


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_glossary_gives_the_word_of_three_projects() -> None:
    rows = re.findall(r"^\| ([^|]+) \|(.+)\|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    words = [word for word, cells in rows if len(cells.split(" | ")) == 4 and all(cells.split(" | "))]
    assert len(words) == len(rows)
    words = {word.partition(" (")[0] for word in words}
    assert words >= {"piece", "shard", "host", "group", "position", "epoch", "incarnation", "learner", "offer"}
    assert words >= {"patch", "wipe-out", "ticket", "fencing"}


def test_the_api_page_is_current() -> None:
    assert api_page.PAGE.read_text() == api_page.text(), "run python -m tests.pure.api_page"


def test_every_package_has_a_row_in_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text[text.index("| package | |") :].split("\n\n")[0]
    words = {
        word for cell in re.findall(r"^\| (.+?) \|", table, re.MULTILINE) for word in re.findall(r"`([\w.]+)`", cell)
    }
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert words == packages


def test_every_place_that_says_pickle_is_explained() -> None:
    """docs/pickles.md has each file of the package in which the word occurs, and no other."""
    text = (ROOT / "docs" / "pickles.md").read_text().split("## Each file of the package that mentions pickles")[1]
    named = {name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(.*?)`", row)}
    files = (path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".json", ".j2", ".proto"))
    assert named == {str(path.relative_to(PACKAGE)) for path in files if "pickle" in path.read_text()}


def _jobs() -> list[str]:
    """Every job that a code block starts with all of its flags."""
    blocks = (block for page in PAGES for block in re.findall(r"```\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))
    lines = (line for block in blocks for line in block.replace("\\\n", " ").splitlines())
    return [line for line in lines if line.startswith("spare-launch ") and "FLAGS" not in line]


def test_there_are_jobs_to_check() -> None:
    assert len(_jobs()) >= 2


@pytest.mark.parametrize("job", _jobs())
def test_a_job_of_a_page_passes_the_check(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(job)
    environ = {"SPARE_NUM_GROUPS": words[words.index("--num-groups") + 1]}
    with pytest.raises(SystemExit) as left:
        parse_job([*words[words.index("pretrain_gpt.py") + 1 :], "--spare-check"], environ)
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("the flags are good")


@pytest.mark.parametrize("block", EXAMPLE.findall(CHOOSING.read_text()))
def test_a_plan_of_a_page_is_printed_as_the_page_shows_it(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, *shown = block.splitlines()
    assert plan.main(words.split()[1:]) == 0
    printed = capsys.readouterr().out
    parts = [part.strip() for line in shown for part in line.split("; ...")]
    assert len(parts) > 5
    assert [part for part in parts if part not in printed and part != "..."] == []


def test_the_quick_start_trains_on_the_data_that_it_prepares() -> None:
    start = (ROOT / "README.md").read_text().partition("## Quick start on real data")[2]
    commands = start.split("```")[1].replace("\\\n", " ").splitlines()
    launch = next(line.split() for line in commands if line.startswith("spare-launch"))
    prepare = next(shlex.split(line) for line in commands if line.startswith("spare-preprocess"))
    prefix = prepare[prepare.index("--output-prefix") + 1]
    assert launch[launch.index("--data-path") + 1] == f"{prefix}_text_document"
    assert "--save" in launch
