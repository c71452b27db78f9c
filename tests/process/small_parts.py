"""spare-coordinator with a journal of small parts and many snapshots, so that a short job has what a long one has."""

from __future__ import annotations

import sys

from spare_megatron.cli.coordinator import main
from spare_megatron.coordinator import journal

if __name__ == "__main__":
    journal.SNAPSHOT_BYTES, journal.PART_BYTES, journal.NAME_SEEN_S = 4_000, 12_000, 0.0
    sys.exit(main())
