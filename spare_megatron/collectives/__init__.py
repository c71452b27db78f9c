"""Sums over the groups: one communicator for each rank position and epoch, which ends at once when a member dies.

May import ``protocol`` (for the message in which evidence about links is voted), ``config`` and torch; nothing of
megatron or of the control plane. Promises: accumulators are only read, a failed sum is returned as a value and not
raised, and no thread or connection outlives its owner.
"""
