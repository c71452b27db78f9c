"""From pieces to samples: which sample a piece has, where files are, and the data sets behind them.

``preprocess`` makes data files. May import ``flags``, ``megatron_adapter`` and ``config``. Promises: a piece's samples
follow from step and piece number alone, whoever computes it.
"""
