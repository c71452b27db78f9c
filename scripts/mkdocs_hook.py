"""For mkdocs: the site also has the pages and files outside docs/ that its pages link to, and GitHub's anchors.

Links in the repository are those that GitHub follows. On the site all pages lie in one folder, so each link is replaced
by the place of its target there; mkdocs then checks it, and its anchor.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "THIRD_PARTY_NOTICES.md": "notices.md",
    "examples/README.md": "examples.md",
}
"""Path in the repository -> name on the site."""
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)


def on_config(config: Any) -> Any:
    config.mdx_configs["toc"] = {"slugify": anchor, "permalink": False}
    return config


def anchor(title: str, separator: str) -> str:
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", separator)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/, and the files that pages link to."""
    for path, name in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text()))
    pages = {**OUTSIDE, **{f"docs/{path.name}": path.name for path in (ROOT / "docs").glob("*.md")}}
    linked = {target for page in pages for target in targets(page) if target not in pages}
    for target in sorted(linked):
        if not target.startswith("docs/") and (ROOT / target).is_file():
            files.append(File.generated(config, f"files/{target}", content=(ROOT / target).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    here = next((path for path, name in OUTSIDE.items() if name == page.file.src_uri), f"docs/{page.file.src_uri}")

    def moved(link: re.Match[str]) -> str:
        return link[1] + place(resolved(here, link[2])) + link[3] if is_local(link[2]) else link[0]

    parts = CODE.split(markdown)
    return "".join(part if CODE.fullmatch(part) else LINK.sub(moved, part) for part in parts)


def targets(page: str) -> set[str]:
    """Paths in the repository to which a page links."""
    text = CODE.sub("", (ROOT / page).read_text())
    return {resolved(page, link[2]) for link in LINK.finditer(text) if is_local(link[2])}


def is_local(link: str) -> bool:
    return "://" not in link


def resolved(page: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def place(target: str) -> str:
    """Where a path of the repository is on the site."""
    if target in OUTSIDE:
        return OUTSIDE[target]
    return target.removeprefix("docs/") if target.startswith("docs/") else f"files/{target}"
