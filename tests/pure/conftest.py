"""What tests of several files look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def answers(once: Callable[..., Any]) -> dict[str, str]:
    """What ``--spare-check`` says of each of Megatron-LM's configurations that train."""
    from tests.pure.functional_sets import answers_of

    found: dict[str, str] = once("answers of training", lambda: answers_of("training"))
    return found
