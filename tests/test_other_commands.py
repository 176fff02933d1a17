"""`from-config`, `completions`, `cache`, `login`, `doctor --json`, and commands that are not there."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from conftest import GOLDEN
from test_server import serving

from mistral_paged import _core, cli, config, flags

COMMAND = Path(sys.executable).with_name("mistral-paged")
MODEL = str(GOLDEN / "text" / "llama")


def written(folder: Path, text: str) -> Path:
    (folder / "a.toml").write_text(text)
    return folder / "a.toml"


def meaning(folder: Path, text: str) -> argparse.Namespace:
    """The options that a file gives."""
    return cli.build_parser().parse_args(config.meaning(written(folder, text)).lines[0])


def test_a_file_means_what_flags_mean(tmp_path: Path) -> None:
    options = meaning(
        tmp_path,
        """
        command = "serve"
        default_model_id = "M"
        [global]
        seed = 3
        token_source = "none"
        log = "x.log"
        [runtime]
        max_seqs = 8
        no_kv_cache = false
        deterministic = true
        prefix_cache_n = 0
        chat_template = "-t.jinja"
        [server]
        host = "::1"
        port = 80
        request_timeout = 5
        api_key = ["a", "b"]
        disable_metrics = true
        [paged_attn]
        mode = "on"
        memory_mb = 64
        pa_block_size = 16
        cache_type = "int8"
        [[models]]
        kind = "text"
        model_id = "M"
        [models.format]
        quantized_file = ["a.gguf", "b.gguf"]
        [models.device]
        cpu = true
        """,
    )
    line = ["serve", "text", "--seed", "3", "--token-source", "none", "--log", "x.log", "--max-seqs", "8", "--deterministic"]
    line += ["--prefix-cache-n", "0", "--chat-template=-t.jinja", "--host", "::1", "--port", "80", "--request-timeout", "5"]
    line += ["--api-key", "a", "--api-key", "b", "--disable-metrics", "--paged-attn", "on", "--pa-memory-mb", "64"]
    line += ["--pa-block-size", "16", "--pa-cache-type", "int8", "-m", "M", "-f", "a.gguf;b.gguf", "--cpu"]
    expected = cli.build_parser().parse_args(line)
    assert {**vars(options), "handler": 0} == {**vars(expected), "handler": 0}


def test_adapters_in_a_file(tmp_path: Path) -> None:
    options = meaning(tmp_path, 'command = "serve"\n[[models]]\nlora = ["a=b", "c=d"]\nlora_modules = ["e=f", "g=h"]\n')
    assert (options.lora, options.lora_modules) == ([("a", "b"), ("c", "d")], [("e", "f"), ("g", "h")])


def test_a_models_own_keys_go_before_those_that_all_share(tmp_path: Path) -> None:
    text = """
        command = "serve"
        default_model_id = "b"
        [runtime]
        device = "cuda:0"
        max_seqs = 8
        [paged_attn]
        memory_mb = 64
        block_size = 16
        [[models]]
        model_id = "x/a"
        cpu = true
        [models.paged_attn]
        context_len = 128
        [[models]]
        model_id = "x/b"
        alias = "b"
        max_seqs = 2
        kind = "embedding"
        """
    meaning = config.meaning(written(tmp_path, text))
    first, second = (cli.build_parser().parse_args(line) for line in meaning.lines)
    assert (first.device, first.max_seqs, first.pa_context_len, first.pa_memory_mb) == ("cpu", 8, 128, None)
    assert (second.device, second.max_seqs, second.pa_context_len, second.pa_memory_mb) == ("cuda:0", 2, None, 64)
    assert (first.kind, second.kind, second.alias, meaning.default) == ("auto", "embedding", "b", 1)
    assert first.pa_block_size == second.pa_block_size == 16


def test_a_file_for_a_chat(tmp_path: Path) -> None:
    options = meaning(tmp_path, 'command = "run"\n[request]\nthinking = false\ntemperature = 1\ninput = "Hi"\n')
    assert (options.thinking, options.temperature, options.input, options.model_id) == (False, 1.0, "Hi", None)


@pytest.mark.parametrize("command", list(config.SECTIONS))
def test_every_flag_of_a_section_is_a_key(command: str, tmp_path: Path) -> None:
    samples: dict[Any, Any] = {int: 8, float: 0.5, str: "x", flags.named: "a=b"}
    for flag in (flag for group in flags.COMMANDS[command][1] for flag in group.flags if flag.section and flag.status == "works"):
        value = True if flag.metavar is None or flag.alone is not None else samples[flag.kind]
        if flag.choices is not None:
            value = list(flag.choices)[-1]
        shown = json.dumps(value)
        section = "[models]" if flag.section == "model" else flag.section
        for key in flag.keys:
            text = f"command = '{command}'\n[{section}]\n{key} = {shown}\n"
            found = getattr(meaning(tmp_path, text), flag.dest)
            value = flags.named(value) if flag.kind is flags.named and isinstance(value, str) else value
            if flag.several:
                assert found == [value], key
                continue
            assert found == ([value] if flag.repeated else flag.to[1] if flag.to else value), key


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "command is None; it must be 'serve' or 'run'"),
        ("command = 'bench'", "command is 'bench'; it must be 'serve' or 'run'"),
        ("command = 'run'\n[server]\nport = 1", "[server] does not go with command = 'run'"),
        ("command = 'serve'\n[serve]\nport = 1", "unknown key 'serve'; did you mean 'server'?"),
        ("command = 'serve'\n[server]\nprot = 1", "unknown key 'prot' in [server]; did you mean 'port'?"),
        ("command = 'serve'\n[global]\nzzz = 1", "unknown key 'zzz' in [global]; there are log, seed, token_source"),
        ("command = 'serve'\n[server]\nmax_seqs = 1", "unknown key 'max_seqs' in [server]; it belongs to [runtime]"),
        ("command = 'serve'\n[runtime]\nmodel_id = 'x'", "unknown key 'model_id' in [runtime]; it belongs to [[models]]"),
        ("command = 'serve'\n[server]\nport = 'x'", "port in [server] must be a whole number, got 'x'"),
        ("command = 'serve'\n[server]\nport = true", "port in [server] must be a whole number, got True"),
        ("command = 'serve'\n[server]\nhost = 1", "host in [server] must be a text, got 1"),
        ("command = 'serve'\n[server]\nno_ui = 1", "no_ui in [server] must be true or false, got 1"),
        ("command = 'serve'\nserver = 1", "server must be a table, [server]"),
        ("command = 'serve'\nmodels = 1", "models must be [[models]]"),
        ("command = 'serve'\n[[models]]\nmodel_id = 'a'\n[[models]]\nmodel_id = 'b'", "the KV pool of a has no size"),
        ("command = 'run'\n[[models]]\n[[models]]", "there are 2 of [[models]]; command = 'run' has one model"),
        ("command = 'serve'\ndefault_model_id = 'x'", "default_model_id is 'x', which is no model_id of [[models]]"),
        ("command = 'serve'\n[[models]]\ndtype = 'f32'\n[models.format]\ndtype = 'f16'", "[[models]] has 'dtype' twice"),
        ("command = 'serve'\n[sandbox]\nmode = 'on'", "[sandbox] is not supported yet; this server runs no tools"),
        ("command = 'run'\n[[models]]\nkind = 'speech'", "kind is 'speech'; it must be 'auto', 'text' or 'multimodal'"),
        (
            "command = 'serve'\n[[models]]\n[models.quantization]\ntopology = 'file'",
            "the argument '--topology <FILE>' is not supported yet",
        ),
        (
            "command = 'serve'\n[paged_attn]\nmemory_mb = 64\ncontext_len = 64",
            "the argument '--pa-context-len <N>' cannot be used with '--pa-memory-mb <MB>'",
        ),
        ("command = 'serve'\n[paged_attn]\nmode = 'maybe'", "invalid choice: 'maybe'"),
    ],
)
def test_a_file_that_cannot_be_honoured_exits_2(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["from-config", "-f", str(written(tmp_path, text))])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_none_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["from-config", "-f", str(tmp_path / "absent.toml")]) == 1
    assert cli.main(["from-config", "-f", str(written(tmp_path, "command = "))]) == 1
    assert capsys.readouterr().err.count("cannot be read") == 2


def test_a_file_runs(tmp_path: Path) -> None:
    text = f"command = 'run'\n[paged_attn]\nmemory_mb = 16\n[request]\nmax_tokens = 4\n[[models]]\nmodel_id = '{MODEL}'\n"
    done = subprocess.run(
        [str(COMMAND), "from-config", "-f", str(written(tmp_path, text))],
        input="Hi\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "4 generated at" in done.stderr


def test_keys_of_a_server_in_a_file(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("[[keys]]\nkey = 'k'\n")
    with serving("--api-keys", str(keys), "--disable-access-log") as server:
        assert server.get("/v1/models").status == 401
        assert server.get("/v1/models", authorization="Bearer k").status == 200


# Completions.


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh", "fish"])
def test_completions_know_commands_and_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completions", shell]) == 0
    script = capsys.readouterr().out
    for word in ("from-config", "serve", "pa-memory-mb"):
        assert word in script
    assert "from-uqff" not in script


def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["completions", "bash"])
    (tmp_path / "c.bash").write_text(capsys.readouterr().out)

    def complete(*words: str) -> list[str]:
        typed = " ".join(f"'{word}'" for word in words)
        script = (
            f"source {tmp_path}/c.bash; COMP_WORDS=(mistral-paged {typed}); COMP_CWORD={len(words)}; COMP_LINE=x; COMP_POINT=1; "
        )
        script += "$(complete -p mistral-paged | sed -E 's/.*-F ([^ ]+).*/\\1/'); printf '%s\\n' \"${COMPREPLY[@]}\""
        return subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, check=True).stdout.split()

    assert complete("ser") == ["serve"]
    assert complete("serve", "--pa-mem") == ["--pa-memory-mb", "--pa-memory-fraction"]
    assert complete("bench", "serve", "--good") == ["--goodput"]


# The hub.


def cached(cache: Path, name: str, size: int) -> None:
    """A repository in the layout of the hub's cache."""
    folder = cache / f"models--{name.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    for part in ("blobs", "refs", f"snapshots/{commit}"):
        (folder / part).mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "blobs" / "blob").write_bytes(bytes(size))
    (folder / "snapshots" / commit / "config.json").symlink_to("../../blobs/blob")


