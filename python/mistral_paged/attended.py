"""The command line for a parent process: it ends like after a SIGTERM when standard input ends.

A parent that is killed cannot end its children. Its end of a pipe is closed all the same.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from mistral_paged import cli


def _end_with_the_parent() -> None:
    # Not through sys.stdin, whose lock a thread would hold while the interpreter ends.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    raise SystemExit(cli.main(sys.argv[1:]))
