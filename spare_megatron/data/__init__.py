"""Gives the samples of a piece: the sample order, the checks of data files, the building of data sets.

``preprocess`` makes data files. May import ``flags``, ``megatron_adapter`` and ``config``. Promises: a piece's samples
follow from step and piece number alone, whoever computes it.
"""
