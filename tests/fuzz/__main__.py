"""python -m tests.fuzz NAME --seed S --minutes M"""

from __future__ import annotations

import argparse
import sys

from tests.fuzz import FUZZERS, run


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.fuzz", description="Fuzz what comes in from outside.")
    parser.add_argument("name", choices=FUZZERS)
    parser.add_argument("--seed", type=int, required=True, help="seed of the first round")
    parser.add_argument("--minutes", type=float, required=True, help="for how long")
    args = parser.parse_args()
    print(f"{args.name}: seed {args.seed}", flush=True)
    run(args.name, args.seed, 60 * args.minutes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
