"""Which groups host which shard: offsets, stacks and hosts, as pure arrays."""

from spare_megatron.placement.placement import Placement, build_placement, placement_from_offsets

__all__ = ["Placement", "build_placement", "placement_from_offsets"]
