"""The `tune` command. Its figures are measured, so the tests look at what must hold whatever they are."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from conftest import GOLDEN
from test_server import COMMAND

from mistral_paged.tune import Row, choose

LLAMA = str(GOLDEN / "text" / "llama")


def tune(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(COMMAND), "tune", "--pa-memory-mb", "16", "--num-threads", "1", "--text-tokens", "512", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def row(isq: str | None, loss: float, speed: float) -> Row:
    return Row(isq, 100.0, 10.0, loss, 1000.0, speed)


def test_the_fastest_within_the_bound_is_chosen() -> None:
    rows = [row(None, 0.0, 10.0), row("Q8_0", 0.1, 20.0), row("Q4K", 1.9, 30.0), row("Q3K", 9.0, 35.0)]
    assert [choose(rows, bound).isq for bound in (0.0, 0.5, 2.0, 10.0)] == [None, "Q8_0", "Q4K", "Q3K"]
    # A type may be better than the original by chance.
    assert choose([row(None, 0.0, 10.0), row("Q8_0", -0.1, 20.0)], 0.0).isq == "Q8_0"


def test_the_command_prints_a_table_and_writes_a_file_that_serves(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    done = tune("-m", LLAMA, "--types", "Q8_0,Q4_0", "--max-loss", "1e6", "--emit-config", str(file))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| as stored", "| Q8_0", "| Q4_0"]
    assert f"mistral-paged serve -m {LLAMA}" in done.stdout
    assert f'model_id = "{LLAMA}"' in file.read_text()
    again = tune("-m", LLAMA, "--types", "Q8_0", "--emit-config", str(file))
    assert (again.returncode, "is there already" in again.stderr) == (2, True)


def test_json_has_what_was_measured() -> None:
    done = tune("-m", LLAMA, "--types", "Q8_0", "--json")
    report = json.loads(done.stdout)
    assert [entry["isq"] for entry in report["rows"]] == [None, "Q8_0"]
    assert report["max_loss"] == 2.0
    stored, quantised = report["rows"]
    assert stored["loss"] == 0.0
    assert quantised["weights_mb"] < stored["weights_mb"]
    assert all(entry["decode_tokens_per_second"] > 0 and entry["prompt_tokens_per_second"] > 0 for entry in report["rows"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-m", LLAMA, "--isq", "Q4K"], "--isq is what tune finds"),
        (["-m", LLAMA, "--types", "Q8_0,Q8_0"], "--types must name types, each once"),
        (["-m", LLAMA, "--types", "Q8_0", "--max-loss", "-1"], "--max-loss is -1.0"),
        (["-m", LLAMA, "--profile", "fast", "--max-loss", "1"], "cannot be used with"),
        (["-m", LLAMA, "--types", "Q9"], "Q9"),
    ],
)
def test_what_cannot_be_honoured_is_refused(arguments: list[str], words: str) -> None:
    done = tune(*arguments)
    assert done.returncode != 0
    assert words in done.stderr


def test_a_model_that_is_quantised_leaves_no_choice() -> None:
    done = tune("-m", str(GOLDEN / "containers" / "ggml" / "llama-q4_0.bin"), "--types", "Q8_0")
    assert done.returncode == 1
    assert "there is nothing to choose" in done.stderr
