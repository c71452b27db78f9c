"""Formulas of redundancy, and what a job or a user chooses by them.

Pure: numbers and arrays in, numbers out; a placement is given by its offsets. Losses endured, work of the survivors and
time to train are derived in docs/theory.md; ``published`` has the closed forms as they were published. ``choose``
serves ``spare-plan``, ``at_start`` a running job.
"""
