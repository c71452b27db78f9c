"""Flags of what a job decides itself: what they become, and what is refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.place import Place, place_of
from spare_megatron.worker.saved_choice import FILE, leave_choice, redundancy_of
from tests.pure.flags_of_a_job import job_of, launched


def place(run_dir: Path, job_attempt: int) -> Place:
    return place_of({**launched(16), "SPARE_LIFE": str(job_attempt)}, 16, 1, str(run_dir))


def test_auto_is_asked_to_the_coordinator() -> None:
    job = job_of("--save s --save-interval auto --spare-mtbf-gpu-hours 700 --spare-restart-after auto")[0]
    tuning = job.tuning
    assert (tuning.save_interval, tuning.mtbf_gpu_hours, tuning.restart_after, tuning.redundancy) == (
        True,
        700.0,
        None,
        True,
    )
    job = job_of("--save s --save-interval 20 --spare-redundancy 1 --spare-restart-after 3")[0]
    fixed = job.tuning
    assert (fixed.save_interval, job.save_every, fixed.redundancy, fixed.restart_after) == (False, 20, False, 3)
    job = job_of("--save s --save-interval 20")[0]
    assert (job.tuning.save_interval, job.save_every, job.tuning.redundancy) == (False, 20, True)
    assert job_of("--save-interval 20")[0].save_every == 0


@pytest.mark.parametrize("words", ["--spare-redundancy auto", "--save-interval auto"])
def test_a_choice_that_cannot_be_made_without_checkpoints_is_said(words: str) -> None:
    job = job_of(words, launched(16))[0]
    (note,) = [note for note in job.notes if note.startswith(f"{words} without --save: ")]
    assert "give --save DIR" in note
    assert not job.tuning.redundancy
    assert not job.tuning.save_interval
    assert not job_of(f"{words} --save s --save-interval 5", launched(16))[0].notes
    assert not job_of("", launched(16))[0].notes


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--save s --save-interval soon", "takes 'auto' or a whole number"),
        ("--save s --save-interval 0", "--save-interval is 0"),
        ("--spare-restart-after 2", "--spare-restart-after 2 needs --save"),
        ("--save s --save-interval 5 --spare-restart-after -1", "--spare-restart-after is -1"),
        ("--spare-mtbf-gpu-hours 0", "--spare-mtbf-gpu-hours is 0.0"),
        ("--spare-mtbf-gpu-hours nan", "takes a finite number, but got 'nan'"),
    ],
)
def test_bad_values(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        job_of(words)


def test_redundancy_auto(tmp_path: Path) -> None:
    """By the number of groups at first, then what an earlier job attempt decided; a rank reads no choice of its own job
    attempt."""
    assert redundancy_of(5, 16, "shared", place(tmp_path, 1)) == 5
    assert redundancy_of(None, 16, "shared", place(tmp_path, 1)) == 16
    assert [redundancy_of(None, n, "staged", place(tmp_path, 1)) for n in (1, 2, 4, 16, 1000)] == [1, 2, 2, 4, 10]
    for job_attempt, r, later in ((1, 4, 7), (2, 7, None)):
        choice = {"redundancy": r, "redundancy_next": later}
        (tmp_path / f"choice-life-{job_attempt}.json").write_text(json.dumps({"choice": choice}))
    assert [redundancy_of(None, 16, "staged", place(tmp_path, job_attempt)) for job_attempt in (1, 2, 3, 4)] == [
        4,
        7,
        7,
        7,
    ]


def test_a_checkpoint_holds_the_newest_choice(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    leave_choice(place(tmp_path, 2), directory)
    assert not (directory / FILE).exists()
    (tmp_path / "choice-life-1.json").write_text(json.dumps({"choice": {"redundancy": 4}}))
    leave_choice(place(tmp_path, 2), directory)
    assert json.loads((directory / FILE).read_text())["choice"] == {"redundancy": 4}


@pytest.mark.parametrize(
    ("environ", "not_run"),
    [
        ({**launched(16), "SPARE_STARTS_AGAIN": "1"}, set()),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SPARE_STARTS_AGAIN": "1"}, set()),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, {"--spare-health-check", "--spare-on-event"}),
        ({}, set()),
    ],
)
def test_a_command_that_this_launcher_does_not_run_is_notified(environ: dict[str, str], not_run: set[str]) -> None:
    notes = job_of("--spare-health-check true --spare-on-event true --spare-preload own", environ)[0].notes
    assert {note.split()[0] for note in notes if "'true' is for spare-launch and spare-slurm" in note} == not_run
    alone = "--spare-preload own: only spare-launch forks ranks; here each makes its own imports"
    assert (alone in notes) == ("SLURM_PROCID" in environ)


def test_only_a_launcher_that_starts_the_job_again_is_asked_for_a_planned_restart() -> None:
    words = "--save s --save-interval auto"
    again = {"SPARE_STARTS_AGAIN": "1"}
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    for environ, after, carried_out in (
        ({**launched(16), **again}, None, True),
        ({**slurm, **again}, 0, True),  # nobody knows how long the queue takes
        (launched(16), None, False),
        (slurm, 0, False),
    ):
        tuning = job_of(words, environ)[0].tuning
        assert (tuning.restart_after, tuning.can_restart) == (after, carried_out)
        job = job_of(f"{words} --spare-restart-after 3", environ)[0]
        assert (job.tuning.restart_after, job.tuning.can_restart) == (3, carried_out)
        assert any(note.startswith("--spare-restart-after 3: ") for note in job.notes) != carried_out
