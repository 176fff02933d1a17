"""A server with several models: each request goes to the one that it names."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN, runner_of
from test_server import COMMAND, HELLO, Server, running, wait_until

from mistral_paged import CompletionRequest

LORA = GOLDEN / "lora"
IDS = ["llama", "small", "embeddinggemma"]
SHARED = """
command = "serve"
[server]
port = 0
disable_access_log = true
[runtime]
num_threads = 1
max_seqs = 4
[paged_attn]
memory_mb = 16
"""
MODELS = f"""
[[models]]
model_id = "{GOLDEN}/text/llama"
dtype = "f32"
served_model_name = ["first"]
lora = ["attn={LORA}/llama-attn"]

[[models]]
model_id = "{GOLDEN}/text/qwen3"
alias = "small"
kind = "text"
dtype = "f32"
max_seqs = 2
[models.paged_attn]
context_len = 384
block_size = 16

[[models]]
model_id = "{GOLDEN}/embed/embeddinggemma"
kind = "embedding"
dtype = "f32"
"""
OWN = {"llama": "llama", "first": "llama", "small": "qwen3", "default": "qwen3"}
"""The golden model that a name stands for, where the second model is the default one."""


def written(folder: Path, text: str) -> str:
    path = folder / "several.toml"
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("config")
    template = folder / "small.jinja"
    template.write_text("{% for message in messages %}A template of its own: {{ message.content }}{% endfor %}")
    models = MODELS.replace('alias = "small"', f'alias = "small"\nchat_template = "{template}"')
    file = written(folder, f'default_model_id = "small"\n{SHARED}{models}')
    with running("from-config", "-f", file, MISTRAL_PAGED_LORA_ROOT=str(LORA)) as server:
        yield server


@cache
def expected(model: str, max_tokens: int = 4) -> str:
    """What a model goes on with, by the Python interface."""
    request = CompletionRequest("Hello", model, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return runner_of("text", model).send_completion_request(request).choices[0].text


def status_of(server: Server, name: str) -> str:
    return server.post("/v1/models/status", {"model_id": name}).json["status"]


def statuses(server: Server) -> dict[str, str]:
    return server.get("/health").json["models"]


def text_of(server: Server, **fields: Any) -> str:
    return server.complete(ignore_eos=True, **fields).json["choices"][0]["text"]


@pytest.mark.parametrize("name", OWN)
def test_each_name_goes_to_its_model(server: Server, name: str) -> None:
    answer = server.complete(model=name, ignore_eos=True).json
    assert answer["choices"][0]["text"] == expected(OWN[name])
    assert answer["model"] == {"llama": "llama", "qwen3": "small"}[OWN[name]]
    assert server.chat(model=name).json["model"] == answer["model"]


def test_no_name_goes_to_the_default_model(server: Server) -> None:
    assert expected("llama") != expected("qwen3")
    assert text_of(server) == expected("qwen3")


def test_every_interface_goes_to_the_model_that_it_names(server: Server) -> None:
    body = {"model": "llama", "max_tokens": 4, "messages": HELLO}
    assert server.post("/v1/messages", body).json["model"] == "llama"
    counts = {
        name: server.post("/v1/messages/count_tokens", {**body, "model": name}).json["input_tokens"]
        for name in ("llama", "small")
    }
    for name, count in counts.items():
        assert server.post("/apply-template", {"model": name, "messages": HELLO}).json["count"] == count
        assert server.post("/v1/responses/input_tokens", {"model": name, "input": "Hello"}).json["input_tokens"] == count
        tokens = server.post("/tokenize", {"model": name, "prompt": "Hello there"}).json["tokens"]
        assert "Hello there" in server.post("/detokenize", {"model": name, "tokens": tokens}).json["prompt"]
    prompts = {name: server.post("/apply-template", {"model": name, "messages": HELLO}).json["prompt"] for name in counts}
    assert prompts["small"] == "A template of its own: Hello" != prompts["llama"]
    templates = [server.get(f"/tokenizer_info?model={name}").json["chat_template"] for name in ("llama", "small")]
    assert templates[0] != templates[1]
    assert server.get("/tokenizer_info").json["chat_template"] == templates[1]
    assert server.get("/tokenizer_info?name=llama").error["code"] == "invalid_value"
    sound = server.send("POST", "/v1/audio/transcriptions", b"", {"content-type": "multipart/form-data; boundary=x"})
    assert sound.status == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/tokenize"])
def test_a_name_of_no_model_is_not_found(server: Server, path: str) -> None:
    fields = {"messages": HELLO, "prompt": "x", "input": "x"}
    keys = {"/v1/chat/completions": "messages", "/v1/embeddings": "input", "/v1/responses": "input"}
    key = keys.get(path, "prompt")
    reply = server.post(path, {"model": "absent", key: fields[key]})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
    for name in IDS:
        assert name in reply.error["message"]


def test_the_list_has_every_name_and_what_each_model_takes(server: Server) -> None:
    cards = {card["id"]: card for card in server.get("/v1/models").json["data"]}
    assert list(cards) == ["llama", "first", "attn", "small", "default", "embeddinggemma"]
    assert {name: card["root"] for name, card in cards.items() if name in OWN} == {
        "llama": "llama",
        "first": "llama",
        "small": "small",
        "default": "small",
    }
    assert cards["attn"]["parent"] == "llama"
    assert {card["status"] for card in cards.values()} == {"loaded"}
    assert [cards[name]["kind"] for name in IDS] == ["chat", "chat", "embedding"]
    assert cards["small"]["max_model_len"] == 384
    assert server.get("/v1/models/first").json["root"] == "llama"
    info = server.get("/v1/system/info").json
    assert (info["model"], [model["model"] for model in info["models"]]) == ("small", IDS)
    assert [model["max_seqs"] for model in info["models"]] == [4, 2, 4]


def test_models_stream_at_once(server: Server) -> None:
    names = ["llama", "small"] * 3
    body = {"prompt": "Hello", "max_tokens": 24, "temperature": 0, "ignore_eos": True}

    def stream(name: str) -> str:
        chunks = [json.loads(data) for data in server.events("/v1/completions", {**body, "model": name})[:-1]]
        assert {chunk["model"] for chunk in chunks} == {name}
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    with ThreadPoolExecutor(len(names)) as pool:
        texts = list(pool.map(stream, names))
    assert texts == [expected(OWN[name], 24) for name in names]


def test_embeddings_are_made_beside_chats(server: Server) -> None:
    made = server.post("/v1/embeddings", {"model": "embeddinggemma", "input": "Hello"}).json
    assert made["model"] == "embeddinggemma"
    assert sum(x * x for x in made["data"][0]["embedding"]) == pytest.approx(1, abs=1e-5)
    assert server.post("/v1/embeddings", {"input": "Hello"}).error["code"] == "embeddings_not_supported"
    assert server.chat(model="embeddinggemma").status == 400


def test_a_conversation_goes_on_with_another_model(server: Server) -> None:
    first = server.post("/v1/responses", {"model": "llama", "input": "Hello", "max_output_tokens": 4}).json
    then = {"model": "small", "input": "And?", "max_output_tokens": 4, "previous_response_id": first["id"]}
    second = server.post("/v1/responses", then).json
    assert (first["model"], second["model"], second["status"]) == ("llama", "small", "incomplete")
    assert second["usage"]["input_tokens"] > server.post("/v1/responses/input_tokens", {"input": "And?"}).json["input_tokens"]
    assert server.get(f"/v1/responses/{first['id']}").json["model"] == "llama"


def test_adapters_are_of_one_model(server: Server) -> None:
    assert text_of(server, model="attn") != expected("llama")
    assert [card["id"] for card in server.get("/v1/lora_adapters?model=llama").json["data"]] == ["attn"]
    assert server.get("/v1/lora_adapters").status == 409

    def load(name: str, **fields: Any) -> Any:
        return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": "llama-layers", **fields})

    assert load("layers").status == 409
    assert load("small", model="llama").error["message"] == "`lora_name` is a name of another model, `small`"
    assert load("first", model="llama").error["message"] == "`lora_name` is a name of the model itself"
    assert load("attn").error["message"] == "`lora_name` is an adapter of another model, `llama`"
    assert load("layers", model="llama").status == 200
    assert server.complete(model="layers").json["model"] == "llama"
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "layers"}).status == 200
    assert server.complete(model="layers").status == 404


def test_an_adapter_that_comes_again_with_its_model_is_never_that_of_two(server: Server) -> None:
    def load(model: str) -> Any:
        return server.post("/v1/load_lora_adapter", {"lora_name": "attn", "lora_path": "llama-attn", "model": model})

    assert server.post("/v1/unload_lora_adapter", {"lora_name": "attn"}).status == 200
    assert server.complete(model="attn").status == 404
    refused = load("small")
    assert (refused.status, refused.error["message"]) == (400, "`lora_name` is an adapter of another model, `llama`")
    assert load("llama").status == 200
    for route in ("unload", "reload"):
        assert server.post(f"/v1/models/{route}", {"model_id": "llama"}).status == 200
    assert server.complete(model="attn").json["model"] == "llama"


def test_a_pause_holds_for_a_model_that_is_loaded_meanwhile(server: Server) -> None:
    assert server.post("/v1/models/unload", {"model_id": "small"}).status == 200
    assert server.post("/admin/pause", {}).status == 200
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(text_of, server, model="small")
        wait_until(lambda: status_of(server, "small") == "loaded")
        wait_until(lambda: server.metric("vllm:num_requests_waiting", model_name="small") == 1)
        steps = server.metric("vllm:iteration_tokens_total_count", model_name="small")
        time.sleep(0.3)
        assert not answer.done()
        assert server.metric("vllm:iteration_tokens_total_count", model_name="small") == steps
        assert server.post("/admin/resume", {}).status == 200
        assert answer.result(30) == expected("qwen3")


def test_the_adapters_of_a_model_are_listed_without_loading_it(server: Server) -> None:
    assert server.post("/v1/models/unload", {"model_id": "llama"}).status == 200
    listed = server.get("/v1/lora_adapters?model=llama").json
    assert listed["data"] == [{"id": "attn", "object": "lora_adapter", "status": "unloaded"}]
    assert listed["status"] is None
    assert status_of(server, "llama") == "unloaded"
    assert server.post("/v1/models/reload", {"model_id": "llama"}).status == 200


def test_one_model_is_unloaded_and_loaded_again_while_another_answers(server: Server) -> None:
    body = {"model": "llama", "prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    before = server.get("/health").json
    assert (before["status"], before["models"]) == ("ok", dict.fromkeys(IDS, "loaded"))

    def post(route: str, name: str) -> Any:
        return server.post(f"/v1/models/{route}", {"model_id": name})

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.events, "/v1/completions", body)
        assert post("unload", "default").json == {"model_id": "small", "status": "unloaded"}
        assert json.loads(answer.result()[-2])["choices"][0]["finish_reason"] == "length"
    assert post("unload", "small").json["status"] == "unloaded"
    assert post("status", "small").json == {"model_id": "small", "status": "unloaded"}
    cards = {card["id"]: card["status"] for card in server.get("/v1/models").json["data"]}
    assert (cards["small"], cards["default"], cards["llama"]) == ("unloaded", "unloaded", "loaded")
    assert (server.get("/health").json["status"], server.get("/ready").status) == ("ok", 200)
    assert server.get("/health").json["models"]["small"] == "unloaded"
    assert server.metric("mistralrs_kv_cache_blocks_total", model_name="small") == 0
    assert server.metric("mistralrs_kv_cache_blocks_total", model_name="llama") > 0
    assert text_of(server, model="llama") == expected("llama")
    assert post("status", "small").json["status"] == "unloaded"

    assert text_of(server, model="small") == expected("qwen3")
    assert post("status", "small").json["status"] == "loaded"
    assert server.metric("mistralrs_kv_cache_blocks_total", model_name="small") > 0
    assert post("unload", "llama").status == 200
    assert server.complete(model="attn").json["model"] == "llama"
    assert post("reload", "llama").json == {"model_id": "llama", "status": "loaded"}
    for name in ("absent", "attn"):
        assert (post("unload", name).status, post("unload", name).error["code"]) == (404, "model_not_found")


def test_unloading_ends_what_runs_with_its_text(server: Server) -> None:
    body = {"model": "small", "prompt": "Hello", "max_tokens": 380, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/v1/completions", body)
        while server.metric("vllm:num_requests_running", model_name="small") == 0:
            pass
        assert server.post("/v1/models/unload", {"model_id": "small"}).status == 200
        choice = answer.result().json["choices"][0]
    assert choice["finish_reason"] == "canceled"
    assert choice["text"].startswith(expected("qwen3")[:1])


def test_many_requests_wait_for_one_model_and_the_others_answer_meanwhile(server: Server) -> None:
    assert server.post("/v1/models/unload", {"model_id": "small"}).status == 200
    with ThreadPoolExecutor(24) as pool:
        waiting = [pool.submit(text_of, server, model="small") for _ in range(16)]
        others = [pool.submit(text_of, server, model="llama") for _ in range(8)]
        assert {answer.result() for answer in others} == {expected("llama")}
        assert {answer.result() for answer in waiting} == {expected("qwen3")}


def test_weights_of_one_model_are_quantized_anew(server: Server) -> None:
    bytes_of = {model["model"]: model["weight_bytes"] for model in server.get("/v1/system/info").json["models"]}
    answer = server.post("/re_isq", {"ggml_type": "Q8_0", "model": "small"}).json
    assert answer["weight_bytes"] < bytes_of["small"]
    after = {model["model"]: model["weight_bytes"] for model in server.get("/v1/system/info").json["models"]}
    assert (after["llama"], after["small"]) == (bytes_of["llama"], answer["weight_bytes"])
    assert text_of(server, model="llama") == expected("llama")


def test_metrics_tell_models_apart(server: Server) -> None:
    def tokens(name: str) -> float:
        return server.metric("vllm:generation_tokens_total", model_name=name)

    before = {name: tokens(name) for name in IDS}
    text_of(server, model="first", max_tokens=3)
    assert {name: tokens(name) - before[name] for name in IDS} == {"llama": 3, "small": 0, "embeddinggemma": 0}
    page = server.get("/metrics").body.decode()
    for name in ("vllm:kv_cache_usage_perc", "vllm:iteration_tokens_total"):
        assert page.count(f"# TYPE {name} ") == 1
        for model in IDS:
            assert f'model_name="{model}"' in "".join(line for line in page.splitlines() if line.startswith(name))
    assert server.metric("http_requests_total", path="/v1/completions", status="200") > 0


def test_the_pages_feed_is_of_the_model_that_it_names(server: Server) -> None:
    for name in ("llama", "small"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("GET", f"/ui/events?model={name}")
        frame = json.loads(connection.getresponse().readline()[6:])
        connection.close()
        assert (frame["model"], frame["status"]) == (name, "loaded")
    assert server.get("/ui/events?model=absent").status == 404


LAZY = SHARED.replace("[server]", "[server]\nlazy = true\nmax_loaded_models = 2\nmax_queued = 1")
NONE = dict.fromkeys(IDS, "unloaded")


@pytest.fixture
def lazy(tmp_path: Path) -> Iterator[Server]:
    """Loads nothing at the start, and two models at most."""
    file = written(tmp_path, LAZY + MODELS.replace('kind = "embedding"', 'kind = "embedding"\nmax_seqs = 1'))
    with running("from-config", "-f", file) as server:
        yield server


def test_lazy_models_are_loaded_by_what_first_needs_them(lazy: Server) -> None:
    assert (statuses(lazy), lazy.get("/ready").status) == (NONE, 200)
    cards = {card["id"]: card for card in lazy.get("/v1/models").json["data"]}
    assert list(cards) == ["llama", "first", "default", "attn", "small", "embeddinggemma"]
    assert (cards["attn"]["parent"], cards["attn"]["status"], cards["small"]["max_model_len"]) == ("llama", "unloaded", None)
    assert lazy.get("/v1/lora_adapters?model=llama").json["data"][0]["id"] == "attn"
    assert lazy.get("/v1/system/info").json["models"][0]["architecture"] is None
    assert [lazy.get(path).status for path in ("/metrics", "/openapi.json", "/docs")] == [200] * 3
    assert lazy.complete(model="absent").status == 404
    assert statuses(lazy) == NONE

    assert lazy.post("/tokenize", {"model": "small", "prompt": "Hello"}).json["count"] > 0
    assert statuses(lazy) == {**NONE, "small": "loaded"}
    assert text_of(lazy, model="attn") != text_of(lazy, model="llama") == expected("llama")
    assert {card["id"]: card["kind"] for card in lazy.get("/v1/models").json["data"]}["llama"] == "chat"


def test_the_model_that_was_not_used_for_longest_makes_room(lazy: Server) -> None:
    both = {"llama": "loaded", "small": "loaded", "embeddinggemma": "unloaded"}
    assert [text_of(lazy, model=name) for name in ("llama", "small", "llama")] == [
        expected(OWN[n]) for n in ("llama", "small", "llama")
    ]
    assert statuses(lazy) == both
    assert lazy.post("/v1/embeddings", {"model": "embeddinggemma", "input": "Hello"}).status == 200
    assert statuses(lazy) == {"llama": "loaded", "small": "unloaded", "embeddinggemma": "loaded"}
    assert text_of(lazy, model="small") == expected("qwen3")
    assert statuses(lazy) == {"llama": "unloaded", "small": "loaded", "embeddinggemma": "loaded"}
    assert lazy.post("/v1/models/reload", {"model_id": "llama"}).status == 200
    assert statuses(lazy) == both


def test_models_that_answer_do_not_make_room(lazy: Server) -> None:
    body = {"prompt": "Hello", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    names = ["llama", "small"]
    with ThreadPoolExecutor(8) as pool:
        long = [pool.submit(lazy.post, "/v1/completions", {**body, "model": name}) for name in names]
        vectors = [pool.submit(lazy.post, "/v1/embeddings", {"model": "embeddinggemma", "input": "Hello"}) for _ in range(2)]
        choices = [answer.result().json["choices"][0] for answer in long]
        assert [choice["text"] for choice in choices] == [expected(OWN[name], 300) for name in names]
        assert [answer.result().status for answer in vectors] == [200] * 2


@contextmanager
def no_room(server: Server) -> Iterator[None]:
    """Two models have requests that wait for the end of a pause, so that there is no room for a third."""
    names = ("llama", "small")
    assert [text_of(server, model=name) for name in names] == [expected(OWN[name]) for name in names]
    assert server.post("/admin/pause", {}).status == 200
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(text_of, server, model=name) for name in names]
        wait_until(lambda: in_flight(server) == 2)
        try:
            yield
            assert status_of(server, "embeddinggemma") == "unloaded"
        finally:
            assert server.post("/admin/resume", {}).status == 200
        assert [answer.result(30) for answer in answers] == [expected(OWN[name]) for name in names]


def in_flight(server: Server) -> int:
    return server.get("/health").json["in_flight"]


def test_who_waits_for_a_model_has_its_time_can_be_cancelled_and_counts(lazy: Server) -> None:
    path, body = "/v1/embeddings", {"model": "embeddinggemma", "input": "Hello"}
    with ThreadPoolExecutor(2) as pool:
        with no_room(lazy):
            waiting = {name: pool.submit(lazy.post, path, body, {"x-request-id": name}) for name in "ab"}
            wait_until(lambda: in_flight(lazy) == 4)
            assert lazy.post(path, body).error["code"] == "queue_full"
            assert lazy.send("DELETE", "/admin/requests/a").json == {"cancelled": 1}
            assert (waiting["a"].result(10).status, in_flight(lazy)) == (499, 3)
            with socket.create_connection(("127.0.0.1", lazy.port)) as gone:
                head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(json.dumps(body))}\r\n\r\n"
                gone.sendall(head.encode() + json.dumps(body).encode())
                wait_until(lambda: in_flight(lazy) == 4)
            wait_until(lambda: in_flight(lazy) == 3)
        assert waiting["b"].result(30).status == 200
    with no_room(lazy):
        late = lazy.post(path, {**body, "deadline": 0.2})
        assert (late.status, late.error["code"]) == (504, "deadline_exceeded")
    assert lazy.post(path, {**body, "deadline": 30}).status == 200


def test_a_model_that_would_lose_adapters_does_not_make_room_and_holds_nobody_up(tmp_path: Path) -> None:
    with running("from-config", "-f", written(tmp_path, LAZY + MODELS), MISTRAL_PAGED_LORA_ROOT=str(LORA)) as server:
        # One in the place of an adapter that comes with the model is lost as well.
        body = {"lora_name": "attn", "lora_path": "llama-layers", "model": "llama", "load_inplace": True}
        assert server.post("/v1/load_lora_adapter", body).status == 200
        assert server.post("/v1/models/reload", {"model_id": "small"}).status == 200
        assert server.post("/admin/pause", {}).status == 200
        with ThreadPoolExecutor(2) as pool:
            answer = pool.submit(text_of, server, model="small")
            wait_until(lambda: in_flight(server) == 1)
            vector = pool.submit(server.post, "/v1/embeddings", {"model": "embeddinggemma", "input": "Hello"})
            wait_until(lambda: in_flight(server) == 2)
            assert server.post("/v1/models/unload", {"model_id": "embeddinggemma"}).status == 200
            assert server.post("/admin/resume", {}).status == 200
            assert answer.result(30) == expected("qwen3")
            assert vector.result(30).status == 200
        assert [status_of(server, name) for name in ("llama", "small")] == ["loaded", "unloaded"]


def test_a_first_request_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    text = LAZY.replace("max_loaded_models = 2", "max_loaded_models = 1") + MODELS
    with running("from-config", "-f", written(tmp_path, text)) as server:
        assert text_of(server, model="small") == expected("qwen3")
        assert server.post("/admin/pause", {}).status == 200
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(text_of, server, model="small")
            wait_until(lambda: in_flight(server) == 1)
            for path, body in (
                ("/v1/completions", {"prompt": "Hello"}),
                ("/v1/chat/completions", {"messages": HELLO}),
                ("/v1/embeddings", {"input": "Hello"}),
            ):
                model = "embeddinggemma" if "input" in body else "llama"
                late = server.post(path, {**body, "model": model, "deadline": 0.2})
                assert (late.status, late.error["code"]) == (504, "deadline_exceeded"), path
            assert server.post("/admin/resume", {}).status == 200
            assert answer.result(30) == expected("qwen3")


def test_a_model_is_unloaded_when_it_was_idle_for_long_enough(tmp_path: Path) -> None:
    text = SHARED.replace("[server]", "[server]\nidle_unload = 0.4") + MODELS.replace(
        'alias = "small"', 'alias = "small"\nlazy = true'
    )
    text = text.replace('kind = "embedding"', 'kind = "embedding"\nidle_unload = 1000')
    with running("from-config", "-f", written(tmp_path, text), MISTRAL_PAGED_LORA_ROOT=str(LORA)) as server:
        wait_until(lambda: statuses(server) == {"llama": "unloaded", "small": "unloaded", "embeddinggemma": "loaded"})
        answer = server.complete(model="small", ignore_eos=True, max_tokens=300).json["choices"][0]
        assert (answer["text"], answer["finish_reason"]) == (expected("qwen3", 300), "length")
        begun = time.monotonic()
        wait_until(lambda: status_of(server, "small") == "unloaded")
        assert time.monotonic() - begun > 0.2
        body = {"lora_name": "layers", "lora_path": "llama-layers", "model": "llama"}
        assert server.post("/v1/load_lora_adapter", body).status == 200
        time.sleep(1)
        # It would not have the adapter again.
        assert status_of(server, "llama") == "loaded"
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "layers"}).status == 200
        wait_until(lambda: status_of(server, "llama") == "unloaded")


def test_the_models_of_a_folder_are_served_by_their_names(tmp_path: Path) -> None:
    for name, place in {"one": "text/llama", "two": "text/qwen3"}.items():
        (tmp_path / name).symlink_to(GOLDEN / place)
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "empty").mkdir()
    flags = ["--dtype", "f32", "--port", "0", "--pa-memory-mb", "16", "--num-threads", "1", "--max-loaded-models", "1"]
    with running("serve", "--models-dir", str(tmp_path), *flags) as server:
        assert statuses(server) == {"one": "unloaded", "two": "unloaded"}
        texts = {name: text_of(server, model=name) for name in ("two", "one")}
        assert texts == {"one": expected("llama"), "two": expected("qwen3")}
        assert statuses(server) == {"one": "loaded", "two": "unloaded"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models-dir", "absent"], "--models-dir absent is no folder"),
        (["--models-dir", "EMPTY"], "has no models"),
        (["--models-dir", "PARTS"], "m-00001-of-00002.gguf, a part of a model"),
        (["--models-dir", "EMPTY", "-m", "x"], "cannot be used with"),
        (["--max-loaded-models", "2", "--models-dir", str(GOLDEN / "text")], "has no size"),
    ],
)
def test_a_folder_that_cannot_be_served_says_why(arguments: list[str], message: str, tmp_path: Path) -> None:
    for name in ("EMPTY", "PARTS"):
        (tmp_path / name).mkdir()
    (tmp_path / "PARTS" / "m-00001-of-00002.gguf").write_bytes(b"GGUF")
    arguments = [str(tmp_path / word) if word.isupper() else word for word in arguments]
    done = subprocess.run([str(COMMAND), "serve", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SHARED.replace("[server]", "[server]\nmax_loaded_models = 2") + MODELS, "3 models are loaded at the start, and"),
        (SHARED.replace("[server]", "[server]\nmax_loaded_models = 0") + MODELS, "--max-loaded-models is 0"),
        (SHARED.replace("[server]", "[server]\nidle_unload = 0") + MODELS, "--idle-unload is 0.0"),
        (LAZY + MODELS.replace("llama-attn", "absent"), "llama: "),
        (f"{SHARED}{MODELS}{MODELS}", 'two models are called "llama": give one an alias'),
        (f"{SHARED}{MODELS.replace('small', 'first')}", 'two models are called "first"'),
        (f"{SHARED}{MODELS.replace('small', 'default')}", 'what "llama" is called, the default model'),
        (f"{SHARED}{MODELS.replace('small', 'attn')}", 'the adapter\'s alias "attn" of "llama" is a name of attn already'),
        (f"{SHARED}{MODELS.replace('embeddinggemma', 'absent')}", "absent: "),
        (f"{SHARED.replace('memory_mb', '#')}{MODELS}", "the KV pool of llama has no size"),
        (f'{SHARED}{MODELS}kv_events = "tcp://localhost"', "embeddinggemma: "),
        (SHARED.replace("[runtime]", 'served_model_name = "x"\n[runtime]') + MODELS, "it belongs to [[models]]"),
    ],
)
def test_models_that_cannot_be_served_together_name_the_one(text: str, message: str, tmp_path: Path) -> None:
    command = [str(COMMAND), "from-config", "-f", written(tmp_path, text)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (1, 2)
    assert message in done.stderr
