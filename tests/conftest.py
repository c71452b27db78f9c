"""For all tests: no test of a property has a time limit for one example, because machines may be slow or busy."""

from hypothesis import settings

settings.register_profile("spare_megatron", deadline=None)
settings.load_profile("spare_megatron")
