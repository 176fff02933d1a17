"""What the README and the package's own help show runs as it stands, with the default model and without a network."""

from __future__ import annotations

import doctest
import re
import socket
from pathlib import Path
from typing import Any

import pytest

import mistral_paged
from mistral_paged import cli

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this process is connected to anything but a socket of its own."""

    def refuse(*_: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("offline")
def test_the_python_of_the_readme_runs_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 4
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    shown = re.search(r"# (PromptTokensDetails\(.*\))$", TEXT, re.MULTILINE)
    assert shown is not None
    assert shown[1] in capsys.readouterr().out
    names["runner"].close()


def test_the_commands_of_the_readme_are_known() -> None:
    commands = re.findall(r"^mistral-paged (.*?)(?: {2,}#.*)?$", TEXT, re.MULTILINE)
    assert commands
    for command in commands:
        cli.build_parser().parse_args(re.findall(r'"[^"]*"|\S+', command))


@pytest.mark.usefixtures("offline")
def test_the_example_of_the_package_is_true() -> None:
    failed, tried = doctest.testmod(mistral_paged)
    assert (failed, tried > 3) == (0, True)
