"""What any process of a job uses of its operating system: disk, clocks, signals, child processes, failpoints.

Knows nothing of jobs.
"""
