"""Which groups host which shard: offsets, stacks and hosts, as pure arrays."""

from spare_megatron.placement.placement import LayerTables, Placement, build_placement, placement_from_offsets

__all__ = ["LayerTables", "Placement", "build_placement", "placement_from_offsets"]
