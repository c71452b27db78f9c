"""Chooses redundancy, save interval, planned restart and inner data parallelism from the figures of a cluster.

Pure: figures in, a choice with its reason out. ``choose`` serves ``spare-plan``, ``at_start`` a running job.
"""