def test_the_cache_is_listed_and_only_the_model_deleted_that_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cached(tmp_path, "tiny/one", 2_000_000)
    cached(tmp_path, "tiny/two", 3_000_000)
    assert cli.main(["cache", "list", "--hf-cache", str(tmp_path)]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["3.0", "MB", "tiny/two"],
        ["2.0", "MB", "tiny/one"],
    ]
    assert cli.main(["cache", "delete", "-m", "tiny/one", "--hf-cache", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "deleted tiny/one, 2.0 MB\n"
    assert cli.main(["cache", "list", "--json", "--hf-cache", str(tmp_path)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["id"], row["bytes"], row["type"]) == ("tiny/two", 3_000_000, "model")
    assert not (tmp_path / "models--tiny--one").exists()
    assert cli.main(["cache", "delete", "-m", "tiny/one", "--hf-cache", str(tmp_path)]) == 1
    assert "the cache has no model 'tiny/one'; it has tiny/two" in capsys.readouterr().err


def test_a_cache_that_is_none_is_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "list", "--hf-cache", str(tmp_path / "absent")]) == 0
    assert capsys.readouterr().out == "the cache is empty\n"


def test_a_token_comes_from_the_flag_or_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(huggingface_hub, "login", lambda token, add_to_git_credential: taken.append(token))
    assert cli.main(["login", "--token", "hf_a"]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("hf_b\n\n"))
    assert cli.main(["login"]) == 0
    assert cli.main(["login"]) == 1
    assert taken == ["hf_a", "hf_b"]
    assert "no token was given" in capsys.readouterr().err


def test_a_hub_that_takes_no_token_is_one_line() -> None:
    environment = {"HF_ENDPOINT": "http://127.0.0.1:1", "PATH": "/usr/bin"}
    done = subprocess.run(
        [str(COMMAND), "login", "--token", "hf_x"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: the hub did not accept the token: ")
    assert "Traceback" not in done.stderr


# What is left.


def test_the_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cores"] == _core.survey()["cores"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["uqff", "report", "x"], "the command 'uqff' is not supported yet; load a quantised GGUF file with -f"),
        (["update", "--tag", "x"], "the command 'update' has no use here; run `pip install --upgrade .`"),
        (["--seed", "1", "uninstall", "-y"], "the command 'uninstall' has no use here; run `pip uninstall mistral_paged`"),
    ],
)
def test_commands_that_are_not_there_exit_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
