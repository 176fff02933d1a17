"""Hub ids, against a loopback server that speaks the hub's file protocol."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from conftest import GOLDEN, generate, runner_of
from huggingface_hub import _snapshot_download, file_download, hf_api

from mistral_paged import Architecture, EmbeddingRequest, ModelDType, ModelNotFoundError, Runner, Which
from mistral_paged.hub import parse_token_source, resolve_multimodal

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"
# Files beside a model that no runner needs, some of them as large as it.
DECOYS = [
    "consolidated.safetensors",
    "extra/huge.bin",
    "onnx/model.safetensors",
    "original/config.json",
    "original/model-00001-of-00001.safetensors",
    "pytorch_model.bin",
    "tf/tokenizer.json",
]


class Hub(ThreadingHTTPServer):
    """Serves golden models as repositories: `tiny/mistral`, `tiny/gguf`, and the gated `tiny/gated`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[str] = []
        text = GOLDEN / "text" / "mistral"
        self.repositories = {
            "tiny/mistral": {**{file.name: file for file in text.iterdir()}, **dict.fromkeys(DECOYS, text / "golden.json")},
            "tiny/gguf": {file.name: file for file in (GOLDEN / "gguf").iterdir()},
            "tiny/older": {file.name: file for file in (GOLDEN / "containers" / "llama-bin-sharded").iterdir()},
            "tiny/gated": {file.name: file for file in text.iterdir()},
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0].strip("/")
        self.server.requests.append(f"{self.command} {path}")
        is_api = path.startswith("api/models/")
        parts = path.removeprefix("api/models/").split("/")
        repository = "/".join(parts[:2])
        files = self.server.repositories.get(repository)
        if repository == "tiny/gone":
            self.send(404, b"{}", body, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif files is None:
            self.send(401, b"{}", body, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif repository == "tiny/gated" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            message = "Access to model tiny/gated is restricted."
            self.send(401, b"{}", body, {"X-Error-Code": "GatedRepo", "X-Error-Message": message})
        elif is_api:
            self.send(200, json.dumps(self.info(repository, files, parts)).encode(), body, {"Content-Type": "application/json"})
        else:
            name = "/".join(parts[4:])
            if parts[2] != "resolve" or name not in files:
                self.send(404, b"{}", body, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
                return
            data = files[name].read_bytes()
            etag = hashlib.sha256(data).hexdigest()
            self.send(200, data, body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Content-Type": "application/octet-stream"})

    def info(self, repository: str, files: dict[str, Path], parts: list[str]) -> Any:
        if "tree" in parts:
            return [{"type": "file", "path": name, "size": file.stat().st_size, "oid": "0" * 40} for name, file in files.items()]
        siblings = [{"rfilename": name} for name in files]
        return {"id": repository, "modelId": repository, "sha": COMMIT, "private": False, "siblings": siblings, "tags": []}

    def send(self, status: int, data: bytes, body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub_server() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def hub(hub_server: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The server, taken by this process for the hub."""
    server = hub_server
    for module in (huggingface_hub.constants, file_download, hf_api, _snapshot_download):
        for name in ("ENDPOINT", "HF_ENDPOINT"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    for module in (huggingface_hub.constants, file_download):
        if hasattr(module, "HUGGINGFACE_CO_URL_TEMPLATE"):
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    return server


def plain(repository: str, cache: Path) -> Which:
    return Which.Plain(repository, arch=Architecture.Mistral, dtype=ModelDType.F32, hf_cache_path=str(cache))


def load(which: Which, **options: Any) -> Runner:
    return Runner(which=which, pa_ctxt_len=256, token_source=options.pop("token_source", "none"), **options)


def test_download_then_reuse_offline(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load(plain("tiny/mistral", tmp_path))
    assert runner.list_models() == ["tiny/mistral"]
    expected = generate(runner_of("text", "mistral"), [318, 460], 8)
    assert generate(runner, [318, 460], 8) == expected
    fetched = {request.partition("resolve/")[2].partition("/")[2] for request in hub.requests if request.startswith("GET tiny/")}
    assert "model.safetensors" in fetched
    assert not fetched & {"golden.json", *DECOYS}

    hub.requests.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert generate(load(plain("tiny/mistral", tmp_path)), [318, 460], 8) == expected
    assert hub.requests == []


def test_weights_that_pytorch_saved_are_downloaded_where_there_are_no_others(hub: Hub, tmp_path: Path) -> None:
    which = Which.Plain("tiny/older", dtype=ModelDType.F32, hf_cache_path=str(tmp_path))
    golden = json.loads((GOLDEN / "containers" / "llama-bin-sharded" / "golden.json").read_text())["completions"][0]
    said = generate(load(which), golden["prompt_ids"], 8)
    assert [token for token, _ in said] == golden["greedy_ids"][:8]
    vectors = Which.Embedding("tiny/older", pooling="last", hf_cache_path=str(tmp_path / "vectors"))
    assert len(load(vectors).send_embedding_request(EmbeddingRequest(golden["prompt_ids"]))) == 1
    load(plain("tiny/mistral", tmp_path / "other"))
    assert not [request for request in hub.requests if "tiny/mistral" in request and request.endswith(".bin")]


def test_offline_without_cache_is_one_line_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"^tiny/mistral .* is not in the cache, and HF_HUB_OFFLINE is set: go online .*path$"):
        load(plain("tiny/mistral", tmp_path))


def test_a_hub_that_cannot_be_reached_is_one_line_with_what_to_do(hub: Hub, tmp_path: Path) -> None:
    hub.shutdown()
    hub.server_close()
    with pytest.raises(ValueError, match=r"^tiny/mistral .*, and the hub cannot be reached: go online .*path$"):
        load(plain("tiny/mistral", tmp_path))


def test_only_the_named_gguf_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    which = Which.GGUF("tiny/gguf", "qwen2.gguf", tok_model_id="tiny/mistral", hf_cache_path=str(tmp_path))
    load(which)
    fetched = {request.rpartition("/")[2] for request in hub.requests if request.startswith("GET tiny/")}
    assert "qwen2.gguf" in fetched
    assert "tokenizer.json" in fetched
    assert not fetched & {"llama.gguf", "mistral.gguf", "model.safetensors"}


def test_a_gguf_that_the_repository_has_not(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"repository tiny/gguf has no file 'absent\.gguf'; its files: .*'qwen2\.gguf'"):
        load(Which.GGUF("tiny/gguf", "absent.gguf", hf_cache_path=str(tmp_path)))
    with pytest.raises(ValueError, match=r"repository tiny/gguf has no file 'config\.json'; its files: .*'qwen2\.gguf'"):
        load(plain("tiny/gguf", tmp_path))
    with pytest.raises(ValueError, match="quantized_filename"):
        load(Which.GGUF("tiny/gguf", hf_cache_path=str(tmp_path)))


def test_gated_repository(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tiny/gated is gated.*token_source"):
        load(plain("tiny/gated", tmp_path))
    load(plain("tiny/gated", tmp_path), token_source=f"literal:{TOKEN}")


@pytest.mark.parametrize("repository", ["no/such", "tiny/gone"])
def test_unknown_repository(hub: Hub, repository: str, tmp_path: Path) -> None:
    """The hub answers 401 to who has no token, 404 to who has one."""
    with pytest.raises(ModelNotFoundError, match=f"{repository} is neither a local folder nor a repository"):
        load(plain(repository, tmp_path))


@pytest.mark.parametrize("name", ["/no/such/folder", "a/b/c", "bad name", "", "~nosuchuser/model", "x" * 5000, "a\0b"])
def test_neither_folder_nor_id(name: str, tmp_path: Path) -> None:
    for which in (plain(name, tmp_path), Which.GGUF(name, "a.gguf", hf_cache_path=str(tmp_path))):
        with pytest.raises(ModelNotFoundError, match="neither a local folder nor a hub id") as caught:
            load(which)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./model", "../model", "~/no-such-model", "a/b/c", "model.gguf", "folder/model.gguf"]
)
def test_a_path_that_does_not_exist_is_told_before_the_hub_is_asked(
    name: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for which in (plain(name, tmp_path), Which.GGUF(name, "a.gguf", hf_cache_path=str(tmp_path))):
        with pytest.raises(ModelNotFoundError, match=f"^'{name}' does not exist"):
            load(which)
    assert hub.requests == []


def test_a_folder_of_the_same_name_as_an_owner_hides_no_repository(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    load(plain("tiny/mistral", tmp_path))


def test_the_hubs_own_environment_variables(hub_server: Hub, tmp_path: Path) -> None:
    program = """
        from mistral_paged import *
        runner = Runner(which=Which.Plain("tiny/mistral"), pa_ctxt_len=256, token_source="none")
        request = CompletionRequest([318, 460], "m", max_tokens=4, temperature=0, ignore_eos=True)
        print(repr(runner.send_completion_request(request).choices[0].text))
    """

    def run(**variables: str) -> str:
        environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **variables}
        arguments = [sys.executable, "-c", textwrap.dedent(program)]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    online = run(HF_ENDPOINT=hub_server.url)
    assert hub_server.requests
    hub_server.requests.clear()
    assert run(HF_ENDPOINT=hub_server.url, HF_HUB_OFFLINE="1") == online != ""
    assert hub_server.requests == []


def test_a_file_is_no_folder() -> None:
    with pytest.raises(ValueError, match=r"Which\.GGUF"):
        load(Which.Plain(str(GOLDEN / "gguf" / "llama.gguf")))


def test_token_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "from env")
    file = tmp_path / "token"
    file.write_text("from file\n")
    assert parse_token_source("cache") is None
    assert parse_token_source("none") is False
    assert parse_token_source("literal:a:b") == "a:b"
    assert parse_token_source("env:MY_TOKEN") == "from env"
    assert parse_token_source(f"path:{file}") == "from file"
    for wrong in ("", "literal", "literal:", "env:", "cache:x", "hf_averysecrettoken"):
        with pytest.raises(ValueError, match="Invalid token source format") as caught:
            parse_token_source(wrong)
        assert "secrettoken" not in str(caught.value)
    with pytest.raises(ValueError, match="nowhere"):
        parse_token_source("path:/nowhere")


def test_adapters_of_a_model_s_own_come_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi4_multimodal"}))
    (tmp_path / "model.safetensors").touch()
    asked = []
    monkeypatch.setattr("mistral_paged.hub._download", lambda _id, patterns, *_rest: asked.append(patterns) or tmp_path)
    assert resolve_multimodal("tiny/phi4", "none", None) == str(tmp_path)
    files = ["adapter_config.json", "adapter_model.safetensors"]
    assert asked[1:] == [[f"{name}/{file}" for name in ("vision-lora", "speech-lora") for file in files]]
