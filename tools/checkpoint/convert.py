"""``spare-convert`` under the name and path that it has in Megatron-LM."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> int:
    from spare_megatron.cli.convert import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
