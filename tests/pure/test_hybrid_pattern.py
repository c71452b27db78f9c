"""--hybrid-layer-pattern: what each rank builds is said, what follows from it is set, what does not fit is one
sentence."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.flags import core_versions
from spare_megatron.flags.hybrid_pattern import HybridPattern, divided, read_pattern
from spare_megatron.worker.flops import flops_per_step
from spare_megatron.worker.job_arguments import JobArguments, parse_job
from tests.pure.flags_of_a_job import SMALL, without

PP2 = "--pipeline-model-parallel-size 2"
EXPERTS = "--num-experts 4 --disable-bias-linear"


def hybrid(extra: str, pattern: str = "*-*-") -> tuple[JobArguments, Namespace]:
    words = [*without(SMALL.split(), "--num-layers"), "--transformer-impl", "local", "--hybrid-layer-pattern", pattern]
    return parse_job([*words, *extra.split()])


@pytest.fixture(autouse=True)
def newest_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags are those of the newest megatron-core, whichever is installed."""
    monkeypatch.setattr(core_versions, "installed", lambda: max(core_versions.tables()))


@pytest.mark.parametrize(
    ("pattern", "flags", "reported"),
    [
        ("*-*-", "", "1 stage on each of 1 rank; layers of the stages: *-*-"),
        ("*-*E", f"{EXPERTS} {PP2}", "1 stage on each of 2 ranks; layers of the stages: *-, *E"),
        ("*-|*-|*|-", PP2, "2 stages on each of 2 ranks; layers of the stages: 2 x *-, *, -"),
        ("*-*|-", PP2, "1 stage on each of 2 ranks; layers of the stages: *-*, -"),
        ("*-*--", f"{PP2} --decoder-first-pipeline-num-layers 1",
         "1 stage on each of 2 ranks; layers of the stages: *, -*--"),
        ("*-/*-/*-", "--position-embedding-type rope",
         "1 stage on each of 1 rank; layers of the stages: *-, and *- for each of 2 more predicted tokens"),
    ],
)  # fmt: skip
def test_what_each_rank_builds_is_said(pattern: str, flags: str, reported: str) -> None:
    job, namespace = hybrid(flags, pattern)
    assert f"--hybrid-layer-pattern: {reported}" in job.notes
    main, *more = pattern.split("/")
    assert namespace.num_layers == namespace.encoder_num_layers == len(main.replace("|", ""))
    assert (namespace.mtp_num_layers or 0) == len(more)
    assert job.transformer["is_hybrid_model"] is True
    assert job.settings(64).hybrid_layer_pattern == pattern


def test_stages_without_bars_are_even_but_for_their_ends() -> None:
    assert divided("*-*-*-", 3) == ("*-", "*-", "*-")
    assert divided("*-*-*-", 3, 1, 3) == ("*", "-*", "-*-")
    assert divided("*-*-", 2, last=1) == ("*-*", "-")
    assert read_pattern("M-|*E/*-/*-") == HybridPattern(("M-", "*E"), "*-", 2)
    assert read_pattern("*-/").predicted == 0


def test_older_names_mean_the_same() -> None:
    words = [*without(SMALL.split(), "--num-layers"), "--transformer-impl", "local"]
    older = ["--is-hybrid-model", "--hybrid-override-pattern", "*-*-", "--num-layers", "4"]
    predicted = ["--mtp-hybrid-override-pattern", "*-", "--mtp-num-layers", "2", "--position-embedding-type", "rope"]
    job, namespace = parse_job([*words, *older, *predicted])
    assert namespace.hybrid_layer_pattern == "*-*-/*-/*-"
    assert job.transformer["mtp_hybrid_override_pattern"] is None


def test_numbers_that_differ_from_the_pattern_are_notified() -> None:
    job, namespace = hybrid("--num-layers 9 --mtp-num-layers 2 --position-embedding-type rope", "*-*-/*-")
    assert (namespace.num_layers, namespace.mtp_num_layers) == (4, 1)
    assert "--num-layers 9: the 4 layers of --hybrid-layer-pattern count, as in Megatron" in job.notes
    assert "--mtp-num-layers 2: the 1 of --hybrid-layer-pattern count, as in Megatron" in job.notes


