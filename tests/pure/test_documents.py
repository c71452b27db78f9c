"""README.md and docs/ name files, headings, packages and commands that are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from spare_megatron.trainer.job_arguments import parse_job
from tests.pure.claim import HISTORY, PAGES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "spare_megatron"
BASES = (ROOT, PACKAGE, ROOT / "docs", ROOT / "benchmarks" / "results")
"""Paths in pages are below one of these."""
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*(?:/|\.(?:cpp|cu|h|json|md|png|proto|py|sbatch|sh|toml|txt))")
MODULE = re.compile(r"(?:spare_megatron\.)?[a-z_]+(?:\.[a-z_]+)+")
OF_A_JOB = {
    *("gpu_check.json", "gpu_check.txt"),
    *(
        "accepted.json",
        "clock.json",
        "coordinator.err",
        "coordinator.json",
        "coordinator.log",
        "job.json",
        "processes.json",
        "snapshot-000001.json",
        "status.json",
        "summary.json",
    ),
    *("model_flags.txt", "spare_choice.json", "spare_manifest.json"),
    *("config.json", "generation_config.json"),
    *("choice-life-L.json", "choice-life-N.json"),
    *("errors/", "injected/", "leaders/", "logs/", "partial/", "rank_times/", "stage/", "standbys/", "terms/"),
    *("hugging_face/", "tls/", "RUN_DIR/tls"),
}
"""What a job or a command writes, and folders of a run directory."""
OF_A_USER = {"pretrain_own.py"}


def _there(path: str) -> bool:
    return any((base / path).exists() for base in BASES)


def _is_module(name: str) -> bool:
    """Also a name of a module; anything that does not begin with a package of ours."""
    package, *rest = name.removeprefix("spare_megatron.").split(".")
    if not rest or not (PACKAGE / package).is_dir():
        return not name.startswith("spare_megatron.") or (PACKAGE / package).exists()
    return any((PACKAGE / package / rest[0]).with_suffix(suffix).exists() for suffix in ("", ".py"))


def _anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
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


@pytest.mark.parametrize("page", [page for page in PAGES if page != HISTORY])
def test_every_path_is_there(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    words = {word.strip(",;:") for code in re.findall(r"`([^`\n]+)`", text) for word in code.split()}
    paths = {word.removeprefix("./") for word in words if PATH.fullmatch(word.removeprefix("./"))}
    folders = tuple(name for name in OF_A_JOB if name.endswith("/"))
    missing = {path for path in paths if not _there(path)} - OF_A_USER
    missing = {path for path in missing if Path(path).name not in OF_A_JOB and not path.startswith(folders)}
    missing |= {word for word in words - OF_A_JOB if MODULE.fullmatch(word) and not _is_module(word)}
    assert not missing, f"{page} names what is not there: {sorted(missing)}"


def test_the_walk_goes_through_many_files() -> None:
    text = (ROOT / "docs" / "walk.md").read_text()
    assert len(set(re.findall(r"`([\w/]+(?:\.py|/))`", text))) > 40


def test_readme_has_a_line_for_every_page() -> None:
    index = (ROOT / "README.md").read_text().partition("## Documentation")[2]
    assert {f"docs/{name}" for name in re.findall(r"\]\(docs/([\w.]+)\) \|", index)} == set(PAGES) - {"README.md"}


def test_every_package_has_a_row_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| package | |") :].split("\n\n")[0]
    words = {
        word for cell in re.findall(r"^\| (.+?) \|", table, re.MULTILINE) for word in re.findall(r"`([\w.]+)`", cell)
    }
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert words == packages | {"failpoints.py", "wakeups.py"}


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


def test_the_quick_start_trains_on_the_data_that_it_prepares() -> None:
    start = (ROOT / "README.md").read_text().partition("## Quick start on real data")[2]
    commands = start.split("```")[1].replace("\\\n", " ").splitlines()
    launch = next(line.split() for line in commands if line.startswith("spare-launch"))
    prepare = next(shlex.split(line) for line in commands if "preprocess_data.py" in line)
    prefix = prepare[prepare.index("--output-prefix") + 1]
    assert launch[launch.index("--data-path") + 1] == f"{prefix}_text_document"
    assert "--save" in launch
