"""The command line, as a process."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import GOLDEN

from mistral_paged import __version__, cli

MODEL = str(GOLDEN / "text" / "llama")
COMMAND = Path(sys.executable).with_name("mistral-paged")


def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(COMMAND), *arguments], input=text, capture_output=True, text=True, timeout=60, check=False)


def test_one_answer_with_usage() -> None:
    done = run("run", "-m", MODEL, "-i", "Hello", "--max-tokens", "8", "--temperature", "0", "--dtype", "f32", "--arch", "llama")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "8 generated" in done.stderr or "generated at" in done.stderr
    again = run("run", "-m", MODEL, "-i", "Hello", "--max-tokens", "8", "--temperature", "0", "--dtype", "f32")
    assert again.stdout == done.stdout


def test_seed_repeats() -> None:
    first, second = (run("run", "-m", MODEL, "-i", "Hi", "--max-tokens", "8", "--seed", "3").stdout for _ in range(2))
    assert first == second


def test_deterministic_runs_with_one_byte_kv_agree() -> None:
    options = ["-m", MODEL, "-i", "Hi", "--max-tokens", "8", "--deterministic", "--pa-cache-type", "int8"]
    first, second = run("run", *options), run("run", *options, "--num-threads", "1")
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout


def test_gguf_file_and_folder() -> None:
    file = GOLDEN / "gguf" / "llama.gguf"
    template = str(GOLDEN / "text" / "llama" / "tokenizer_config.json")
    options = ["-i", "Hi", "--max-tokens", "4", "--temperature", "0", "-c", template]
    whole = run("run", "-m", str(file), *options)
    assert whole.returncode == 0, whole.stderr
    assert run("run", "-m", str(file.parent), "-f", file.name, *options).stdout == whole.stdout


def test_a_folder_with_nothing_but_a_gguf(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "gguf" / "llama.gguf", tmp_path / "only.gguf")
    shutil.copy(GOLDEN / "text" / "llama" / "tokenizer_config.json", tmp_path)
    options = ["-i", "Hi", "--max-tokens", "4", "--temperature", "0"]
    done = run("run", "-m", str(tmp_path), *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    shutil.copy(tmp_path / "only.gguf", tmp_path / "other.gguf")
    several = run("run", "-m", str(tmp_path), *options)
    assert several.returncode == 1
    assert "only.gguf" in several.stderr
    assert "other.gguf" in several.stderr


def test_sampling_left_out_is_that_of_the_mirrored_command() -> None:
    options = cli.build_parser().parse_args(["run"])
    assert (options.temperature, options.top_k, options.top_p, options.min_p) == (0.8, 40, 0.95, 0.05)
    given = ["--temperature", "0.8", "--top-k", "40", "--top-p", "0.95", "--min-p", "0.05"]
    same, explicit, other = (
        run("run", "-m", MODEL, "-i", "Hi", "--max-tokens", "12", "--seed", "3", *flags).stdout
        for flags in ([], given, ["--temperature", "0.1", "--top-k", "0", "--min-p", "0"])
    )
    assert same == explicit != other


def test_the_default_model_answers() -> None:
    done = run("run", "-i", "What is the capital of France?", "--max-tokens", "16", "--temperature", "0", "--pa-memory-mb", "256")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_interactive_chat() -> None:
    lines = [
        "/help",
        "/temperature 0",
        "/topk 5",
        "/topp 0.5",
        "/topp much",
        "/nonsense",
        "Hello",
        "/system Be brief.",
        "Hello",
        "/clear",
        "/exit",
    ]
    done = run("run", "-m", MODEL, "--max-tokens", "4", text="\n".join(lines) + "\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("generated at") == 2
    assert "unknown command /nonsense" in done.stderr
    assert "/topp takes a number, got 'much'" in done.stderr


def test_chat_ends_with_its_input() -> None:
    assert run("run", "-m", MODEL).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--unknown"],
        ["run", "--unknown"],
        ["run", "--pa-memory-mb", "64", "--pa-context-len", "64"],
        ["run", "--pa-memory-fraction", "0.5", "--pa-memory-mb", "64"],
        ["run", "--max-tokens", "many"],
        ["run", "--dtype", "f64"],
        ["run", "--pa-cache-type", "q4"],
    ],
)
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "usage:" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "/no/such"], "neither a local folder nor a hub id"),
        (["-m", "~nosuchuser"], "neither a local folder nor a hub id"),
        (["-m", MODEL, "--pa-block-size", "7"], "Block size must be in [8, 16, 32], got 7"),
        (["-m", MODEL, "--arch", "qwen3"], "contradicts"),
        (["-f", "x.gguf"], "name the model with -m"),
        (["-m", MODEL, "--max-tokens", "0"], "max_tokens must be at least 1."),
    ],
)
def test_errors_exit_1_with_a_line(arguments: list[str], message: str) -> None:
    done = run("run", "-i", "Hi", *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_version_and_help() -> None:
    assert run("--version").stdout == f"mistral-paged {__version__}\n"
    help_text = run("run", "--help").stdout
    for flag in ("--pa-memory-mb", "--pa-context-len", "--pa-memory-fraction", "--pa-block-size", "--seed"):
        assert flag in help_text
