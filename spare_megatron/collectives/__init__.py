"""Sums over the groups: one communicator for each rank position and epoch, which ends at once when a member dies.

May import ``controller`` (for the messages that evidence is made of) and ``config``; torch, but nothing of megatron,
and nothing of the control plane. Promises: accumulators are only read, errors are values, nothing outlives its owner.
"""
