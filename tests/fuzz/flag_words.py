"""Command lines of jobs with some flags too many, of every kind of model and optimizer. A job whose flags are
good must get its configuration from the installed megatron-core, and a number that was given is the job's, or a note
says otherwise."""

from __future__ import annotations

import contextlib
import io
import os
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from spare_megatron.config.errors import ConfigError
from spare_megatron.flags import check, core_versions, no_effect, refusals
from spare_megatron.flags.specs import FlagSpec
from spare_megatron.flags.supported import all_specs
from spare_megatron.worker.job_arguments import parse_job
from tests.pure.flags_of_a_job import SMALL, launched, without

ROPE = "--position-embedding-type rope"
MODELS = {
    "gpt": "",
    "llama": f"{ROPE} --swiglu --disable-bias-linear --group-query-attention --num-query-groups 2",
    "experts": "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --moe-grouped-gemm",
    "latent": f"{ROPE} --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 16 --v-head-dim 16",
    "predicting": f"{ROPE} --mtp-num-layers 1",
    "hybrid": "--hybrid-layer-pattern *-*-/*-/*- --position-embedding-type rope",
    "stages": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "inner": "--tensor-model-parallel-size 2 --spare-inner-data-parallel 2 --use-distributed-optimizer",
    "bf16": "--bf16 --spare-reduce exact",
    "muon": "--optimizer muon",
    "lion": "--optimizer lion",
    "soap": "--optimizer soap",
    "ademamix": "--optimizer ademamix --ademamix-alpha-warmup 10",
    "sgd": "--optimizer sgd --sgd-momentum 0.5",
}
OF_NEWER = {"hybrid", "muon", "lion", "soap"}
"""Models that the oldest megatron-core does not have."""
WHOLE = (
    "0",
    "1",
    "2",
    "3",
    "4",
    "7",
    "64",
    "-1",
    "1000000000000",
    "9223372036854775808",
    "1.0",
    "1e3",
    "x",
    "",
    "auto",
)
REAL = ("0", "1", "-1", "0.5", "1e-3", "2", "1e30", "1e309", "nan", "-inf", "x", "")
TEXT = (
    "",
    "x",
    "a,b",
    "1,0",
    "[1]*4",
    "[0,1]*2",
    "([",
    "None",
    "0",
    "2",
    "*-*-",
    "Et*2L|t*2L",
    "\u0661",
    "a" * 300,
    "/dev/null",
)
STOPS = ("--spare-check", "--help", "--version")


@cache
def flags() -> dict[str, FlagSpec | None]:
    """Name -> what the flag is; None for flags that are refused or change nothing."""
    others = dict.fromkeys(sorted({*refusals.refused_names(), *no_effect.taken()}))
    known = {name: spec for spec in all_specs() for name in spec.names}
    return {name: spec for name, spec in {**others, **known}.items() if name not in STOPS}


def _words(name: str) -> st.SearchStrategy[list[str]]:
    spec = flags()[name]
    if spec is None:
        return st.sampled_from([[name], [name, "1"], [name, "x"]])
    if spec.kind in ("on", "off"):
        return st.just([name])
    values = st.sampled_from(
        WHOLE if "int" in spec.kind or "steps" in spec.kind else REAL if spec.kind == "float" else TEXT
    )
    if spec.choices:
        values = st.sampled_from([*map(str, spec.choices), "x"])
    most = 1 if not spec.nargs else spec.nargs if isinstance(spec.nargs, int) else 4
    return st.lists(values, min_size=most if most == 1 else 0, max_size=most).map(lambda given: [name, *given])


HONOURED = st.sampled_from(sorted(name for name, spec in flags().items() if spec is not None))
OTHERS = st.sampled_from(sorted(name for name, spec in flags().items() if spec is None))
CASES = st.tuples(
    st.sampled_from(sorted(MODELS)),
    st.booleans(),
    st.lists(st.one_of(HONOURED, HONOURED, HONOURED, OTHERS).flatmap(_words), max_size=4),
)
"""(kind of model, whether megatron-core is the newest that is known and not the installed one, flags and words)."""


def examine(folder: Path, case: tuple[str, bool, list[list[str]]]) -> None:
    model, newest, given = case
    newest = newest or model in OF_NEWER
    base = [*without(SMALL.split(), *(("--num-layers",) if model == "hybrid" else ())), *MODELS[model].split()]
    words = [*base, *(word for words in given for word in words)]
    installed = core_versions.installed
    machine = check.check_machine
    refusal = None
    if newest:
        core_versions.installed = lambda: max(core_versions.tables())
    asked: list[Any] = []
    check.check_machine = asked.append  # what this machine lacks is another question
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
            job, args = parse_job(words, launched(2))
    except ConfigError as error:
        refusal = str(error)
    finally:
        core_versions.installed, check.check_machine = installed, machine
    assert not os.listdir(folder)
    if refusal is not None:
        assert given
        assert refusal
        assert len(refusal.splitlines()) <= len(given), refusal  # flags that are refused have a line each
        return
    last = {words[0]: words for words in given}
    for name, (_, *values) in last.items():
        spec = flags()[name]
        if spec is not None and spec.kind in ("int", "float") and len(values) == 1 and not spec.nargs:
            wanted = float(values[0])
            found: Any = getattr(args, spec.dest)
            absent = found is None and wanted == 0  # no experts, for instance
            assert found == wanted or absent or any(name in note for note in job.notes), f"{name} is {found}"
    if not newest:
        try:
            machine(asked[0])
        except ConfigError:
            return  # no rank comes so far here
        from spare_megatron.megatron_adapter.model.replica import transformer_config

        transformer_config(job.settings(1024), job.shape)
