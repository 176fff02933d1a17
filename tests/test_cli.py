"""The command line, as a process."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN

from mistral_paged import ChatCompletionChunkResponse, ChatCompletionRequest, ChunkChoice, Delta, __version__, chat, cli

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


def copied(folder: Path, **generation_config: Any) -> str:
    """The model with a generation_config.json of its own."""
    shutil.copytree(MODEL, folder / "model")
    (folder / "model" / "generation_config.json").write_text(json.dumps(generation_config))
    return str(folder / "model")


def answer(model: str, *flags: str) -> str:
    done = run("run", "-m", model, "-i", "Hi", "--max-tokens", "12", "--seed", "3", "--dtype", "f32", *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sampling_left_out_is_gentle_where_the_model_says_nothing(tmp_path: Path) -> None:
    silent = copied(tmp_path)
    gentle = ["--temperature", "0.1", "--top-k", "40", "--top-p", "0.5", "--min-p", "0.05"]
    gentle += ["--repetition-penalty", "1.1"]
    assert answer(silent) == answer(silent, *gentle) != answer(silent, "--temperature", "1.5", "--min-p", "0", "--top-p", "1")


def test_sampling_left_out_is_the_models_own(tmp_path: Path) -> None:
    wild = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    model = copied(tmp_path, **wild, do_sample=True)
    flags = [text for name, value in wild.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert answer(model) == answer(model, *flags) != answer(model, "--temperature", "0.2")


def test_an_answer_without_max_tokens_ends_and_says_that_it_was_cut() -> None:
    done = run("run", "-m", MODEL, "-i", "Hello", "--temperature", "0", "--max-tokens", "3")
    assert "(cut after 3 tokens; --max-tokens N allows more)" in done.stderr
    assert cli.build_parser().parse_args(["run"]).max_tokens == 512
    done = run("run", "-m", MODEL, "-i", "Hello", "--temperature", "0", "--max-tokens", "400", "--pa-context-len", "32")
    assert "(cut: prompt and answer fill the model's context, or the KV pool)" in done.stderr


def shell(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the command as `$C run -m $M -i Hi` in bash, and tells the statuses of the pipe."""
    environment = {**os.environ, "C": str(COMMAND), "M": MODEL, **variables}
    script = f"set -o pipefail; {script}; echo status ${{PIPESTATUS[@]}} >&2"
    return subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("command", ['"$C" run -m "$M" -i Hi --max-tokens 300', '"$C" doctor'])
def test_a_reader_that_leaves_ends_the_command_without_a_traceback(command: str) -> None:
    done = shell(f"{command} | true")
    assert "status 141 0" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_help_for_a_reader_that_leaves_is_no_error() -> None:
    done = shell('"$C" run --help | true')
    # Some versions of argparse keep to themselves that nobody reads.
    assert done.stderr in ("status 0 0\n", "status 141 0\n")


@pytest.mark.parametrize(("where", "message"), [(">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")])
@pytest.mark.parametrize("command", ['"$C" run -m "$M" -i Hi --max-tokens 4', '"$C" doctor'])
def test_output_that_cannot_be_written_is_an_error(command: str, where: str, message: str) -> None:
    done = shell(f"{command} {where}")
    assert "status 1\n" in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "rror" in line]
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full", "<&-"])
def test_an_answer_needs_neither_input_nor_a_place_for_figures(where: str) -> None:
    done = shell(f'"$C" run -m "$M" -i Hi --max-tokens 4 --temperature 0 --dtype f32 {where}')
    assert done.stdout.strip() == answer(MODEL, "--max-tokens", "4", "--temperature", "0").strip()
    assert "Traceback" not in done.stderr
    assert "status 0" in done.stderr


def test_a_chat_without_input_ends() -> None:
    assert "status 0" in shell('"$C" run -m "$M" <&-').stderr


def test_an_ascii_terminal_gets_every_answer(tmp_path: Path) -> None:
    options = {"PYTHONIOENCODING": "ascii"}
    done = shell('"$C" run -m "$M" -i Hi --max-tokens 300 --temperature 1.5 --seed 1 --min-p 0', **options)
    assert "status 0" in done.stderr, done.stderr
    assert "\\u" in done.stdout or "\\x" in done.stdout, "the answer has no character beyond ASCII, so nothing was tried"


