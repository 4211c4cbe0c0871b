"""Memory of this process."""

from __future__ import annotations

import os
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Resident set size (second field of /proc/self/statm, proc(5))."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
