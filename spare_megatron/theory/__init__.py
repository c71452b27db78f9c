"""Formulas of redundancy: how many losses a placement endures, what work survivors do, what that costs in time.

Pure: numbers and arrays in, numbers out; a placement enters as its offsets. ``published`` holds the closed forms as
they were published; the other modules are what this project plans with. docs/theory.md derives them.
"""
