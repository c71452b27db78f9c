"""What starts and ends processes: job attempts and their supervisor, under spare-launch and under Slurm.

May import ``coordinator``, ``control`` and ``checkpoint``; no torch. Promises: every process that it started is ended
by it, and a death that it sees is told to the coordinator.
"""
