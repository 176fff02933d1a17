"""The flags, the older command line, and what is refused."""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import GOLDEN

from mistral_paged import cli, flags, older, reference
from mistral_paged.serve import check, settings

COMMAND = Path(sys.executable).with_name("mistral-paged")
PHI3 = str(GOLDEN / "text" / "phi3")
SEED_OPTIONS = ["-i", "--pa-gpu-mem", "8192", "--pa-blk-size", "32"]

MIRRORED = """
--model-id --tokenizer --arch --dtype --format --quantized-file --mmproj --tok-model-id --gqa --enable-lora --lora
--lora-modules --lora-max-adapters --lora-max-rank --lora-max-bytes --legacy-lora --legacy-lora-order --xlora --xlora-order
--quant --isq --from-uqff --isq-organization --imatrix --calibration-file --cpu --device-layers --topology --hf-cache
--max-seq-len --max-batch-size --max-edge --max-num-images --max-image-length --max-seqs --max-num-batched-tokens
--max-decode-steps-before-prefill --no-kv-cache --prefix-cache-n --chat-template --jinja-explicit --mtp --mtp-model
--mtp-n-predict --mcp-config --agent --agentic --enable-search --enable-code-execution --enable-shell --paged-attn
--pa-context-len --pa-memory-mb --pa-memory-fraction --pa-block-size --pa-cache-type --seed --log --token-source --verbose -m
-t -a -f -n -c -j -l -v -vv
"""
"""Flags that every command of mistral.rs 0.9 has which loads a model."""
MIRRORED_RUN = "--input --image --video --audio --thinking --reasoning-effort --adapter -i"
MIRRORED_SERVE = """
--port --host --no-ui --mcp-port --max-tool-rounds --tool-dispatch-url --disable-access-log --access-log-format
--access-log-health --disable-request-id-header --disable-metrics -p
"""
OLDER = """
--port --serve-ip --interactive-mode --vi --log --truncate-sequence --max-seqs --no-kv-cache --prefix-cache-n --chat-template
--token-source --num-device-layers --isq --pa-gpu-mem --pa-gpu-mem-usage --pa-ctxt-len --pa-blk-size --no-paged-attn
--paged-attn --throughput --prompt-batchsize --jinja-explicit --seed --cpu --enable-search --enable-thinking --mcp-port
--mcp-config -p -i -l -t -c -n -j -s
"""
"""Flags of `mistralrs-server` 0.3 to 0.6, left of its selector."""
OLDER_SELECTORS = """
plain x-lora lora gguf x-lora-gguf lora-gguf ggml x-lora-ggml lora-ggml vision-plain toml
"""
NOT_THERE = """
--format --max-seq-len --max-batch-size --max-decode-steps-before-prefill --disable-request-id-header --quant
--from-uqff --isq-organization --topology --device-layers --xlora --xlora-order
--max-image-length --agent
--enable-search --mcp-config --enable-code-execution --enable-shell --mcp-port --max-tool-rounds --tool-dispatch-url
"""
"""Flags that are planned or left out; every other one works."""


def of(command: str) -> list[flags.Flag]:
    return [flag for group in flags.COMMANDS[command][1] for flag in group.flags]


