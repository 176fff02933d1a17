"""The `completions` command: what a shell needs to complete command lines."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "tcsh", "fish")


def describe(command: argparse.ArgumentParser) -> None:
    """What the help of `completions` says besides its flags."""
    command.description = 'Prints a script for the shell: eval "$(mistral-paged completions bash)" in ~/.bashrc, for one.'
    command.add_argument("shell", choices=SHELLS)


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for a shell."""
    import shtab

    return shtab.complete(parser, shell)