@pytest.mark.parametrize(
    ("pattern", "flags", "reported"),
    [
        ("*-x", "", "has 'x'; layers are M (Mamba), G (gated delta net), * (attention), + (multi-latent attention)"),
        ("|", "", "has no layers; give them as in '*-*-'"),
        ("*-/*|-", "", "has '|'; layers are "),
        ("*-/*-/**", "", "predicts tokens by different layers, '*-' and '**'"),
        ("*-", "--mtp-num-layers 1", "needs the layers that predict tokens in {}, behind a / for each, as in '*-/*-'"),
        ("*-|*-|*-", PP2, f"has 3 stages, not a multiple of {PP2}; use 4 stages"),
        ("*-*", PP2, "the 3 layers of {} cannot be divided over " + f"{PP2}; mark"),
        ("*-|*-", f"{PP2} --decoder-first-pipeline-num-layers 1", "--decoder-first-pipeline-num-layers does not go"),
        ("*-|*-", f"{PP2} --pipeline-model-parallel-layout Et|tL", "--pipeline-model-parallel-layout does not go with"),
        ("*-*E", "", "has layers with experts (E); say how many there are"),
        ("*+", "", "has attention of two kinds, * and +"),
        ("*D", "", "has sparse attention (D), which is not supported"),
        ("*-", "--use-rope-scaling --position-embedding-type rope", "HybridModel cannot scale so"),
        ("*-", "--hybrid-override-pattern **", "is the older name of {}; give one of them"),
        ("*-", "--mtp-hybrid-override-pattern *-", "is an older form of parts behind /"),
        ("M-", "", "Mamba layers (M) of {} needs mamba-ssm, which is not on this machine; pip install mamba-ssm on"),
        ("G-", "", "(G) of {} needs flash-linear-attention, which is not on this machine; pip install"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_sentence(pattern: str, flags: str, reported: str) -> None:
    with pytest.raises(ConfigError) as error:
        hybrid(flags, pattern)
    assert reported.replace("{}", "--hybrid-layer-pattern") in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("flag", ["--is-hybrid-model", "--spec my_module my_spec"])
def test_flags_of_hybrid_models_need_the_layers(flag: str) -> None:
    with pytest.raises(
        ConfigError, match=r"is taken for hybrid models only; write out the layers with --hybrid-layer-pat"
    ):
        parse_job([*SMALL.split(), *flag.split()])


def test_an_older_core_is_notified_which_one_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_versions, "installed", lambda: (0, 16))
    with pytest.raises(
        ConfigError, match=r"--hybrid-layer-pattern needs megatron-core 0\.19 or later, which is not on"
    ):
        hybrid("")


def test_the_check_lists_what_layers_need(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        hybrid("--spare-check", "MG")
    assert left.value.code == 0
    out = capsys.readouterr().out
    for needed in ("mamba-ssm", "einops", "flash-linear-attention", "transformer-engine"):
        assert f"  {needed}, for " in out


def test_a_hybrid_model_of_a_gpts_layers_is_counted_as_that_gpt() -> None:
    gpt = flops_per_step(parse_job([*SMALL.split(), "--transformer-impl", "local", "--padded-vocab-size", "1024"])[1])
    same = flops_per_step(hybrid("--padded-vocab-size 1024", "*-" * 4)[1])
    assert same == gpt
    assert flops_per_step(hybrid("--padded-vocab-size 1024", "*-" * 5)[1]) > gpt


def test_a_checkpoints_pattern_counts_and_a_gpts_has_none(tmp_path: Path) -> None:
    from tests.pure.test_checkpoint_args import checkpoint, job_of

    checkpoint(tmp_path / "hybrid", hybrid_layer_pattern="*-*-", num_layers=4)
    _, namespace = job_of(tmp_path / "hybrid", "--transformer-impl local")
    assert (namespace.hybrid_layer_pattern, namespace.num_layers) == ("*-*-", 4)
    checkpoint(tmp_path / "older", hybrid_override_pattern="*-*-", num_layers=4, is_hybrid_model=True)
    assert job_of(tmp_path / "older", "--transformer-impl local")[1].hybrid_layer_pattern == "*-*-"
    checkpoint(tmp_path / "gpt")
    _, namespace = job_of(tmp_path / "gpt", f"--transformer-impl local --hybrid-layer-pattern {'*-' * 4}")
    assert (namespace.hybrid_layer_pattern, namespace.num_layers) == ("*-" * 4, 8)
