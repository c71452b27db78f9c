"""Forty command lines that a user gets wrong: each is answered in one line, with the nearest choice that works."""

from __future__ import annotations

import re

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.versions import release
from tests.pure.flags_of_a_job import job_of, launched

# what is typed -> the flag that is meant
TYPOS = {
    "--num-layer 4": "--num-layers",
    "--hidden-siz 64": "--hidden-size",
    "--num-attention-head 4": "--num-attention-heads",
    "--seq-len 64": "--seq-length",
    "--micro-batchsize 1": "--micro-batch-size",
    "--globl-batch-size 8": "--global-batch-size",
    "--train-iter 10": "--train-iters",
    "--lr-warmup-iter 1": "--lr-warmup-iters",
    "--weight-decy 0.1": "--weight-decay",
    "--clip-gradient 1.0": "--clip-grad",
    "--adam-beta-1 0.9": "--adam-beta1",
    "--tensor-parallel-size 2": "--tensor-model-parallel-size",
    "--pipline-model-parallel-size 2": "--pipeline-model-parallel-size",
    "--expert-parallel-size 2": "--expert-model-parallel-size",
    "--use-distributed-optimiser": "--use-distributed-optimizer",
    "--group-query-atention": "--group-query-attention",
    "--bf-16": "--bf16",
    "--save-intervall 10": "--save-interval",
    "--spare-redundency 2": "--spare-redundancy",
    "--spare-reduction fp32": "--spare-reduce",
}
SPLIT = "--use-distributed-optimizer --spare-inner-data-parallel 2 --global-batch-size 8"
# what does not work (on a job of 4 groups, 4 layers, width 64, sequences of 64) -> what the answer must say to do
COMBINATIONS = {
    "--hidden-size 66 --num-attention-heads 4": "use --hidden-size 64 or give --kv-channels",
    "--num-attention-heads 4 --tensor-model-parallel-size 8": "use --num-attention-heads 8",
    "--num-layers 5 --pipeline-model-parallel-size 2": "use --num-layers 4",
    "--global-batch-size 6": "use --global-batch-size 4 or 8",
    "--max-position-embeddings 32": "use --max-position-embeddings 64",
    "--group-query-attention --num-query-groups 3": "use --num-attention-heads 3",
    "--swiglu --squared-relu": "are two activations; give one",
    "--num-layers-per-virtual-pipeline-stage 3 --pipeline-model-parallel-size 2": "use --num-layers 6",
    "--num-virtual-stages-per-pipeline-rank 2": "need --pipeline-model-parallel-size of at least 2",
    "--num-experts 5 --expert-model-parallel-size 2 --disable-bias-linear": "use --num-experts 4",
    "--expert-model-parallel-size 2": "give --num-experts 4",
    "--num-experts 2 --moe-router-topk 3 --disable-bias-linear": "use at most 2",
    "--num-experts 4 --tensor-model-parallel-size 2 --disable-bias-linear": "need --sequence-parallel; add it",
    "--moe-dispatch-fwd-dtype fp8": "leave it out",
    "--rampup-batch-size 4 3 100 --global-batch-size 16": "use multiples of 4, or add --decrease-batch-size-if-needed",
    **({"--optimizer dist_muon": "use --optimizer adam"} if release() < (0, 18) else {}),
    f"--optimizer sgd {SPLIT}": "use --optimizer adam",
    "--spare-state-redundancy 9": "use --spare-state-redundancy 4",
    "--fp8-format hybrid --spare-reduce exact": "use --spare-reduce fp32",
    "--eval-global-batch-size 8": "leave it out or use 4",
}


def answer(extra: str) -> str:
    """What the user sees."""
    with pytest.raises(ConfigError) as error:
        job_of(extra, launched(4))
    return str(error.value)


@pytest.mark.parametrize("typed", TYPOS)
def test_a_typo_is_answered_with_the_flag_that_was_meant(typed: str) -> None:
    assert answer(typed) == f"there is no flag {typed.split()[0]}; did you mean {TYPOS[typed]}?"


@pytest.mark.parametrize("extra", COMBINATIONS)
def test_what_does_not_work_is_answered_in_one_line_with_the_nearest_choice(extra: str) -> None:
    reported = answer(extra)
    assert re.search(re.escape(COMBINATIONS[extra]), reported), reported
    assert "\n" not in reported


def test_forty_of_them() -> None:
    assert len(TYPOS) + len(COMBINATIONS) == 40 - (release() >= (0, 18))