def names(command: str) -> set[str]:
    return {name for flag in of(command) for name in flag.names}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The last line of a command line that ends with 2."""
    with pytest.raises(SystemExit) as ending:
        cli.main(arguments)
    assert ending.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_the_table_has_every_flag_of_the_mirrored_command_line() -> None:
    shared = set(MIRRORED.split())
    assert names("run") >= shared | set(MIRRORED_RUN.split())
    assert names("serve") >= shared | set(MIRRORED_SERVE.split())


def test_the_table_says_of_each_flag_whether_it_works() -> None:
    every = {flag.name: flag for command in ("run", "serve") for flag in of(command)}
    assert {name for name, flag in every.items() if flag.status != "works"} == set(NOT_THERE.split())
    assert all(flag.planned is None or flag.left_out is None for flag in every.values())


@pytest.mark.parametrize("command", list(flags.COMMANDS))
def test_a_flag_has_one_name_and_one_place(command: str) -> None:
    found = [name for flag in of(command) for name in flag.names]
    assert sorted(found) == sorted(set(found))
    known = {flag.name for flag in of(command)}
    assert all(set(flag.conflicts) <= known for flag in of(command))


@pytest.mark.parametrize("name", sorted(NOT_THERE.split()))
def test_a_flag_that_is_not_there_ends_with_2_and_says_what_works(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = "run" if name in names("run") else "serve"
    flag = next(flag for flag in of(command) if flag.name == name)
    line = refused(capsys, command, flag.name, *(["1"] if flag.metavar is not None else []))
    reason = "is not supported yet" if flag.planned is not None else "has no use here"
    assert f"error: the argument '{flag.shown}' {reason}; {flag.planned or flag.left_out}" in line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["run", "--pa-context-len", "64", "--pa-memory-mb", "64"],
            "the argument '--pa-memory-mb <MB>' cannot be used with '--pa-context-len <N>'",
        ),
        (
            ["serve", "--pa-memory-fraction", "0.5", "--pa-gpu-mem", "64"],
            "the argument '--pa-memory-mb <MB>' cannot be used with '--pa-memory-fraction <F>'",
        ),
        (
            ["serve", "--pa-ctxt-len", "64", "--pa-memory-fraction", "0.5"],
            "the argument '--pa-memory-fraction <F>' cannot be used with '--pa-context-len <N>'",
        ),
        (["run", "--device", "cuda:0", "--cpu"], "the argument '--cpu' cannot be used with '--device <NAME>'"),
        (
            ["serve", "--disable-access-log", "--access-log-format", "json"],
            "the argument '--access-log-format <FORMAT>' cannot be used with '--disable-access-log'",
        ),
    ],
)
def test_conflicts_are_told_as_clap_tells_them(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *arguments).endswith(f"error: {line}")


def test_flags_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--pa-memory" in refused(capsys, "run", "--pa-memory", "64")


def test_global_flags_stand_before_the_command_or_behind_it() -> None:
    before = ["--seed", "3", "-v", "--log=x.log", "--token-source", "none", "run", "-i", "Hi"]
    assert flags.behind_the_command(before) == ["run", "--seed", "3", "-v", "--log=x.log", "--token-source", "none", "-i", "Hi"]
    assert flags.behind_the_command(["--version"]) == ["--version"]
    assert flags.behind_the_command(["run", "--seed", "3"]) == ["run", "--seed", "3"]
    assert flags.behind_the_command(["--seed"]) == ["--seed"]


@pytest.mark.parametrize("words", [["--thinking"], ["--thinking", "true"], ["--thinking", "false"], []])
def test_thinking_takes_a_value_or_none(words: list[str]) -> None:
    said = cli.build_parser().parse_args(["run", *words]).thinking
    assert said == (None if not words else words[-1] != "false")


# The older form.


def test_the_older_form_has_every_flag_and_selector() -> None:
    assert {name for found in older.GLOBALS for name in found} == set(OLDER.split()) | {"--pa-cache-type"}
    assert set(older.SELECTORS) >= set(OLDER_SELECTORS.split())


@pytest.mark.parametrize(
    ("words", "newer"),
    [
        (
            [*SEED_OPTIONS, "plain", "-m", "M", "-a", "phi3"],
            ["run", "--pa-memory-mb", "8192", "--pa-block-size", "32", "--model-id", "M", "--arch", "phi3"],
        ),
        (
            [*SEED_OPTIONS, "gguf", "-t", "TOK", "-m", "M", "-f", "F"],
            [
                *["run", "--pa-memory-mb", "8192", "--pa-block-size", "32"],
                *["--tok-model-id", "TOK", "--model-id", "M", "--quantized-file", "F"],
            ],
        ),
        (["-i", "gguf", "-m", "M", "-f", "a.gguf b.gguf"], ["run", "--model-id", "M", "--quantized-file", "a.gguf;b.gguf"]),
        (
            ["--port=80", "--serve-ip", "::1", "--no-paged-attn", "plain", "--model-id=M", "-t", "T"],
            ["serve", "--port", "80", "--host", "::1", "--paged-attn", "off", "--model-id", "M", "--tokenizer", "T"],
        ),
        (["-i", "-l", "x.log", "-s", "3", "plain", "-m", "M"], ["run", "--log", "x.log", "--seed", "3", "--model-id", "M"]),
    ],
)
def test_an_older_line_becomes_a_newer_one(words: list[str], newer: list[str]) -> None:
    assert older.translate(words) == newer
    cli.build_parser().parse_args(newer)


@pytest.mark.parametrize(
    "words",
    [
        ["run", "-i", "plain", "-m", "M"],
        ["serve", "-p", "80", "-m", "plain"],
        ["--seed", "3", "run", "-i", "Hi"],
        ["-i", "Hi"],
        ["--unknown", "plain"],
        [],
    ],
)
def test_a_newer_line_stays_as_it_is(words: list[str]) -> None:
    assert older.translate(words) == words


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["-i", "--num-device-layers", "2", "plain", "-m", PHI3, "-a", "phi3"],
            "the argument '--num-device-layers <LIST>' is not supported yet; a model runs on one device",
        ),
        (["plain", "-m", "M"], "give -i for a chat, or -p PORT for a server"),
        (["-i", "-p", "80", "plain", "-m", "M"], "give -i for a chat, or -p PORT for a server; not both"),
        (["-i", "plain", "-x", "M"], "unexpected argument '-x' behind 'plain'"),
        (["-i", "plain", "-m"], "a value is required for '-m <MODEL>' but none was supplied"),
        (["-i=1", "plain"], "unexpected value '1' for '-i'; it takes none"),
        (
            ["-i", "diffusion", "-m", "M"],
            "the selector 'diffusion' is not supported yet; this version makes text only",
        ),
        (["-i", "lora", "-m", "M", "-a", "A", "-a", "B", "-x", "C"], "unexpected argument '-x' behind 'lora'"),
        (["--vi", "plain", "-m", "M"], "the argument '--vi' cannot be used with the selector 'plain'; it is a chat about images"),
        (
            ["-i", "--paged-attn", "--no-paged-attn", "plain", "-m", "M"],
            "the argument '--no-paged-attn' cannot be used with '--paged-attn'",
        ),
        (
            ["-i", "--pa-gpu-mem", "64", "--pa-ctxt-len", "64", "plain", "-m", "M"],
            "the argument '--pa-context-len <N>' cannot be used with '--pa-memory-mb <MB>'",
        ),
    ],
)
def test_what_an_older_line_cannot_have_ends_with_2(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *words).endswith(f"error: {line}")


# As processes.


def piped(*arguments: str, text: str = "Hello\n") -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(COMMAND), *arguments], input=text, capture_output=True, text=True, timeout=100, check=False)


def test_the_older_lines_chat_over_a_pipe() -> None:
    done = piped(*SEED_OPTIONS, "plain", "-m", PHI3, "-a", "phi3")
    assert done.returncode == 0, done.stderr
    assert "generated at" in done.stderr
    assert done.stdout.strip()
    done = piped(*SEED_OPTIONS, "gguf", "-t", str(GOLDEN / "text" / "llama"), "-m", str(GOLDEN / "gguf"), "-f", "llama.gguf")
    assert done.returncode == 0, done.stderr
    assert "generated at" in done.stderr


def test_serve_with_a_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    arguments = ["--log", str(log), "serve", "--paged-attn", "on", "--pa-memory-mb", "64", "-m", PHI3, "--port", "0"]
    process = subprocess.Popen([str(COMMAND), *arguments], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.readline()
    found = re.search(r"serving phi3 at http://127\.0\.0\.1:(\d+)/v1", said)
    assert found, said
    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
    connection.request("GET", "/v1/models")
    assert connection.getresponse().status == 200
    connection.close()
    deadline = time.monotonic() + 20
    while "GET /v1/models 200" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    assert process.communicate(timeout=60)[1].count("GET") == 0
    assert process.returncode == 0
    assert "GET /v1/models 200" in log.read_text()
    assert "INFO" in log.read_text()


def test_a_log_that_cannot_be_written_is_an_error() -> None:
    done = piped("run", "-m", PHI3, "-l", "/no/such/folder/x.log")
    assert done.returncode == 1
    assert "/no/such/folder/x.log" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speech"], "the kind 'speech'"),
        (["--port", "70000"], "--port is 70000; it must be from 0 to 65535"),
        (["--max-body-mb", "0"], "--max-body-mb is 0"),
        (["--request-timeout", "0"], "--request-timeout is 0.0; it must be seconds above 0"),
        (["--shutdown-timeout", "nan"], "--shutdown-timeout is nan"),
    ],
)
def test_a_server_that_cannot_be_is_refused_before_the_model_is_loaded(arguments: list[str], message: str) -> None:
    models = [cli.build_parser().parse_args(["serve", *arguments])]
    with pytest.raises(flags.Usage, match=re.escape(message)):
        check(models, settings(models, 0))


# The documentation.


def test_the_documentation_is_that_of_the_table() -> None:
    file = Path(__file__).parent.parent / "docs" / "command-line.md"
    assert file.read_text() == reference.document(), "run `python -m mistral_paged.reference > docs/command-line.md`"


def test_the_documentation_has_every_flag_in_its_place_and_its_links_lead_somewhere() -> None:
    text = reference.document()
    parts = {part.partition("\n")[0].lower(): part for part in text.split("\n## ")}
    for _, groups in flags.COMMANDS.values():
        for group in groups:
            for flag in group.flags:
                assert f"`{flag.name}" in (parts[group.title] if flag.status == "works" else text), (group.title, flag.name)
    assert all(f"`{command}" in text for command in (*flags.COMMANDS, *flags.NO_COMMANDS))
    titles = {line[3:].lower().replace(" ", "-") for line in text.splitlines() if line.startswith("## ")}
    assert set(re.findall(r"\(#([^)]+)\)", text)) <= titles
