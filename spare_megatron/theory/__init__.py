"""Formulas of redundancy: how many losses a placement endures, how much survivors compute, how long training takes.

Pure: numbers and arrays in, numbers out; a placement is given by its offsets. ``published`` has the closed forms as
they were published; the other modules have the formulas that plans are made with. docs/theory.md derives them.
"""
