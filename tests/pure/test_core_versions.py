"""A flag that only some versions of megatron-core have is known everywhere, listed by the check, refused by a job."""

from __future__ import annotations

import argparse

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.flags import core_versions
from spare_megatron.flags.specs import core_table
from spare_megatron.megatron_adapter.versions import minor_of
from spare_megatron.worker.job_arguments import MIXED_FIELDS, parse_job
from tests.pure.flags_of_a_job import SMALL, job_of


@pytest.fixture
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The version of megatron-core that is said to be installed."""
    version: str = request.param
    monkeypatch.setattr(core_versions, "core_version", lambda: version)
    monkeypatch.setattr("spare_megatron.flags.check.check_core_version", lambda _: version)
    monkeypatch.setattr("spare_megatron.flags.check.has_package", lambda _: lambda: True)
    monkeypatch.setattr("spare_megatron.flags.check.has_cuda", lambda: True)
    return version


def test_there_is_a_table_for_each_version_and_each_has_what_flags_are_made_of() -> None:
    assert list(core_versions.tables()) == [(0, 16), (0, 17), (0, 18), (0, 19)]
    for minor, table in core_versions.tables().items():
        assert minor_of(table["megatron_core"]) == minor
        assert len(table["fields"]) > 300
        assert {row["class"] for row in table["fields"]} == {
            *("TransformerConfig", "MLATransformerConfig", "OptimizerConfig", "DistributedDataParallelConfig")
        }


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_layers", 4, ""),
        ("fused_residual_rmsnorm", True, "megatron-core 0.17 or later"),
        ("use_transformer_engine_op_fuser", True, "megatron-core 0.18 or later"),
        ("flash_attention_version", 3, "megatron-core 0.19 or later"),
        ("moe_extended_tp", True, "megatron-core 0.16 or earlier"),
        ("muon_use_nesterov", True, "megatron-core 0.17 or earlier"),
        ("moe_router_score_function", "sigmoid", ""),
        ("moe_router_score_function", "sqrtsoftplus", "megatron-core 0.18 or later"),
        ("experimental_attention_variant", "gdn2", "a megatron-core later than 0.19"),
    ],
)
def test_who_has_a_field_or_a_value_is_said(field: str, value: object, words: str) -> None:
    assert core_versions.in_words(core_versions.versions_with(field, value)) == words


@pytest.mark.parametrize(
    ("version", "minor"), [("0.15.0", (0, 16)), ("0.16.1", (0, 16)), ("0.18.3", (0, 18)), ("0.21.0rc1", (0, 19))]
)
def test_a_version_without_a_table_has_that_of_the_nearest_older_one(
    monkeypatch: pytest.MonkeyPatch, version: str, minor: tuple[int, int]
) -> None:
    monkeypatch.setattr(core_versions, "core_version", lambda: version)
    assert core_versions.installed() == minor


@pytest.mark.parametrize("core", ["0.16.1", "0.17.0"], indirect=True)
def test_the_check_lists_the_version_that_a_flag_needs_and_a_job_is_refused(
    core: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--use-transformer-engine-op-fuser --moe-router-score-function sqrtsoftplus"
    with pytest.raises(SystemExit) as left:
        job_of(f"{words} --spare-check")
    assert left.value.code == 0
    needs = capsys.readouterr().out.partition("the job needs:")[2]
    assert "  megatron-core 0.18 or later, for --use-transformer-engine-op-fuser (not here)\n" in needs
    assert "  megatron-core 0.18 or later, for --moe-router-score-function sqrtsoftplus (not here)\n" in needs
    with pytest.raises(
        ConfigError, match=r"needs megatron-core 0\.18 or later, which is not on this machine; install it"
    ):
        job_of(words)


@pytest.mark.parametrize("core", ["0.16.1", "0.17.0"], indirect=True)
def test_gates_of_heads_whose_query_group_two_ranks_share_need_a_newer_version(core: str) -> None:
    """megatron-core 0.16 gives each of these ranks the gates of both, and its first forward pass fails."""
    words = "--attention-output-gate --group-query-attention --tensor-model-parallel-size 2 --num-query-groups"
    job_of(f"{words} 2")
    if core == "0.17.0":
        job_of(f"{words} 1")
        return
    sentence = (
        "^--attention-output-gate with --num-query-groups 1 and --tensor-model-parallel-size 2 needs megatron-core "
        r"0\.17 or later, which is not on this machine; install it, or use --tensor-model-parallel-size 1$"
    )
    with pytest.raises(ConfigError, match=sentence):
        job_of(f"{words} 1")


@pytest.mark.parametrize("core", ["0.16.1", "0.18.0", "0.19.2"], indirect=True)
def test_a_config_gets_exactly_the_fields_that_its_megatron_core_has(core: str) -> None:
    newer = core != "0.16.1"
    job, _ = job_of("--use-transformer-engine-op-fuser" if newer else "")
    known = {row["field"] for row in core_table()["fields"]}
    assert job.transformer.get("use_transformer_engine_op_fuser") == (True if newer else None)
    assert ("moe_extended_tp" in job.transformer) == (not newer)
    assert set(job.optimizer) <= known
    assert set(job.ddp) <= known
    assert set(job.transformer) - known <= {*MIXED_FIELDS, "cp_comm_type", "cuda_graph_scope"}


def test_the_namespace_has_what_tokenizers_of_newer_versions_read() -> None:
    _, namespace = job_of("--tokenizer-hf-use-fast --tokenizer-special-tokens <a> <b> --tokenizer-metadata about.json")
    assert (namespace.tokenizer_hf_no_use_fast, namespace.tokenizer_hf_no_include_special_tokens) == (False, True)
    assert (namespace.special_tokens, namespace.metadata_path) == (["<a>", "<b>"], "about.json")
    assert (namespace.pad_vocab_size, namespace.chat_template) == (False, None)


def test_a_scripts_own_flags_of_these_names_are_its_own() -> None:
    def own(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--special-tokens", type=int, default=3)
        parser.add_argument("--metadata-path")
        return parser

    _, namespace = parse_job([*SMALL.split(), "--special-tokens", "5", "--metadata-path", "here"], {}, own)
    assert (namespace.special_tokens, namespace.metadata_path, namespace.pad_vocab_size) == (5, "here", False)


def test_flags_of_the_small_job_need_no_other_version() -> None:
    from spare_megatron.flags.check import other_cores
    from spare_megatron.flags.parser import parse

    assert list(other_cores(parse(SMALL.split()))) == []
