"""``spare-preprocess`` under the name and path that it has in Megatron-LM."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> Any:
    from spare_megatron.data.preprocess.command import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
