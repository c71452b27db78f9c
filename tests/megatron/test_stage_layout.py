"""--pipeline-model-parallel-layout is read as megatron-core reads it."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spare_megatron.config.errors import ConfigError
from spare_megatron.flags.stage_layout import STAGES_MAX, stages_of
from spare_megatron.megatron_adapter.shims import install_cpu_shims

LETTER = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
PARTS = st.lists(
    st.one_of(
        st.sampled_from(["E", "t", "m", "L", "|", ","]),
        st.builds(lambda what, n: f"{what}*{n}", st.sampled_from("Etm|"), st.integers(0, 12)),
        st.builds(lambda what, n: f"({what})*{n}", st.text("Etm|,", min_size=1, max_size=5), st.integers(0, 5)),
        st.text("Et|()*3x", max_size=4),
    ),
    max_size=8,
).map("".join)


@given(PARTS)
@example("E*4333")
def test_it_is_read_as_megatron_core_reads_it(text: str) -> None:
    install_cpu_shims()
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    try:
        cores = PipelineParallelLayerLayout.parse_str_to_list(text)
    except AssertionError:
        with pytest.raises(ConfigError, match="a stage is made of E, t, m and L"):
            stages_of(text)
        return
    if any(int(times) > STAGES_MAX for times in re.findall(r"\*(\d+)", text)):
        with pytest.raises(ConfigError, match=f"the most is {STAGES_MAX}"):
            stages_of(text)
        return
    assert stages_of(text) == ["".join(LETTER[layer.name] for layer in stage) for stage in cores]
