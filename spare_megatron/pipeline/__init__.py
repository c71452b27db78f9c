"""What the stages of a group's pipeline do in which order, as data.

Pure: no torch, no I/O, no clock. A *program* (:mod:`spare_megatron.pipeline.programs`) is what one stage does for a
stream of microbatches: forward and backward work with its sends and receives. ``tests/pure/rehearsal.py`` plays the
programs of all stages against each other, which shows deadlocks, lost tensors and how long they take. Other packages
execute them.
"""
