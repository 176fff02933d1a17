"""Where the log goes: what the logger `mistral_paged` tells, and the lines that the server writes to standard error."""

from __future__ import annotations

import argparse
import logging
import os
import sys

FORMAT = "%(asctime)s %(levelname)s %(message)s"


def begin(options: argparse.Namespace) -> None:
    """Sets the logger up as `-v` and `--log FILE` ask; without them it stays as it is. `OSError` where FILE cannot be written."""
    handlers: list[logging.Handler] = []
    if getattr(options, "log", None) is not None:
        handlers.append(logging.FileHandler(options.log))
    if getattr(options, "verbose", False):
        handlers.append(logging.StreamHandler())
    logger = logging.getLogger("mistral_paged")
    for handler in handlers:
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def take_standard_error(file: str) -> None:
    """Lets what this process writes to standard error, whatever language it is written in, go to a file."""
    sys.stderr.flush()
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 2)
    os.close(descriptor)
