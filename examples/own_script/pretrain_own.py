"""A user's edited pretrain_gpt.py, as it runs under Megatron-LM: own layers, own data, own loss, own flags.

The test replaces ``megatron.training`` by ``spare_megatron.training`` in the import lines and changes nothing else.
"""

import time

_PROGRAM_START_TIME = time.time()

from functools import partial

import torch
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.mlp import MLP
from megatron.core.utils import StragglerDetector, get_attr_wrapped_model
from megatron.training import (
    get_args,
    get_timers,
    get_tokenizer,
    inprocess_restart,
    pretrain,
    print_rank_0,
    set_startup_timestamps,
)
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.global_vars import get_one_logger
from megatron.training.utils import (
    average_losses_across_data_parallel_group,
    get_ltor_masks_and_position_ids,
    logical_and_across_model_parallel_group,
    unwrap_model,
)

stimer = StragglerDetector()


class ScaledMLP(MLP):
    """An MLP whose output is scaled by a flag of this script."""

    def forward(self, hidden_states, **kwargs):
        output, bias = super().forward(hidden_states, **kwargs)
        return output * get_args().mlp_scale, bias


class CountingDataset(torch.utils.data.Dataset):
    """Sequences that count upwards modulo a prime, from a start that depends on the sample."""

    def __init__(self, samples, length, modulus):
        self.samples, self.length, self.modulus = samples, length, modulus

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        step = 1 + index % 7
        return {"text": (torch.arange(self.length + 1) * step + index) % self.modulus}


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    """GPT with our own MLP in every layer."""
    args = get_args()
    print_rank_0("building the model with scaled MLPs ...")
    if config is None:
        config = core_transformer_config_from_args(args)
    spec = get_gpt_layer_local_spec(args.num_experts, args.moe_grouped_gemm, args.qk_layernorm)
    spec.submodules.mlp.module = ScaledMLP
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def get_batch(data_iterator):
    """Tokens of tensor-parallel rank 0 for all, masks and positions made from them."""
    args = get_args()
    data = next(data_iterator) if data_iterator is not None else None
    text = tensor_parallel.broadcast_data(["text"], data, torch.int64)["text"].long()
    labels, tokens = text[:, 1:].contiguous(), text[:, :-1].contiguous()
    attention_mask, loss_mask, position_ids = get_ltor_masks_and_position_ids(
        tokens, get_tokenizer().eod, args.reset_position_ids, args.reset_attention_mask, args.eod_mask_loss
    )
    return tokens, labels, loss_mask, attention_mask, position_ids


def loss_func(loss_mask, output_tensor, model=None):
    """Later tokens count more; the plain loss is reported beside ours."""
    losses = output_tensor.float()
    weights = loss_mask * torch.linspace(1.0, get_args().last_token_weight, losses.shape[1])
    loss = torch.sum(losses * weights) / weights.sum()
    plain = torch.sum(losses * loss_mask) / loss_mask.sum()
    get_rerun_state_machine().validate_result(
        result=loss, rejection_func=torch.isnan, message="found NaN in the loss", tolerance=0.0, fatal=True
    )
    averaged = average_losses_across_data_parallel_group([loss, plain])
    return loss, {"lm loss": averaged[0], "plain loss": averaged[1]}


def forward_step(data_iterator, model):
    """One microbatch."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with stimer(bdata=True):
        assert get_attr_wrapped_model(model, "vp_stage") is None
        tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator)
    timers("batch-generator").stop()
    with stimer:
        output = model(tokens, position_ids, attention_mask, labels=labels)
    assert isinstance(unwrap_model(model), GPTModel)
    return output, partial(loss_func, loss_mask, model=model)


def train_valid_test_datasets_provider(train_val_test_num_samples):
    """Our own data sets, larger by a flag of this script."""
    args = get_args()
    assert get_one_logger() is None
    assert logical_and_across_model_parallel_group(args.surplus >= 1.0)
    sizes = [int(number * args.surplus) for number in train_val_test_num_samples]
    return tuple(CountingDataset(size, args.seq_length, args.vocab_size) for size in sizes)


def add_own_args(parser):
    """Flags of this script."""
    group = parser.add_argument_group("own")
    group.add_argument("--mlp-scale", type=float, default=1.0)
    group.add_argument("--last-token-weight", type=float, default=2.0)
    group.add_argument("--surplus", type=float, default=1.25)
    return parser


def get_embedding_ranks(pp_ranks):
    """Both ends of a pipeline with tied embeddings."""
    ends = [pp_ranks[0]] if get_args().untie_embeddings_and_output_weights else [pp_ranks[0], pp_ranks[-1]]
    return sorted(set(ends))


if __name__ == "__main__":
    set_startup_timestamps(program_start=_PROGRAM_START_TIME, main_entry=time.time())
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    pretrain(
        train_valid_test_datasets_provider,
        partial(model_provider),
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "NullTokenizer"},
        extra_args_provider=add_own_args,
        store=store,
        get_embedding_ranks=get_embedding_ranks,
    )
