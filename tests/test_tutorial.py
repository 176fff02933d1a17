"""The Python of the tutorial runs, and its commands are known."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from mistral_paged import cli

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "tutorial.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


@pytest.mark.timeout(600)
@pytest.mark.long
def test_the_python_runs_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    code = blocks("python")
    assert len(code) > 4
    names: dict[str, Any] = {}
    for block in code:
        exec(compile(block, "docs/tutorial.md", "exec"), names)
    assert "Fragmented Memory" in capsys.readouterr().out


def test_the_commands_are_known() -> None:
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert commands
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "mistral-paged"
        assert cli.build_parser().parse_args(arguments).mode in ("naive", "paged")


def test_what_it_shows_and_links_is_there() -> None:
    for link in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (DOCS / link).exists(), link
