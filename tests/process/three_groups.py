"""The shape of the jobs that are compared with the fixture ``failure_free_of_three`` (tests/process/conftest.py)."""

from __future__ import annotations

GROUPS, SIZE, PIECES = 3, 2, 2
STEPS = 400
"""More than a job takes until all groups are back."""
