"""Starts and ends the processes of a job, under spare-launch and under Slurm, and decides what follows each job
attempt.

May import ``coordinator``, ``control_plane`` and ``checkpoint``; no torch. Promises: it ends every process that it has
started, and reports every exit of a rank that it sees to the coordinator.
"""
