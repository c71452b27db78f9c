"""What people see of a job: one picture of its run directory, in figures, events and texts, and the report made of it.

May assume: a run directory that a job writes, or has written. Promises: it changes nothing there but the report, so the
job cannot notice; and with what is in the directory now, everybody who looks sees the same figures.
"""
