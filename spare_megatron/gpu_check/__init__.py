"""What ``spare-gpu-check`` runs: a table of checks with pass criteria, from a machine's driver to jobs with kills.

table         checks, what they need, their outcome, report and JSON
host          versions, devices, environment, native libraries
kernel_bits   the kernels of a device against the reference: bits, streams, threads, a sanitizer
kernel_speed  the kernels' bandwidth beside a copy
check_member  one rank of a communicator as a process; run as a program
members       several of them: sums, kills, stops, epochs, bandwidth
jobs          whole jobs with and without a kill, and their weights

May assume: nothing of the machine. Promises: a check that cannot run says why and is no failure; what needs no GPU runs
without one, on the CPU's kernels and over sockets; nothing is left running.
"""
