"""Lists the honoured flags, and finds the known name that is most like an unknown one."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence

from spare_megatron.flags.no_effect import taken
from spare_megatron.flags.refusals import refused_names
from spare_megatron.flags.specs import FlagSpec, core_specs, own_specs


@functools.cache
def all_specs() -> tuple[FlagSpec, ...]:
    """Every flag that is honoured: ours, and megatron-core's that are neither refused nor without effect."""
    own = own_specs()
    other = refused_names().keys() | taken().keys()
    core = [spec for spec in core_specs({spec.dest for spec in own}) if not other & set(spec.names)]
    return (*own, *core)


def nearest_of(name: str, known: Sequence[str]) -> str:
    """The end of the sentence about an unknown name: the one of ``known`` that is most like it, or 'see --help'."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.72)
    return f"; did you mean {close[0]}?" if close else " (see --help)"
