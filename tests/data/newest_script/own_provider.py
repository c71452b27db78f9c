"""The provider of a user's script, to which a builder is given."""

from megatron.training import get_args


def model_provider(model_builder, pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    """What the builder builds."""
    return model_builder(get_args(), pre_process, post_process, vp_stage, config=config, pg_collection=pg_collection)
