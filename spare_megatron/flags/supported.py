"""Which flags may be given: ours and megatron-core's, less those that are refused or change nothing; the nearest."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence

from spare_megatron.flags.no_effect import taken
from spare_megatron.flags.refusals import refused_names
from spare_megatron.flags.specs import FlagSpec, core_specs, own_specs


@functools.cache
def all_specs() -> tuple[FlagSpec, ...]:
    """Every flag that may be given, refused ones left out."""
    own = own_specs()
    other = refused_names().keys() | taken().keys()
    core = [spec for spec in core_specs({spec.dest for spec in own}) if not other & set(spec.names)]
    return (*own, *core)


def nearest_of(name: str, known: Sequence[str]) -> str:
    """What to add to the sentence about an unknown name: the one of ``known`` that is most like it."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else " (see --help)"
