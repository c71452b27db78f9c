"""``pretrain`` takes its arguments in the order of any Megatron, and says what is missing."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.core_differences import QuietLogs
from spare_megatron.training import command_line
from spare_megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from spare_megatron.training.command_line import parse_and_validate_args
from spare_megatron.training.model_type import ModelType
from spare_megatron.training.pretrain_call import read_call
from spare_megatron.worker import user_state
from tests.pure.flags_of_a_job import SMALL

KIND = ModelType.encoder_or_decoder


def data(_sizes: Any) -> None: ...


def model() -> None: ...


def forward(_iterator: Any, _model: Any) -> None: ...


def embeddings(_ranks: Any) -> list[int]:
    return [0]


CONTAINER = pretrain_cfg_container_from_args(Namespace(), gpt_config_from_args(Namespace(hybrid_layer_pattern=None)))


@pytest.mark.parametrize(
    ("positional", "named"),
    [
        ((data, model, KIND, forward), {"args_defaults": {"lr": 1.0}}),
        ((data, model, KIND, forward, None, None, {"lr": 1.0}), {}),
        ((CONTAINER, data, model, KIND, forward), {}),
        ((CONTAINER, data, KIND, forward, model), {"store": None, "skip_model_parallel_init": False}),
        ((CONTAINER, data, KIND, forward), {"model_provider": model}),
        (
            (),
            {
                "cfg_container": CONTAINER,
                "train_valid_test_dataset_provider": data,
                "model_type": KIND,
                "forward_step_func": forward,
                "model_provider": model,
            },
        ),
    ],
)
def test_each_order_is_understood(positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    call = read_call(*positional, get_embedding_ranks=embeddings, **named)
    assert (call.datasets_provider, call.model_provider, call.forward_step) == (data, model, forward)
    assert call.get_embedding_ranks is embeddings
    if CONTAINER in (*positional, *named.values()):
        assert call.container is CONTAINER
    else:
        assert (call.container, call.args_defaults) == (None, {"lr": 1.0})


def test_a_container_may_name_the_model() -> None:
    assert read_call(CONTAINER, data, KIND, forward).model_provider is None
    with pytest.raises(ConfigError, match="was given no model: pass model_provider"):
        read_call(pretrain_cfg_container_from_args(Namespace()), data, KIND, forward)


@pytest.mark.parametrize("hook", ["process_non_loss_data_func", "non_loss_data_func", "inprocess_call_wrapper"])
def test_other_hooks_are_refused_by_name(hook: str) -> None:
    for start in ((data, model, KIND, forward), (CONTAINER, data, KIND, forward)):
        with pytest.raises(ConfigError, match=f"was given {hook}, which is not supported"):
            read_call(*start, **{hook: print})


def test_what_fits_no_order_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'forward_step_func'"):
        read_call(data, model, KIND)


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    """What a script gets that reads its flags first."""
    monkeypatch.setattr(sys, "argv", ["own.py", *SMALL.split()])
    yield parse_and_validate_args(args_defaults={"lr_decay_style": "cosine"})
    user_state.clear()


def test_flags_that_a_script_changed_after_they_were_read_are_refused(flags: Namespace) -> None:
    flags.own_name = 5
    job, args = command_line.parsed(flags)
    assert (job.train_iters, args) == (20, flags)
    flags.train_iters, flags.lr = 7, 5e-3
    with pytest.raises(
        ConfigError, match=r"changed train_iters from 20 to 7, lr from 0\.001 to 0\.005 between"
    ) as error:
        command_line.parsed(flags)
    assert "args_defaults" in str(error.value)
    with pytest.raises(ConfigError, match="did not return"):
        command_line.parsed(Namespace(**vars(flags)))


@pytest.mark.parametrize("ask", [user_state.get_tokenizer, user_state.core_transformer_config_from_args])
def test_what_pretrain_makes_of_flags_is_not_there_before_it(flags: Namespace, ask: Callable[[], Any]) -> None:
    assert user_state.get_args() is flags
    with pytest.raises(RuntimeError, match=rf"^{ask.__name__}\(\) was called before pretrain\(\) started the job"):
        ask()


@pytest.mark.parametrize(
    ("given", "kept"),
    [({}, False), ({"level": logging.DEBUG}, True), ({"format": "%(message)s"}, True)],
    ids=["a library's", "a level", "a format"],
)
def test_a_bare_basic_config_is_replaced_and_a_users_logging_is_kept(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], kept: bool
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    logging.basicConfig(**given)
    (before,) = root.handlers
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *SMALL.split()])
    command_line.read()
    assert (root.handlers == [before]) is kept
    assert len(root.handlers) == 1
    assert any(isinstance(one, QuietLogs) for one in root.handlers[0].filters) is not kept
