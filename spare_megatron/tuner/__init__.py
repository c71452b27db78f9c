"""Redundancy, save interval, planned restart and inner data parallelism chosen together from a cluster's figures.

Pure: figures in, a choice with its reason out. ``choose`` plans for ``spare-plan``, ``at_start`` for a running job.
"""