def test_a_chat_through_pipes_has_no_prompts_and_a_bad_line_does_not_end_it() -> None:
    done = subprocess.run(
        [str(COMMAND), "run", "-m", MODEL, "--max-tokens", "4", "--temperature", "0", "--dtype", "f32"],
        input=b"\xff\xfe\nHi\n",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert b"is not Unicode text" in done.stderr
    assert b"Chat with the model" not in done.stderr
    assert done.stdout.decode() == answer(MODEL, "--max-tokens", "4", "--temperature", "0")


def test_the_package_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mistral_paged", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"mistral-paged {__version__}\n")


def test_the_default_model_answers() -> None:
    done = run("run", "-i", "What is the capital of France?", "--max-tokens", "16", "--temperature", "0", "--pa-memory-mb", "256")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_the_default_model_does_not_ramble(seed: str) -> None:
    done = run("run", "-i", "What is the capital of France?", "--seed", seed, "--pa-memory-mb", "256")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert len(done.stdout) < 200


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
    assert "/topp takes a number above 0 and at most 1, got 'much'" in done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/temperature -1", "error: /temperature takes a number, 0 or more, got '-1'"),
        ("/temperature", "error: /temperature takes a number, 0 or more, got ''"),
        ("/temperature inf", "error: /temperature takes a number, 0 or more, got 'inf'"),
        ("/temperature nan", "error: /temperature takes a number, 0 or more, got 'nan'"),
        ("/topk -1", "error: /topk takes a whole number, 0 (off) or more, got '-1'"),
        ("/topk 0.5", "error: /topk takes a whole number, 0 (off) or more, got '0.5'"),
        ("/topp 0", "error: /topp takes a number above 0 and at most 1, got '0'"),
        ("/clear all", "error: /clear takes no value, got 'all'"),
    ],
)
def test_a_command_of_the_chat_checks_its_value_at_once(line: str, message: str) -> None:
    conversation = chat.Chat(Interrupted(3), cli.build_parser().parse_args(["run"]))
    before = vars(conversation.options).copy()
    notes: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "note", notes.append)
        conversation.command(line)
    assert notes == [message]
    assert vars(conversation.options) == before


class Interrupted:
    """A runner whose answers are stopped by Ctrl-C after so many parts."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.asked: list[Any] = []

    def generation_config(self) -> dict[str, None]:
        return dict.fromkeys(chat.SAMPLING)

    def send_chat_completion_request(self, request: ChatCompletionRequest) -> Iterator[ChatCompletionChunkResponse]:
        self.asked.append(request.messages)
        for index in range(self.parts):
            choice = ChunkChoice(None, 0, Delta(f"{index} ", "assistant", None, None), None, None, None)
            yield ChatCompletionChunkResponse("0", [choice], 0, "m", "local", "chat.completion.chunk", None)
        raise KeyboardInterrupt


def test_a_stopped_answer_stays_in_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    runner = Interrupted(2)
    conversation = chat.Chat(runner, cli.build_parser().parse_args(["run"]))
    for question in ("first", "second"):
        with pytest.raises(KeyboardInterrupt):
            conversation.answer(question)
    assert capsys.readouterr().out == "0 1 0 1 "
    assert runner.asked[1] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "0 1 "},
        {"role": "user", "content": "second"},
    ]
    runner.parts = 0
    with pytest.raises(KeyboardInterrupt):
        conversation.answer("third")
    assert [message["content"] for message in conversation.messages] == ["first", "0 1 ", "second", "0 1 "]


def type_into_a_chat(keys: list[str], **variables: str) -> str:
    """What a chat on a terminal shows; the next keys are typed once it waits for them."""
    main, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", **variables}
    arguments = [str(COMMAND), "run", "-m", MODEL, "--max-tokens", "4"]
    chat = subprocess.Popen(arguments, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    shown = ""
    prompts = 0
    try:
        while chunk := os.read(main, 4096).decode(errors="replace"):
            shown += chunk
            if keys and shown.count("> ") > prompts:
                prompts = shown.count("> ")
                os.write(main, keys.pop(0).encode())
    except OSError:
        pass  # the terminal is gone with the process
    finally:
        os.close(main)
        assert chat.wait(timeout=60) == 0, shown
    return shown


@pytest.mark.skipif(importlib.util.find_spec("readline") is None, reason="this Python has no readline")
def test_a_chat_on_a_terminal_has_editing_and_a_history(tmp_path: Path) -> None:
    home = {"XDG_STATE_HOME": str(tmp_path)}
    shown = type_into_a_chat(["Hello Wxrld\x1b[D\x1b[D\x1b[D\x7fo\r", "\x04"], **home)
    assert "Chat with the model" in shown
    history = tmp_path / "mistral-paged" / "history"
    assert history.read_text() == "Hello World\n"
    assert history.stat().st_mode & 0o777 == 0o600
    shown = type_into_a_chat(["\x1b[A\r", "/exit\r"], **home)
    assert "Hello World" in shown
    assert history.read_text() == "Hello World\n/exit\n"
    assert history.stat().st_mode & 0o777 == 0o600


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
