"""The script of a toy job (:mod:`tests.process.toy_rank`), which imports as a rank of a Megatron job does.

Started like a user's script: ``spare-launch --num-groups 4 --group-size 2 tests/process/toy_train.py --steps 20``, or
by spare-slurm.
"""

from __future__ import annotations

import os
import sys

from spare_megatron.megatron_adapter.imports import uncollected

if __name__ == "__main__":
    with uncollected():
        from tests.process import toy_rank
    code = toy_rank.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
