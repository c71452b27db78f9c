"""From flags to a job: shape, place, schedule, and one sentence for everything that does not go together."""

from __future__ import annotations

import os

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.shape import JobShape
from spare_megatron.flags import check, resolve
from spare_megatron.worker.job_arguments import JobArguments
from tests.pure.flags_of_a_job import job_of, launched


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without CUDA and without optional packages, whatever this one has."""
    monkeypatch.setattr(check, "has_cuda", lambda: False)
    monkeypatch.setattr(check, "has_package", lambda _: lambda: False)


BAD = [
    # flags behind those of the small job, what the sentence must say
    ("--global-batch-size 6", "--global-batch-size 6 is not divisible by 4 .* use --global-batch-size 4 or 8"),
    ("--global-batch-size 2", "--global-batch-size 2 is not divisible by 4 .* use --global-batch-size 4"),
    ("--micro-batch-size 0", "--micro-batch-size is 0, but must be at least 1"),
    ("--hidden-size 66", "--hidden-size 66 is not divisible by --num-attention-heads 4; use --hidden-size 64"),
    ("--num-attention-heads 6 --kv-channels 8 --tensor-model-parallel-size 4", "6 is not divisible by .* 4; use .* 8"),
    ("--ffn-hidden-size 101 --tensor-model-parallel-size 2", "--ffn-hidden-size 101 is not divisible"),
    ("--num-layers 5 --pipeline-model-parallel-size 2", "5 layers cannot be divided by 2 = .*; use --num-layers 4"),
    ("--num-layers 0", "--num-layers is 0, but must be at least 1"),
    (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
        "4 layers cannot be divided by 6 = .* use --num-layers 6",
    ),
    ("--num-virtual-stages-per-pipeline-rank 2", "2 virtual stages need --pipeline-model-parallel-size of at least 2"),
    (
        "--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 1",
        "say the same thing; give one of them",
    ),
    ("--group-query-attention --num-query-groups 3", "4 is not divisible by --num-query-groups 3"),
    (
        "--group-query-attention --num-query-groups 3 --tensor-model-parallel-size 2",
        "--num-query-groups 3 is neither a multiple nor a divisor of --tensor-model-parallel-size 2",
    ),
    ("--seq-length 65", "--max-position-embeddings 64 is less than --seq-length 65; use --max-position-embeddings 65"),
    ("--seq-length 63 --sequence-parallel --tensor-model-parallel-size 2", "--seq-length 63 is not divisible by"),
    ("--seq-length 62 --context-parallel-size 2", "--seq-length 62 is not divisible by 4 = 2 x"),
    ("--swiglu --squared-relu", "--swiglu and --squared-relu are two activations"),
    ("--swiglu --hidden-size 16", "--hidden-size 16 in multiples of 64, which is 0; give --ffn-hidden-size, or use"),
    ("--no-position-embedding", "--no-position-embedding is only for rotary embeddings"),
    ("--expert-model-parallel-size 2", "--expert-model-parallel-size 2 needs a model with experts"),
    ("--num-experts 3 --expert-model-parallel-size 2 --global-batch-size 8", "--num-experts 3 is not divisible by"),
    ("--position-embedding-type yarn", "yarn needs --yarn-original-max-position-embeddings, .*; give it"),
    (
        "--position-embedding-type yarn --multi-latent-attention",
        "does not go with --multi-latent-attention; use --position-embedding-type rope --rope-type yarn",
    ),
    ("--num-experts 2 --moe-router-topk 4", "--moe-router-topk 4 is more than --num-experts 2"),
    ("--num-experts 2 --moe-layer-freq [1]*3", "--moe-layer-freq has 3 entries, but the model has 4 layers"),
    ("--num-experts 2 --moe-layer-freq often", "--moe-layer-freq is 'often', but takes"),
    ("--num-experts 2 --tensor-model-parallel-size 2", "need --sequence-parallel; add it"),
    ("--num-experts 4 --moe-shared-expert-intermediate-size 64", "have no biases in megatron-core; add --disable-bias"),
    ("--num-experts 2 --moe-router-load-balancing-type aux_loss seq_aux_loss", "give one coefficient for each loss"),
    (
        "--num-experts 2 --disable-bias-linear --moe-router-load-balancing-type global_aux_loss",
        "global_aux_loss is not supported",
    ),
    (
        "--num-experts 4 --expert-model-parallel-size 2 --spare-inner-data-parallel 3",
        "inner data parallelism 3 leaves no room .* use --spare-inner-data-parallel 2",
    ),
    ("--decoder-first-pipeline-num-layers 0", "--decoder-first-pipeline-num-layers is 0, but must be at least 1"),
    (
        "--decoder-last-pipeline-num-layers 1",
        "--num-layers 4 leave 3 layers for 0 other stages of --pipeline-model-parallel-size 1",
    ),
    ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2", "leave 2 layers for 3 other stages"),
    ("--moe-router-enable-expert-bias", "does not go with --moe-router-score-function softmax; use sigmoid"),
    ("--moe-router-load-balancing-type aux_loss none", "give one coefficient for each loss"),
    (
        "--multi-latent-attention --rotary-interleaved",
        "--rotary-interleaved does not go with --multi-latent-attention; leave it out",
    ),
    ("--use-te-activation-func", "add --no-bias-gelu-fusion"),
    ("--use-te-activation-func --swiglu", "add --no-bias-swiglu-fusion"),
    ("--use-te-activation-func --squared-relu", "--use-te-activation-func has no --squared-relu"),
    ("--use-te-activation-func --quick-geglu", "--use-te-activation-func has no --quick-geglu"),
    ("--moe-pad-expert-input-to-capacity", "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor"),
    (
        "--num-experts 4 --disable-bias-linear --moe-expert-capacity-factor 1.0 "
        "--moe-router-load-balancing-type sinkhorn",
        "--moe-expert-capacity-factor 1.0 is not for --moe-router-load-balancing-type sinkhorn",
    ),
    ("--moe-router-group-topk 1", "--moe-router-group-topk 1 needs --num-experts and --moe-router-num-groups"),
    (
        "--num-experts 4 --disable-bias-linear --moe-router-group-topk 1 --moe-router-num-groups 3",
        "--moe-router-num-groups 3 does not divide --num-experts 4",
    ),
    ("--moe-ffn-hidden-size 64", "--moe-ffn-hidden-size 64 is only for models with experts"),
    ("--num-experts 2 --moe-ffn-hidden-size 0", "--moe-ffn-hidden-size is 0, but must be at least 1"),
    ("--moe-router-padding-for-fp8", "only for --fp8-format; leave it out"),
    ("--fp8-param-gather", "--fp8-param-gather is only for --fp8-format"),
    (f"--load {'a' * 300}", "--load a+ cannot be read: File name too long"),
    ("--fp16 --bf16", "--fp16 and --bf16 are two precisions"),
    ("--fp16-lm-cross-entropy", "only for --fp16"),
    ("--min-lr 0.5", "--min-lr 0.5 is above --lr 0.001"),
    ("--lr 0", "--lr is 0.0, but must be above 0"),
    ("--train-samples 100", "--train-iters 20 and --train-samples 100 both end the job"),
    ("--lr-warmup-samples 100", "--lr-warmup-samples 100 does not go with --train-iters; use --lr-warmup-iters"),
    ("--lr-warmup-iters 20", "is not shorter than"),
    ("--lr-warmup-fraction 0.1 --lr-warmup-iters 5", "say the same thing"),
    ("--lr-decay-style WSD", "--lr-decay-style WSD needs the length of its last phase"),
    ("--weight-decay-incr-style linear", "needs --start-weight-decay and --end-weight-decay"),
    ("--hidden-dropout 1.0", "--hidden-dropout is 1.0, but must be in 0 <= x < 1"),
    ("--log-interval 0", "--log-interval is 0, but must be at least 1"),
    ("--eval-iters -2", "--eval-iters is -2, but must not be negative; 0 or -1 evaluates nothing"),
    ("--recompute-granularity full", "needs --recompute-method uniform or block"),
    ("--recompute-granularity selective --recompute-modules mlp", "add --disable-bias-linear"),
    ("--recompute-granularity selective --recompute-modules layernorm", "needs transformer-engine"),
    ("--apply-layernorm-1p", "--apply-layernorm-1p needs transformer-engine"),
    ("--no-initialization", "--no-initialization leaves the weights undefined"),
    ("--num-experts 2 --disable-bias-linear --moe-router-topk 1", "add --moe-router-pre-softmax"),
    ("--save ckpt", "--save ckpt needs --save-interval"),
    ("--save ckpt --save-interval 0", "--save-interval is 0, but must be at least 1"),
    ("--exit-on-missing-checkpoint", "--exit-on-missing-checkpoint needs --load"),
    (
        "--mtp-num-layers 1",
        "--mtp-num-layers 1 does not go with --position-embedding-type learned_absolute: .*; use rope",
    ),
    ("--mtp-num-layers -1", "--mtp-num-layers is -1, but must be at least 0"),
    ("--mtp-num-layers 64 --position-embedding-type rope", "leaves no token of --seq-length 64 to predict"),
    (
        "--mtp-num-layers 1 --position-embedding-type rope --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 2",
        "needs --recompute-num-layers 1 with --recompute-method uniform",
    ),
    ("--data-path a", "--mock-data and --data-path are different sources of data"),
    ("--make-vocab-size-divisible-by 0", "must be at least 1"),
    ("--vocab-size 0", "--vocab-size is 0, but must be at least 1"),
    ("--spare-redundancy 5", "--spare-redundancy 5 is not between 1 and the 4 groups .* use --spare-redundancy 4"),
    ("--spare-redundancy 0", "--spare-redundancy 0 is not between 1 and the 4 groups .* use --spare-redundancy 1"),
    ("--spare-standby-groups -1", "--spare-standby-groups is -1, but must not be negative"),
    (
        "--spare-standby-groups 2 --spare-max-group-restarts 0",
        "--spare-standby-groups 2 is for groups that come back, but --spare-max-group-restarts is 0",
    ),
    ("--spare-min-groups 9", "--spare-min-groups 9 is not between 1 and the 4 groups"),
    ("--spare-heartbeat-timeout-s 0", "must be above 0"),
    ("--spare-progress-timeout-s 1", "--spare-progress-timeout-s 1 s must be above --spare-heartbeat-timeout-s 5 s"),
    ("--spare-relief", "and --spare-schedule core begins all at once; add --spare-schedule tickets"),
    (
        "--spare-relief --spare-schedule tickets --spare-granularity shard",
        "with --spare-granularity shard only whole shards move; leave one of them out",
    ),
    ("--spare-audit-rate 2", "--spare-audit-rate is 2.0, but must be in 0 <= x <= 1"),
    (
        "--spare-audit-rate 0.1 --spare-reduce fp32",
        "compares checksums, which .* fp32 do not have; use --spare-reduce exa",
    ),
    (
        "--spare-audit-rate 0.1 --spare-redundancy 1",
        "needs a second group with each piece's data, .* use 3, with which",
    ),
    ("--num-distributed-optimizer-instances 3", "means 3 groups, but the job has 4"),
    ("--rampup-batch-size 1 1 10", "the batch size 1 is not a multiple of 4, .*; use multiples of 4, or begin at 4"),
    ("--fp8-format hybrid --spare-reduce exact", "--spare-reduce exact does not go with --fp8-format hybrid: "),
    ("--eval-global-batch-size 8", "--eval-global-batch-size 8 is not the training's 4: .* leave it out or use 4"),
    ("--transformer-impl transformer_engine", "needs transformer-engine, which is not on this machine"),
    ("--window-size 5", "--window-size is '5', but takes two numbers"),
    ("--pipeline-model-parallel-layout E|t|L --pipeline-model-parallel-size 2", "has 3 stages, not a multiple of"),
]


@pytest.mark.parametrize(("extra", "sentence"), BAD)
def test_what_does_not_go_together_is_one_sentence(extra: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        job_of(extra, launched(4))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("drop", "sentence"),
    [
        ("--num-layers", "--num-layers is missing; give it, as in --num-layers 24"),
        ("--seq-length", "--seq-length is missing"),
        ("--max-position-embeddings", "--max-position-embeddings is missing; .* 64"),
        ("--micro-batch-size", "--micro-batch-size is missing"),
        ("--train-iters", "neither --train-iters nor --train-samples is given"),
        ("--lr", "--lr is missing"),
        ("--tokenizer-type", "--tokenizer-type is missing"),
        ("--vocab-size", "NullTokenizer needs --vocab-size"),
    ],
)
def test_what_a_job_cannot_do_without(drop: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        job_of(drop=(drop,))


def test_data_are_missed_by_who_reads_the_data_flags(capsys: pytest.CaptureFixture[str]) -> None:
    from spare_megatron.training.utils import get_blend_and_blend_per_split

    _, args = job_of(drop=("--mock-data",))
    with pytest.raises(ConfigError, match="there is no data; give --data-path PREFIX or --mock-data"):
        get_blend_and_blend_per_split(args)
    with pytest.raises(SystemExit):
        job_of("--spare-check", drop=("--mock-data",))
    assert "data from the script's own provider" in capsys.readouterr().out


def shape(environ: dict[str, str], extra: str = "") -> JobShape:
    return job_of(extra, environ)[0].shape


def test_number_of_groups_from_each_launcher() -> None:
    two = "--pipeline-model-parallel-size 2"
    assert shape(launched(3), two).num_groups == 3
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "SPARE_GROUP": "2", "SPARE_NUM_GROUPS": "5"}
    job = job_of(two, torchrun)[0]
    assert (job.shape.num_groups, job.place.group, job.place.position, job.place.launcher) == (5, 2, 1, "torchrun")
    assert (job.place.saves_into("runs/save"), job.place.saves_into(None)) == (os.path.abspath("runs/save"), "")
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_RESTART_COUNT": "1"}
    job = job_of(two, slurm)[0]
    assert job.place.local_rank == 1
    assert job.place.saves_into("runs/save") == "", "spare-slurm keeps other jobs out"
    assert (job.shape.num_groups, job.place.group, job.place.position, job.place.incarnation) == (4, 2, 1, 1)
    assert shape({}, two).num_groups == 1
    assert shape({}, two + " --num-distributed-optimizer-instances 4").num_groups == 4


def test_what_a_shim_makes_run_needs_transformer_engine_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _, biased = job_of("--num-experts 2")
    _, latent = job_of("--multi-latent-attention")
    assert not [*check.engine_only(biased), *check.engine_only(latent)]
    latent.tensor_model_parallel_size = 2  # gradients are wrong there without CUDA
    assert [why for why, _ in check.engine_only(latent)] == [
        "--multi-latent-attention with --tensor-model-parallel-size 2"
    ]
    monkeypatch.setattr(check, "has_cuda", lambda: True)
    assert list(check.engine_only(biased)) == [("--num-experts with biases", "add --disable-bias-linear")]
    assert [why for why, _ in check.engine_only(latent)] == ["--multi-latent-attention"]


def test_inner_data_ranks() -> None:
    experts = "--num-experts 4 --disable-bias-linear --expert-model-parallel-size 2"
    assert shape(launched(2), experts).inner_data == 2
    assert shape(launched(2), experts + " --spare-inner-data-parallel 4").inner_data == 4
    assert shape(launched(2), experts + " --spare-inner-data-parallel auto").inner_data == 2
    sequence = " --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
    assert shape(launched(2), experts + sequence).inner_data == 1
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    assert shape(slurm, "--num-distributed-optimizer-instances 2").inner_data == 4
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "SPARE_GROUP": "0", "SPARE_NUM_GROUPS": "3"}
    assert shape(torchrun).inner_data == 2


@pytest.mark.parametrize(
    ("environ", "extra", "sentence"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4"}, "", "torchrun started 4 ranks but SPARE_GROUP is not set"),
        (
            {"RANK": "0", "WORLD_SIZE": "3", "SPARE_GROUP": "0", "SPARE_NUM_GROUPS": "2"},
            "--pipeline-model-parallel-size 2",
            "torchrun started 3 ranks for this group, but .* are 2; use",
        ),
        ({"RANK": "0", "WORLD_SIZE": "1", "SPARE_GROUP": "0"}, "", "SPARE_GROUP is set but SPARE_NUM_GROUPS is not"),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "7"},
            "--pipeline-model-parallel-size 2",
            "the number of started ranks, 7, is not a multiple of the 2 of a group .* start 8",
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SPARE_NUM_GROUPS": "3"},
            "--pipeline-model-parallel-size 2",
            "SPARE_NUM_GROUPS is 3, but 8 ranks are 4 groups of 2; start 6 ranks or set SPARE_NUM_GROUPS=4",
        ),
        (launched(2, group=2), "", "this rank's group is 2, but a job of 2 groups has groups 0 to 1"),
        (launched(2, position=1), "", "this rank's position is 1, but a group of 1 ranks"),
        ({**launched(2), "SPARE_GROUP": "x"}, "", "SPARE_GROUP is 'x', but must be a number"),
        ({**launched(2), "SPARE_GROUP": "-1"}, "", "SPARE_GROUP is -1, but must not be negative"),
        ({"SPARE_POSITION": "0"}, "", "SPARE_POSITION is set but SPARE_NUM_GROUPS is not"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "SPARE_GROUP": "0", "SPARE_NUM_GROUPS": "2"},
            "--spare-standby-groups 1",
            "--spare-standby-groups 1 is for spare-launch, which has not started this rank: .* leave it out",
        ),
    ],
)
def test_a_bad_environment_is_one_sentence(environ: dict[str, str], extra: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        job_of(extra, environ)


def test_who_waits_for_a_place_is_as_a_rank_of_group_0() -> None:
    standby = {name: text for name, text in launched(3, position=1).items() if name != "SPARE_GROUP"}
    standby |= {"SPARE_PLACE_FILE": "run/standbys/standby-4.json"}
    place = job_of("--pipeline-model-parallel-size 2 --spare-standby-groups 1", standby)[0].place
    assert (place.group, place.position, place.home) == (0, 1, "standby 4")
    place = job_of("--pipeline-model-parallel-size 2", launched(3, group=2))[0].place
    assert (place.home, place.place_file) == ("group 2", "")


def test_what_megatron_derives() -> None:
    job, ns = job_of("--swiglu --position-embedding-type rope --disable-bias-linear", launched(2))
    assert (ns.ffn_hidden_size, ns.kv_channels, ns.encoder_seq_length, ns.global_batch_size) == (128, 16, 64, 2)
    assert (ns.world_size, ns.rank, ns.data_parallel_size, ns.num_layers) == (2, 0, 2, 4)
    transformer = job.transformer
    assert transformer["activation_func"] == "silu"
    assert transformer["gated_linear_unit"] is True
    assert transformer["add_bias_linear"] is False
    assert transformer["num_query_groups"] is None
    assert job.settings(1024).position_embedding_type == "rope"
    assert job.redundancy == 2
    assert job_of()[0].redundancy == 1


def test_experts_patterns_and_several_losses() -> None:
    experts = "--num-experts 4 --disable-bias-linear "
    extra = experts + "--moe-layer-freq ([0]+[1])*2 --moe-router-load-balancing-type aux_loss seq_aux_loss"
    fields = job_of(extra + " --moe-aux-loss-coeff 0.1 0.2")[0].transformer
    assert fields["moe_layer_freq"] == [0, 1, 0, 1]
    assert fields["moe_router_load_balancing_type"] == ["aux_loss", "seq_aux_loss"]
    assert fields["moe_aux_loss_coeff"] == [0.1, 0.2]
    assert (fields["num_moe_experts"], fields["moe_ffn_hidden_size"]) == (4, 256)
    assert job_of("--num-experts 4 --disable-bias-linear")[0].transformer["moe_layer_freq"] == 1


@pytest.mark.parametrize("text", ["__import__('os')", "[1]*10**9", "1+'a'", "[1", "[1]*1000000000", "'x'*3", "-1"])
def test_a_pattern_is_no_program(text: str) -> None:
    with pytest.raises(ConfigError):
        resolve.pattern("--moe-layer-freq", text)


def schedule(job: JobArguments) -> tuple[object, ...]:
    names = ("lr_warmup_steps", "lr_decay_steps", "wd_incr_steps", "wsd_decay_steps")
    return tuple(job.scheduler[name] for name in names)


def test_the_schedule_counts_samples_as_megatron_does() -> None:
    batch = " --global-batch-size 8"
    assert schedule(job_of(batch)[0]) == (0, 160, 160, None)
    assert schedule(job_of(batch + " --lr-warmup-iters 2 --lr-decay-iters 10")[0]) == (16, 80, 160, None)
    assert schedule(job_of(batch + " --lr-warmup-fraction 0.25")[0]) == (40.0, 160, 160, None)
    assert schedule(job_of(batch + " --lr-decay-style WSD --lr-wsd-decay-iters 5")[0]) == (0, 160, 160, 40)
    samples = batch + " --train-samples 100 --lr-warmup-samples 10 --lr-decay-samples 90"
    job = job_of(samples, drop=("--train-iters",))[0]
    assert (schedule(job), job.train_iters) == ((10, 90, 100, None), 12)


def test_a_check_lists_what_is_missing_and_refuses_nothing_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    extra = (
        "--spare-check --context-parallel-size 2 --data-path nowhere/data --attention-backend flash "
        "--tensor-model-parallel-size 2 --sequence-parallel"
    )
    with pytest.raises(SystemExit) as left:
        job_of(extra, launched(4), drop=("--mock-data",))
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert "4 groups of 4 ranks (TP 2 x PP 1 x CP 2 x inner data 1), 16 ranks" in text
    assert "transformer-engine, for --context-parallel-size 2 (not here)" in text
    assert "nowhere/data.bin (not here)" in text
    assert "hidden_size = 64" in text


def test_a_check_lists_data_that_an_empty_variable_of_a_script_was_to_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        job_of("--spare-check --data-path --train-iters 3", drop=("--mock-data",))
    assert left.value.code == 0
    assert "  data files, for --data-path, which names none (not here)\n" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--data-path has no words; give the prefixes of data files"):
        job_of("--data-path --train-iters 3", drop=("--mock-data",))


def test_a_check_refuses_what_no_machine_can_run() -> None:
    with pytest.raises(ConfigError, match="needs transformer-engine's attention"):
        job_of("--spare-check --context-parallel-size 2 --transformer-impl local", launched(4))
