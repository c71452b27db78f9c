"""Put several pairs of data files into one; `--help` shows the flags (those of Megatron-LM's tool)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> Any:
    from spare_megatron.data.preprocess.merge import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
