"""Numbers of groups as text. Pure, and quick to import."""

from __future__ import annotations

from collections.abc import Iterable


def numbered_groups(groups: Iterable[int]) -> str:
    """'group 3', 'groups 0-2, 5'."""
    runs: list[list[int]] = []
    for group in sorted(groups):
        if runs and group == runs[-1][1] + 1:
            runs[-1][1] = group
        else:
            runs.append([group, group])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    several = len(runs) > 1 or any(first != last for first, last in runs)
    return f"{'groups' if several else 'group'} {', '.join(texts)}"
