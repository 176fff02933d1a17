"""The command line's ends: standard streams that may be closed, full or ASCII, and the lines that somebody types."""

from __future__ import annotations

import atexit
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, TextIO

CLOSED_BY_READER = 141
"""128 and SIGPIPE: what a shell tells of a command whose reader has left."""


def guarded(work: Callable[[], int]) -> int:
    """The exit status of `work`; 141 when the reader of the output has left, 1 with a line when it cannot be written."""
    _open_streams()
    try:
        try:
            return work()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return CLOSED_BY_READER
    except OSError as error:
        _discard_output()
        note(f"error: {error}")
        return 1


def note(text: str) -> None:
    """A line on standard error. Nowhere to write it to is no reason to end what is told of."""
    with suppress(OSError):
        print(text, file=sys.stderr)


def _open_streams() -> None:
    """Gives Python the streams that the shell has closed, and lets every character through."""
    if sys.stdin is None:
        sys.stdin = _nowhere(os.O_RDONLY, "r")
    if sys.stdout is None:
        # Not open for writing, so that an answer that nobody gets is an error, as of any other command.
        sys.stdout = _nowhere(os.O_RDONLY, "w")
    if sys.stderr is None:
        sys.stderr = _nowhere(os.O_WRONLY, "w")
    if isinstance(sys.stdin, io.TextIOWrapper):
        # A line that is not text is refused as a prompt; the next one is read.
        sys.stdin.reconfigure(errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _nowhere(flags: int, mode: Literal["r", "w"]) -> TextIO:
    return os.fdopen(os.open(os.devnull, flags), mode)


def _discard_output() -> None:
    """Lets what is still buffered go nowhere, which Python would try to write at its end."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class Lines:
    """The lines that somebody types, with editing and a history, or that a pipe gives. A prompt goes to a terminal only."""

    PROMPT = "> "
    HISTORY = 1000
    """Lines of the history that are kept."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self.edited = self.interactive and sys.stdout.isatty()
        if self.edited:
            _keep_history(_state_folder() / "history", self.HISTORY)

    def read(self) -> str:
        """The next line; `EOFError` at the end."""
        if self.edited:
            return input(self.PROMPT)
        if self.interactive and sys.stderr.isatty():
            print(self.PROMPT, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")


def _state_folder() -> Path:
    """Where the XDG Base Directory Specification has what programs keep."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return Path(base if base.startswith("/") else "~/.local/state").expanduser() / "mistral-paged"


def _keep_history(file: Path, length: int) -> None:
    """Lets `input` edit lines and go back to earlier ones, those of earlier chats too; where that cannot be, it does not."""
    try:
        import readline
    except ImportError:
        return
    with suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(length)
    readline.parse_and_bind("set enable-bracketed-paste on")

    def save() -> None:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            # What was asked is nobody else's.
            file.touch(mode=0o600)
            readline.write_history_file(file)

    atexit.register(save)
