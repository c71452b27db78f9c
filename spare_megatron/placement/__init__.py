"""Decides which groups host which shard. Pure: arrays in, arrays out."""

from spare_megatron.placement.placement import LayerTables, Placement, build_placement, placement_from_offsets

__all__ = ["LayerTables", "Placement", "build_placement", "placement_from_offsets"]
