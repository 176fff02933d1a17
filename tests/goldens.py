"""Unpacks the archives of tests/data/golden beside them, where that has not been done. rust/goldens does the same."""

from __future__ import annotations

import fcntl
import tarfile
from pathlib import Path

GOLDEN = Path(__file__).parent / "data" / "golden"
# Says which archives, of which sizes, the unpacked files are of.
STAMP = GOLDEN / ".unpacked"


def unpack() -> None:
    """Unpacks them all; processes take turns."""
    with (GOLDEN / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        archives = sorted(GOLDEN.glob("*.tar.xz"))
        stamp = "".join(f"{archive.name} {archive.stat().st_size}\n" for archive in archives)
        if STAMP.exists() and STAMP.read_text() == stamp:
            return
        for archive in archives:
            with tarfile.open(archive) as files:
                files.extractall(GOLDEN, filter="data")
        STAMP.write_text(stamp)


if __name__ == "__main__":
    unpack()
