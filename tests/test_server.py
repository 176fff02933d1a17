"""The HTTP server, over sockets: what is sent, and what must come back."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN

from mistral_paged.default_model import default_model

COMMAND = Path(sys.executable).with_name("mistral-paged")
MODEL = str(GOLDEN / "text" / "llama")
HELLO = [{"role": "user", "content": "Hello"}]


@dataclass
class Reply:
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) >= {"message", "type", "param", "code"}
        return error


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    port: int
    headers: dict[str, str] = field(default_factory=dict)

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, {**self.headers, **(headers or {})})
        response = connection.getresponse()
        reply = Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
        connection.close()
        return reply

    def get(self, path: str, **headers: str) -> Reply:
        return self.send("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Reply:
        return self.send("POST", path, body, headers)

    def chat(self, **fields: Any) -> Reply:
        return self.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, "temperature": 0, **fields})

    def complete(self, **fields: Any) -> Reply:
        return self.post("/v1/completions", {"prompt": "Hello", "max_tokens": 4, "temperature": 0, **fields})

    def events(self, path: str, body: Any) -> list[str]:
        """The data of every frame of a stream."""
        reply = self.post(path, {**body, "stream": True})
        assert reply.status == 200, reply.body
        assert reply.headers["content-type"].startswith("text/event-stream")
        frames = reply.body.decode().split("\n\n")
        assert frames.pop() == ""
        return [line[6:] for frame in frames for line in frame.split("\n") if line.startswith("data: ")]

    def metric(self, name: str, **labels: str) -> float:
        page = self.get("/metrics").body.decode()
        for line in page.splitlines():
            if (
                line.startswith(name)
                and line[len(name)] in "{ "
                and all(f'{key}="{value}"' in line for key, value in labels.items())
            ):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name} with {labels}")


@contextmanager
def serving(*arguments: str, model: str = MODEL, memory: str = "16", **environment: str) -> Iterator[Server]:
    """A server on a free port."""
    flags = ["-m", model, "--port", "0", "--pa-memory-mb", memory, "--num-threads", "1", *arguments]
    with running("serve", *flags, **environment) as server:
        yield server


@contextmanager
def running(*arguments: str, **environment: str) -> Iterator[Server]:
    """A server by its command line."""
    process = subprocess.Popen([str(COMMAND), *arguments], stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"at http://[^:]+:(\d+)/v1", line):
                break
        else:
            raise AssertionError(f"the server ended with {process.wait()}")
        yield Server(process, int(found[1]))
    finally:
        process.terminate()
        try:
            process.communicate(timeout=20)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--served-model-name", "other", "--disable-access-log") as server:
        yield server


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    """A server whose long answers run for a while."""
    with serving("--disable-access-log", model=str(default_model()), memory="256") as server:
        yield server


ADDED_BY_VLLM_ROUTER = {
    "stream": False, "logprobs": False, "no_stop_trim": False, "ignore_eos": False, "continue_final_message": False,
    "skip_special_tokens": True, "separate_reasoning": True, "stream_reasoning": True, "return_hidden_states": False,
    "include_reasoning": True,
}  # fmt: skip


def test_what_vllm_router_adds_says_what_is_so_and_the_opposite_is_refused(server: Server) -> None:
    assert server.chat(**ADDED_BY_VLLM_ROUTER).status == 200
    added = {"no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True, "return_hidden_states": False}
    assert server.complete(stream=False, echo=False, **added).status == 200
    for name in ("no_stop_trim", "separate_reasoning", "stream_reasoning", "return_hidden_states"):
        reply = server.chat(**{name: not ADDED_BY_VLLM_ROUTER[name]})
        assert (reply.status, reply.json["error"]["param"]) == (400, name)


def test_a_chat_is_answered(server: Server) -> None:
    reply = server.chat()
    assert reply.status == 200, reply.body
    answer = reply.json
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "llama"
    choice = answer["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("stop", "length")
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_stream_has_its_frames_in_order(server: Server) -> None:
    body = {"messages": HELLO, "max_tokens": 6, "temperature": 0, "n": 2, "stream_options": {"include_usage": True}}
    *frames, last = server.events("/v1/chat/completions", body)
    assert last == "[DONE]"
    chunks = [json.loads(frame) for frame in frames]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    *parts, usage = chunks
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in parts)
    whole = server.chat(max_tokens=6, n=2).json
    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in parts if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[-1]["delta"] == {}
        assert own[-1]["finish_reason"] == whole["choices"][index]["finish_reason"]
        assert all(choice["finish_reason"] is None for choice in own[:-1])
        text = "".join(choice["delta"].get("content", "") for choice in own)
        assert text == whole["choices"][index]["message"]["content"]


def test_a_completion_of_several_prompts_is_numbered_by_prompt_and_choice(server: Server) -> None:
    answer = server.complete(prompt=["Hello", "World"], n=2).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    alone = [server.complete(prompt=prompt).json["choices"][0]["text"] for prompt in ("Hello", "World")]
    assert [choice["text"] for choice in answer["choices"]] == [alone[0], alone[0], alone[1], alone[1]]


def test_an_echo_has_log_probabilities_of_the_prompt(server: Server) -> None:
    ids = server.post("/tokenize", {"prompt": "Hello world, hello"}).json["tokens"]
    choice = server.complete(prompt=ids, echo=True, logprobs=1, max_tokens=1).json["choices"][0]
    lists = choice["logprobs"]
    assert len(lists["tokens"]) == len(ids) + 1
    assert lists["token_logprobs"][0] is None
    assert lists["top_logprobs"][0] is None
    for token, own, top in zip(lists["tokens"][1:], lists["token_logprobs"][1:], lists["top_logprobs"][1:], strict=True):
        assert top[token] == own <= max(top.values())
    streamed = [
        json.loads(frame)
        for frame in server.events(
            "/v1/completions", {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        )[:-1]
    ]
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed if chunk["choices"][0]["logprobs"]]
    assert [offset for part in parts for offset in part["text_offset"]] == lists["text_offset"]


def test_completions_stream_what_they_would_answer(server: Server) -> None:
    frames = server.events("/v1/completions", {"prompt": ["Hello", "World"], "max_tokens": 5, "temperature": 0})
    assert frames[-1] == "[DONE]"
    texts = ["", ""]
    for frame in frames[:-1]:
        choice = json.loads(frame)["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in server.complete(prompt=["Hello", "World"], max_tokens=5).json["choices"]]


def test_a_seed_repeats_and_another_differs(server: Server) -> None:
    texts = [server.complete(temperature=1.5, seed=seed, max_tokens=12).json["choices"][0]["text"] for seed in (1, 1, -2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_stop_string_can_be_kept(server: Server) -> None:
    text = server.complete(max_tokens=8).json["choices"][0]["text"]
    stop = text[2:4]
    without, kept = (server.complete(max_tokens=8, stop=stop, include_stop_str_in_output=keep).json for keep in (False, True))
    assert without["choices"][0]["text"] == text[: text.index(stop)]
    assert kept["choices"][0]["text"] == text[: text.index(stop)] + stop
    assert without["choices"][0]["stop_reason"] == stop
    assert without["choices"][0]["finish_reason"] == "stop"


def test_messages_of_anthropic(server: Server) -> None:
    body = {
        "model": "default",
        "max_tokens": 5,
        "messages": HELLO,
        "system": [{"type": "text", "text": "Be short."}],
        "temperature": 0,
    }
    message = server.post("/v1/messages", body).json
    assert message["type"] == "message"
    assert message["content"][0]["type"] == "text"
    assert message["stop_reason"] in ("end_turn", "max_tokens")
    count = server.post("/v1/messages/count_tokens", {key: body[key] for key in ("model", "messages", "system")}).json
    usage = message["usage"]
    assert count["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    events = [json.loads(event) for event in server.events("/v1/messages", body)]
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[0]["message"]["usage"]["input_tokens"] == count["input_tokens"]
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert text == message["content"][0]["text"]


def test_errors_below_messages_have_anthropics_form(server: Server) -> None:
    reply = server.post("/v1/messages", {"messages": HELLO})
    assert reply.status == 400
    assert reply.json["type"] == "error"
    assert reply.json["error"]["type"] == "invalid_request_error"
    assert reply.json["request_id"] == reply.headers["request-id"]
    assert "max_tokens" in reply.json["error"]["message"]


def test_the_nonce_of_claude_code_is_not_part_of_the_prompt(server: Server) -> None:
    def count(nonce: str) -> int:
        system = [{"type": "text", "text": f"x-anthropic-billing-header: cch={nonce};"}, {"type": "text", "text": "Be short."}]
        return server.post("/v1/messages/count_tokens", {"messages": HELLO, "system": system}).json["input_tokens"]

    plain = server.post("/v1/messages/count_tokens", {"messages": HELLO, "system": "Be short."}).json["input_tokens"]
    assert count("a" * 30) == count("bc") == plain


def test_responses_are_kept_and_gone_on_from(server: Server) -> None:
    first = server.post("/v1/responses", {"input": "Hello", "max_output_tokens": 5, "temperature": 0}).json
    assert first["object"] == "response"
    assert first["status"] in ("completed", "incomplete")
    text = first["output"][0]["content"][0]["text"]
    assert server.get(f"/v1/responses/{first['id']}").json == first
    said = [*HELLO, {"role": "assistant", "content": text}, {"role": "user", "content": "Go on"}]
    body = {"input": "Go on", "previous_response_id": first["id"], "max_output_tokens": 5, "temperature": 0}
    second = server.post("/v1/responses", body).json
    assert (
        second["output"][0]["content"][0]["text"]
        == server.chat(messages=said, max_tokens=5).json["choices"][0]["message"]["content"]
    )
    assert server.send("DELETE", f"/v1/responses/{first['id']}").json["deleted"] is True
    lost = server.post("/v1/responses", body)
    assert (lost.status, lost.error["code"]) == (404, "previous_response_not_found")


def test_a_stream_of_a_response_has_its_events_in_order(server: Server) -> None:
    body = {
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
        "max_output_tokens": 5,
    }
    events = [json.loads(event) for event in server.events("/v1/responses", body)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == text
    assert server.get(f"/v1/responses/{events[-1]['response']['id']}").status == 200


def test_text_goes_to_tokens_and_back(server: Server) -> None:
    answer = server.post("/tokenize", {"prompt": "Hello world", "add_special_tokens": False}).json
    assert answer["count"] == len(answer["tokens"])
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json["prompt"].strip() == "Hello world"
    pieces = server.post("/tokenize", {"content": "Hello", "with_pieces": True}).json["tokens"]
    assert all(set(piece) == {"id", "piece"} for piece in pieces)
    chat = server.post("/apply-template", {"messages": HELLO}).json
    assert "Hello" in chat["prompt"]
    assert chat["tokens"] == server.post("/tokenize", {"messages": HELLO}).json["tokens"]
    assert server.get("/tokenizer_info").json["vocab_size"] > 0


def test_models_by_all_their_names(server: Server) -> None:
    cards = server.get("/v1/models").json["data"]
    assert [card["id"] for card in cards] == ["llama", "other", "default"]
    assert {card["root"] for card in cards} == {"llama"}
    assert server.get("/v1/models/other").json["max_model_len"] == cards[0]["max_model_len"]
    assert server.chat(model="other").status == 200
    anthropic = server.get("/v1/models", anthropic_version="2023-06-01").json
    assert anthropic["data"][0]["type"] == "model"
    for reply in (server.chat(model="gpt-4"), server.get("/v1/models/gpt-4")):
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"foo": 1}, "unknown_parameter", "foo"),
    ({"temprature": 1}, "unknown_parameter", "temprature"),
    ({"temperature": -1}, "invalid_value", "temperature"),
    ({"temperature": "hot"}, "invalid_value", "temperature"),
    ({"top_p": 0}, "invalid_value", "top_p"),
    ({"top_p": 1.5}, "invalid_value", "top_p"),
    ({"top_k": -2}, "invalid_value", "top_k"),
    ({"min_p": 2}, "invalid_value", "min_p"),
    ({"n": 0}, "invalid_value", "n"),
    ({"n": 129}, "invalid_value", "n"),
    ({"n": 1.5}, "invalid_value", "n"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"max_tokens": -1}, "invalid_value", "max_tokens"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "invalid_value", "max_completion_tokens"),
    ({"presence_penalty": 3}, "invalid_value", "presence_penalty"),
    ({"frequency_penalty": -3}, "invalid_value", "frequency_penalty"),
    ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
    ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    ({"top_logprobs": 3}, "invalid_value", "top_logprobs"),
    ({"logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"999999999": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"1": 101}}, "invalid_value", "logit_bias"),
    ({"allowed_token_ids": []}, "invalid_value", "allowed_token_ids"),
    ({"stop": [""]}, "invalid_value", "stop[0]"),
    ({"stop": ["x"] * 17}, "invalid_value", "stop"),
    ({"stop": "x" * 257}, "invalid_value", "stop[0]"),
    ({"stop": 7}, "invalid_value", "stop"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"stream": "yes"}, "invalid_value", "stream"),
    ({"cache_salt": ""}, "invalid_value", "cache_salt"),
    ({"deadline": 0}, "invalid_value", "deadline"),
    ({"priority": 1e10}, "invalid_value", "priority"),
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": [{}]}, "missing_required_parameter", "messages[0].role"),
    ({"messages": ["Hello"]}, "invalid_value", "messages[0]"),
    ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
    ({"messages": [{"role": 3, "content": "x"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "invalid_value", "messages[0].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "images_not_supported",
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "invalid_value", "messages[0].content[0].type"),
    ({"messages": None}, "missing_required_parameter", "messages"),
    ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].function"),
    ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
    ({"audio": {}}, "unsupported_parameter", "audio"),
    ({"web_search_options": {}}, "unsupported_parameter", "web_search_options"),
    ({"store": True}, "unsupported_parameter", "store"),
    ({"service_tier": "flex"}, "unsupported_parameter", "service_tier"),
    ({"modalities": ["audio"]}, "unsupported_parameter", "modalities"),
    ({"chat_template": "{{ 1 }}"}, "unsupported_parameter", "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "invalid_value", "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "invalid_value", "chat_template_kwargs.chat_template"),
    ({"reasoning_effort": "much"}, "invalid_value", "reasoning_effort"),
    ({"dry_base": 2}, "invalid_value", "dry_base"),
    ({"min_tokens": 5, "max_tokens": 4}, "invalid_value", "min_tokens"),
    ({"min_tokens": 2, "allowed_token_ids": [5], "stop_token_ids": [5]}, "invalid_value", "min_tokens"),
    ({"bad_words": ["a", " "]}, "invalid_value", "bad_words[1]"),
    ({"bad_words": ["a"] * 1025}, "invalid_value", "bad_words"),
    ({"prompt_logprobs": 21}, "invalid_value", "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "invalid_value", "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "unsupported_parameter", "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "invalid_value", "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "invalid_value", "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -1, "truncation_side": "right"}, "invalid_value", "truncate_prompt_tokens"),
    ({"truncation_side": "left"}, "invalid_value", "truncation_side"),
    ({"truncate_prompt_tokens": 3, "truncation_side": "middle"}, "invalid_value", "truncation_side"),
    (
        {"skip_special_tokens": False, "spaces_between_special_tokens": True},
        "unsupported_parameter",
        "spaces_between_special_tokens",
    ),
]


@pytest.mark.parametrize(("fields", "code", "param"), BAD, ids=[f"{param}-{i}" for i, (_, _, param) in enumerate(BAD)])
def test_what_cannot_be_honoured_is_refused_by_name(server: Server, fields: dict[str, Any], code: str, param: str) -> None:
    reply = server.chat(**fields)
    assert reply.status == 400, reply.body
    assert (reply.error["code"], reply.error["param"]) == (code, param), reply.error


FINE: list[dict[str, Any]] = [
    {"logprobs": None, "stop": None, "seed": None, "tools": None},
    {"user": "someone", "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "k"},
    {"store": False, "service_tier": "auto", "modalities": ["text"], "verbosity": "medium", "tools": [], "tool_choice": "none"},
    {"response_format": {"type": "text"}, "parallel_tool_calls": True},
    {"max_tokens": 4, "max_completion_tokens": 4},
    {"top_k": -1, "min_p": 0, "repetition_penalty": 1.1, "logit_bias": {"5": -100}, "allowed_token_ids": [1, 2, 3]},
    {"stop_token_ids": [3], "ignore_eos": True, "priority": -1, "cache_salt": "s", "deadline": 30.5, "truncate_sequence": True},
    {"messages": [{"role": "developer", "content": "Be short."}, *HELLO]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
    {"messages": [*HELLO, {"role": "assistant", "content": "Well"}], "continue_final_message": True},
    {"enable_thinking": False, "reasoning_effort": "low"},
    {"chat_template_kwargs": {"x": 1}, "documents": []},
    {"min_tokens": 4, "bad_words": [], "skip_special_tokens": True, "spaces_between_special_tokens": True},
    {"return_token_ids": False, "return_tokens_as_token_ids": False, "truncate_prompt_tokens": -1},
]


@pytest.mark.parametrize("fields", FINE, ids=[",".join(fields) for fields in FINE])
def test_what_is_honoured_true_anyway_or_a_label_is_accepted(server: Server, fields: dict[str, Any]) -> None:
    reply = server.chat(**fields)
    assert reply.status == 200, reply.body


def test_a_model_of_text_makes_no_transcriptions_of_anything(server: Server) -> None:
    reply = server.post("/v1/audio/transcriptions", {"file": "x"})
    assert (reply.status, reply.error["code"]) == (400, "audio_not_supported")


def test_nothing_ends_an_answer_before_its_least_number_of_tokens(server: Server) -> None:
    ids = server.complete(max_tokens=8, ignore_eos=True, return_token_ids=True).json["choices"][0]["token_ids"]
    stopped = server.complete(max_tokens=20, ignore_eos=True, stop_token_ids=[ids[0]], return_token_ids=True).json
    assert stopped["choices"][0]["token_ids"] == ids[:1]
    least = server.complete(max_tokens=20, ignore_eos=True, stop_token_ids=[ids[0]], min_tokens=8, return_token_ids=True).json
    assert len(least["choices"][0]["token_ids"]) > 8
    assert ids[0] not in least["choices"][0]["token_ids"][:8]


def test_bad_words_do_not_come(server: Server) -> None:
    text = server.complete(max_tokens=16, ignore_eos=True).json["choices"][0]["text"]
    word = re.findall(r"[A-Za-z]{3,}", text)[0]
    without = server.complete(max_tokens=16, ignore_eos=True, bad_words=[word]).json["choices"][0]["text"]
    # A space may be part of the word's token.
    before = text[: text.index(word)].rstrip()
    assert without.startswith(before)
    assert not without.removeprefix(before).lstrip().startswith(word)


def test_special_tokens_are_text_when_asked_for(server: Server) -> None:
    info = server.get("/tokenizer_info").json
    special = next(id for id in range(512) if id not in info["eos_token_ids"] and piece(server, id) == info["bos_token"])
    body = {"allowed_token_ids": [special], "max_tokens": 3}
    assert server.complete(**body).json["choices"][0]["text"] == ""
    assert server.complete(**body, skip_special_tokens=False).json["choices"][0]["text"] == info["bos_token"] * 3
    frames = server.events("/v1/completions", {"prompt": "Hello", **body, "skip_special_tokens": False})[:-1]
    assert "".join(json.loads(frame)["choices"][0]["text"] for frame in frames) == info["bos_token"] * 3


def piece(server: Server, token_id: int) -> str:
    return str(server.post("/detokenize", {"tokens": [token_id]}).json["prompt"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_ids_of_prompt_and_answer_come_with_the_text(server: Server, path: str) -> None:
    is_chat = path == "/v1/chat/completions"
    body = {"messages": HELLO} if is_chat else {"prompt": ["Hello", "World"]}
    body |= {"max_tokens": 6, "temperature": 0, "n": 2, "ignore_eos": True, "logprobs": True if is_chat else 0}
    asked = {**body, "return_token_ids": True, "return_tokens_as_token_ids": True}
    whole = server.post(path, asked).json
    prompts = [
        server.post("/tokenize", {"messages": HELLO} if is_chat else {"prompt": prompt}).json["tokens"]
        for prompt in body.get("prompt", [None])
    ]
    given = [whole["prompt_token_ids"]] if is_chat else [choice["prompt_token_ids"] for choice in whole["choices"][::2]]
    assert given == prompts
    ids = [choice["token_ids"] for choice in whole["choices"]]
    assert [len(each) for each in ids] == [6] * len(ids)
    for choice in whole["choices"]:
        lists = choice["logprobs"]
        names = [token["token"] for token in lists["content"]] if is_chat else lists["tokens"]
        assert names == [f"token_id:{id}" for id in choice["token_ids"]]
    chunks = [json.loads(frame) for frame in server.events(path, asked)[:-1]]
    streamed: list[list[int]] = [[] for _ in ids]
    given_once: list[list[int]] = []
    for chunk in chunks:
        choice = chunk["choices"][0]
        streamed[choice["index"]] += choice.get("token_ids") or []
        given_once += [at["prompt_token_ids"] for at in (chunk, choice) if "prompt_token_ids" in at]
    assert streamed == ids
    assert sorted(given_once) == sorted(prompts * 2)
    plain = server.post(path, body).json
    assert "prompt_token_ids" not in plain
    assert all("token_ids" not in choice and "prompt_token_ids" not in choice for choice in plain["choices"])


def test_log_probabilities_of_a_prompt_are_those_of_its_echo(server: Server) -> None:
    ids = server.post("/tokenize", {"prompt": "Hello world, hello"}).json["tokens"]
    echo = server.complete(prompt=ids, echo=True, logprobs=2, max_tokens=1, return_tokens_as_token_ids=True).json
    lists = echo["choices"][0]["logprobs"]
    answer = server.complete(prompt=[ids, ids[:3]], prompt_logprobs=2, max_tokens=1).json
    assert answer["choices"][1]["prompt_logprobs"] == answer["choices"][0]["prompt_logprobs"][:3]
    entries = answer["choices"][0]["prompt_logprobs"]
    assert len(entries) == len(ids)
    assert entries[0] is None
    for id, entry, own, top in zip(ids[1:], entries[1:], lists["token_logprobs"][1:], lists["top_logprobs"][1:], strict=False):
        assert entry[str(id)]["logprob"] == own
        assert entry[str(id)]["decoded_token"] == piece(server, id)
        assert {f"token_id:{other}": each["logprob"] for other, each in entry.items()} == top
        ranks = [each["rank"] for each in sorted(entry.values(), key=lambda each: -each["logprob"])]
        assert ranks[:2] == [1, 2]
        assert ranks == sorted(ranks)
    chat = server.chat(prompt_logprobs=0).json
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_a_log_probability_is_the_python_apis_to_the_digit(server: Server) -> None:
    from mistral_paged import CompletionRequest, Runner, Which

    with Runner(which=Which.Plain(MODEL), pa_gpu_mem=16, num_threads=1) as runner:
        request = CompletionRequest(prompt="Hello", model="default", max_tokens=4, temperature=0, logprobs=0)
        logprobs = runner.send_completion_request(request).choices[0].logprobs
    assert logprobs is not None
    answer = server.complete(logprobs=0).json["choices"][0]["logprobs"]["token_logprobs"]
    assert answer == [token.logprob for token in logprobs.content]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/messages", {"messages": [["Hello"]], "max_tokens": 1}, "messages[0]"),
    ("/v1/messages", {"messages": ["Hello"], "max_tokens": 1}, "messages[0]"),
    ("/v1/messages/count_tokens", {"messages": HELLO, "temperature": -1}, "temperature"),
    ("/v1/messages/count_tokens", {"messages": HELLO, "stop_sequences": [""]}, "stop_sequences[0]"),
    ("/v1/responses/input_tokens", {"input": "Hello", "top_p": 2}, "top_p"),
    ("/apply-template", {"messages": HELLO, "min_p": 2}, "min_p"),
    ("/detokenize", {"tokens": [1, 512]}, "tokens[1]"),
    ("/v1/completions", {"prompt": "Hello", "deadline": 1e-9}, "deadline"),
    ("/v1/completions", {"prompt": "Hello", "suffix": "x"}, "suffix"),
    ("/v1/completions", {"prompt": [47, 76], "suffix": "x"}, "suffix"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED, ids=[f"{path}-{param}" for path, _, param in REFUSED])
def test_routes_that_only_count_or_convert_refuse_by_name_as_well(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    reply = server.post(path, body)
    assert reply.status == 400, reply.body
    assert param in reply.json["error"]["message"]


def test_an_integer_may_be_written_with_a_point(server: Server) -> None:
    pointed, plain = (
        server.complete(prompt=prompt, max_tokens=most).json for prompt, most in (([47.0, 76.0], 3.0), ([47, 76], 3))
    )
    assert pointed["choices"] == plain["choices"]
    assert server.complete(max_tokens=3.5).error["param"] == "max_tokens"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"null", b'"x"', b'{"messages": NaN}', b"\xff\xfe", b"[" * 300])
def test_a_body_that_is_no_object_is_one_400(server: Server, body: bytes) -> None:
    reply = server.post("/v1/chat/completions", body)
    assert (reply.status, reply.error["code"]) == (400, "invalid_json")


def test_a_prompt_that_is_too_long_says_how_long_it_may_be(server: Server) -> None:
    limit = server.get("/v1/models").json["data"][0]["max_model_len"]
    reply = server.complete(prompt=[5] * (limit + 10))
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert f"maximum context length is {limit} tokens" in reply.error["message"]
    assert (reply.error["n_prompt_tokens"], reply.error["n_ctx"]) == (limit + 10, limit)
    cut = server.complete(prompt=[5] * (limit + 10), truncate_sequence=True)
    assert cut.status == 200


def test_a_large_limit_of_tokens_is_a_ceiling(server: Server) -> None:
    reply = server.chat(max_tokens=64_000, stop=None)
    assert reply.status == 200
    assert reply.json["choices"][0]["finish_reason"] in ("length", "stop")


def test_routes_that_are_not_there(server: Server) -> None:
    for method, path, status, code in (
        ("GET", "/nix", 404, "route_not_found"),
        ("POST", "/api/chat", 404, "route_not_found"),
        ("POST", "/v1/images/generations", 404, "route_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("POST", "/v1/models/tune", 501, "not_implemented"),
    ):
        reply = server.send(method, path, {} if method == "POST" else None)
        assert (reply.status, reply.error["code"]) == (status, code), path
    assert server.send("POST", "/v1/chat/completions", b"x", {"content-type": "multipart/form-data"}).status == 415


def test_a_request_id_is_echoed_if_it_is_plain(server: Server) -> None:
    assert server.get("/live", x_request_id="abc-1.2_3").headers["x-request-id"] == "abc-1.2_3"
    for bad in ("a b", "x" * 129, "ä".encode().decode("latin-1"), "<script>"):
        assert server.get("/live", x_request_id=bad).headers["x-request-id"].startswith("req-")


def test_pages_of_other_origins_and_names_are_refused(server: Server) -> None:
    assert server.get("/v1/models", origin="http://evil.example").status == 403
    assert server.get("/v1/models", origin=f"http://127.0.0.1:{server.port}").status == 200
    assert server.get("/v1/models", host="evil.example").status == 403
    assert server.get("/v1/models", host=f"localhost:{server.port}").status == 200


def test_special_tokens_in_a_message_stay_text(server: Server) -> None:
    """The count of a special token in the prompt is the template's own, whatever a message says."""
    info = server.get("/tokenizer_info").json
    eos = info["eos_token"]
    eos_id = info["eos_token_ids"][0]

    def tokens(content: str) -> list[int]:
        return server.post("/tokenize", {"messages": [{"role": "user", "content": content}]}).json["tokens"]

    assert tokens(f"a{eos}b").count(eos_id) == tokens("ab").count(eos_id)
    prompt = server.post("/apply-template", {"messages": [{"role": "user", "content": f"a{eos}b"}]}).json["prompt"]
    assert f"a{eos}b" in prompt


def test_metrics_count_what_was_done(server: Server) -> None:
    before = server.metric("vllm:generation_tokens_total")
    answer = server.complete(max_tokens=7, ignore_eos=True).json
    assert answer["usage"]["completion_tokens"] == 7
    assert server.metric("vllm:generation_tokens_total") == before + 7
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:request_success_total", finished_reason="length") >= 1
    assert server.metric("mistralrs_kv_cache_blocks_total") > 0
    assert server.metric("vllm:time_to_first_token_seconds_count") >= 1


def test_the_times_of_a_request_add_up_in_the_metrics(server: Server) -> None:
    names = ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time", "request_inference_time")

    def figures() -> tuple[list[float], list[float]]:
        of = [f"vllm:{name}_seconds" for name in names]
        return [server.metric(f"{name}_count") for name in of], [server.metric(f"{name}_sum") for name in of]

    steps, tokens = (server.metric(f"vllm:iteration_tokens_total_{name}") for name in ("count", "sum"))
    counts, sums = figures()
    answer = server.complete(prompt=list(range(40, 90)), max_tokens=7, ignore_eos=True, cache_salt="steps")
    assert answer.status == 200
    after, sums_after = figures()
    assert [new - old for new, old in zip(after, counts, strict=True)] == [1] * len(names)
    whole, queue, prefill, decode, inference = (new - old for new, old in zip(sums_after, sums, strict=True))
    assert queue + prefill + decode == pytest.approx(whole, abs=1e-6)
    assert prefill + decode == pytest.approx(inference, abs=1e-6)
    # The prompt's tokens in one step or more, and then a token a step but the last, which nothing is computed from.
    assert server.metric("vllm:iteration_tokens_total_sum") - tokens == 50 + 6
    new_steps = server.metric("vllm:iteration_tokens_total_count") - steps
    assert 7 <= new_steps <= 10
    assert server.metric("vllm:iteration_tokens_total_bucket", le="1") >= 6
    assert server.metric("vllm:iteration_tokens_total_bucket", le="+Inf") == steps + new_steps
    assert "vllm:time_per_output_token_seconds_count" in server.get("/metrics").body.decode()


def test_health_and_what_runs(server: Server) -> None:
    assert server.get("/live").json == {"status": "ok"}
    assert server.get("/ready").status == 200
    health = server.get("/health").json
    assert health["status"] == "ok"
    assert health["is_busy"] is False
    info = server.get("/v1/system/info").json
    assert info["architecture"] == "llama"
    assert info["kv_cache_bytes"] > 0
    document = server.get("/openapi.json").json
    assert "/v1/chat/completions" in document["paths"]
    assert b"max_completion_tokens" in server.get("/docs").body


def wait_until(holds: Any, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.05)


def raw(
    server: Server, body: dict[str, Any], path: str = "/v1/completions", headers: dict[str, str] | None = None
) -> socket.socket:
    """A connection over which a request was sent."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    lines = [f"{name}: {value}" for name, value in (headers or {}).items()]
    head = "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}", *lines, "", ""])
    connection.sendall(head.encode() + data)
    return connection


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """What comes over a connection up to these bytes."""
    answer = b""
    while end not in answer:
        part = connection.recv(65536)
        assert part, answer
        answer += part
    return answer


def rest(connection: socket.socket) -> bytes:
    """All that still comes over a connection."""
    answer = b""
    while part := connection.recv(65536):
        answer += part
    return answer


LONG = {"prompt": "Hello", "max_tokens": 100_000, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_a_client_that_goes_frees_its_blocks(slow: Server, stream: bool, how: str) -> None:
    connection = raw(slow, {**LONG, "stream": stream, "n": 3})
    wait_until(lambda: slow.metric("vllm:num_requests_running") > 0)
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    if how == "half":
        connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: slow.metric("mistralrs_kv_cache_blocks_used") == 0)
    connection.close()
    wait_until(lambda: slow.metric("mistralrs_kv_cache_blocks_used") == 0)
    assert slow.get("/health").json["in_flight"] == 0


def test_a_request_that_comes_byte_by_byte_is_served(server: Server) -> None:
    data = json.dumps({"prompt": "Hi", "max_tokens": 2}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        for byte in head.encode() + data:
            connection.sendall(bytes([byte]))
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 200")


def test_a_slow_reader_loses_nothing(server: Server) -> None:
    body = {"prompt": "Hello", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    with raw(server, {**body, "stream": True}) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        answer = b""
        while b"[DONE]" not in answer:
            answer += connection.recv(512)
            time.sleep(0.002)
    frames = re.findall(rb"data: (\{.*\})\n\n", answer)
    text = "".join(json.loads(frame)["choices"][0]["text"] for frame in frames)
    assert text == server.post("/v1/completions", body).json["choices"][0]["text"]


def test_many_streams_at_once_lose_and_mix_up_nothing(server: Server) -> None:
    bodies = [{"prompt": f"Hello {i}", "max_tokens": 24, "temperature": 0, "ignore_eos": True} for i in range(64)]

    def stream(body: dict[str, Any]) -> str:
        frames = server.events("/v1/completions", body)
        assert frames.pop() == "[DONE]"
        return "".join(json.loads(frame)["choices"][0]["text"] for frame in frames)

    with ThreadPoolExecutor(64) as threads:
        streamed = list(threads.map(stream, bodies))
    assert streamed == [server.post("/v1/completions", body).json["choices"][0]["text"] for body in bodies]


def test_keys_guard_all_but_health_and_part_tenants(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[[keys]]\nkey = "one"\ntenant = "a"\n[[keys]]\nkey = "two"\ntenant = "b"\n[[keys]]\nkey = "root"\nadmin = true\n'
    )
    with serving("--api-keys", str(keys), "--disable-access-log") as server:
        for path in ("/v1/models", "/metrics", "/tokenizer_info", "/openapi.json", "/ui/events"):
            reply = server.get(path)
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key"), path
        for path in ("/health", "/live", "/ready", "/ui"):
            assert server.get(path).status == 200, path
        assert server.get("/v1/models", authorization="Bearer wrong").status == 401
        assert server.get("/v1/models", authorization="Bearer one").status == 200
        assert server.get("/v1/models", x_api_key="two").status == 200
        prompt = list(range(3, 99))

        def cached(key: str) -> int:
            body = {"prompt": prompt, "max_tokens": 1}
            reply = server.post("/v1/completions", body, {"authorization": f"Bearer {key}"})
            return reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached("one") == 0
        assert cached("one") > 0
        assert cached("two") == 0
        kept = server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 1}, {"x-api-key": "one"}).json["id"]
        assert server.get(f"/v1/responses/{kept}", x_api_key="two").status == 404
        assert server.get(f"/v1/responses/{kept}", x_api_key="one").status == 200
        assert server.send("POST", "/admin/pause", headers={"x-api-key": "one"}).status == 403
        assert server.send("POST", "/admin/pause", headers={"x-api-key": "root"}).status == 200
        assert server.send("POST", "/admin/resume", headers={"x-api-key": "root"}).status == 200


def test_a_file_of_keys_may_have_hashes_and_limits(tmp_path: Path) -> None:
    hashed = hashlib.sha256(b"hidden").hexdigest()
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nsha256 = "{hashed.upper()}"\nmax_in_flight = 2\n[[keys]]\nkey = "free"\n')
    options = ["--api-keys", str(keys), "--disable-access-log"]
    with serving(*options, model=str(default_model()), memory="256") as server:
        few, free = ({"authorization": f"Bearer {key}"} for key in ("hidden", "free"))
        assert server.get("/v1/models", authorization=f"Bearer {hashed}").status == 401
        assert server.get("/v1/models", **few).status == 200
        connections = [raw(server, LONG, headers=few) for _ in range(2)]
        wait_until(lambda: server.get("/health").json["in_flight"] == 2)
        body = {"prompt": "Hello", "max_tokens": 1}
        reply = server.post("/v1/completions", body, few)
        assert (reply.status, reply.error["code"]) == (429, "tenant_limit")
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        assert server.post("/v1/completions", body, free).status == 200
        server.headers = free
        assert server.metric("vllm:admission_rejections_total", reason="tenant_limit") == 1
        for connection in connections:
            connection.close()
        wait_until(lambda: server.post("/v1/completions", {**body, "n": 2}, few).status == 200)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ('key = "a"\nsha256 = "00"', "either key or sha256"),
        ('tenant = "a"', "either key or sha256"),
        ('sha256 = "xyz"', "64 hexadecimal digits"),
        ('key = "a"\nmax_in_flight = 0', "at least 1"),
        ('key = "a"\nmax_in_flight = "2"', "no int"),
        ('key = "a"\nweight = 2', "weight"),
        ('key = "a"\ntenant = "b"\nweight = 2', "add --fairness drr"),
        ('key = "a"\ntenant = "b"\nweight = 0', "at least 1"),
    ],
)
def test_a_file_of_keys_that_cannot_be_honoured_is_refused(tmp_path: Path, entry: str, says: str) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f"[[keys]]\n{entry}\n")
    done = subprocess.run(
        [str(COMMAND), "serve", "-m", MODEL, "--api-keys", str(keys)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_more_waiting_tokens_than_allowed_are_refused() -> None:
    limits = ["--max-queued-tokens", "300", "--max-seqs", "1"]
    with serving(*limits, "--disable-access-log", model=str(default_model()), memory="256") as server:
        runs = raw(server, LONG)
        wait_until(lambda: server.metric("vllm:num_requests_running") == 1)
        # Alone in the queue it may be as long as it likes.
        waits = raw(server, {"prompt": list(range(1000, 1250)), "max_tokens": 1})
        wait_until(lambda: server.metric("vllm:num_requests_waiting") == 1)
        reply = server.complete(prompt=[5] * 51)
        assert (reply.status, reply.error["code"]) == (429, "queue_full")
        assert "250 tokens wait" in reply.error["message"]
        fits = raw(server, {"prompt": [5] * 50, "max_tokens": 1})
        wait_until(lambda: server.metric("vllm:num_requests_waiting") == 2)
        runs.close()
        for connection in (waits, fits):
            assert read_until(connection, b"}").startswith(b"HTTP/1.1 200")
            connection.close()
        wait_until(lambda: server.complete(prompt=[5] * 400, max_tokens=1).status == 200)


def test_an_operator_cancels_a_request_by_its_id(slow: Server) -> None:
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(slow.post, "/v1/completions", LONG, {"x-request-id": "to-end"})
        wait_until(lambda: slow.get("/health").json["in_flight"] > 0)
        assert slow.send("DELETE", "/admin/requests/to-end").json == {"cancelled": 1}
        assert answer.result().error["code"] == "cancelled"
    reply = slow.send("DELETE", "/admin/requests/to-end")
    assert (reply.status, reply.error["code"]) == (404, "request_not_found")
    wait_until(lambda: slow.metric("mistralrs_kv_cache_blocks_used") == 0)


def test_a_full_queue_says_when_to_come_again() -> None:
    limits = ["--max-queued", "1", "--max-seqs", "1"]
    with serving(*limits, "--disable-access-log", model=str(default_model()), memory="256") as server:
        connections = [raw(server, LONG) for _ in range(2)]
        wait_until(lambda: server.get("/health").json["in_flight"] == 2)
        reply = server.complete()
        assert (reply.status, reply.error["code"]) == (429, "queue_full")
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        assert server.get("/ready").json == {
            "status": "full",
            "stuck": [],
            "full": [server.get("/v1/models").json["data"][0]["id"]],
        }
        for connection in connections:
            connection.close()
        wait_until(lambda: server.complete().status == 200)


def test_a_body_that_is_too_large_is_refused() -> None:
    with serving("--max-body-mb", "1", "--disable-access-log") as server:
        reply = server.complete(prompt="x" * (2 << 20))
        assert (reply.status, reply.error["code"]) == (413, "request_too_large")


def test_a_browser_may_call_from_an_allowed_origin() -> None:
    with serving("--cors-origin", "http://page.example", "--disable-access-log") as server:
        reply = server.get("/v1/models", origin="http://page.example")
        assert reply.headers["access-control-allow-origin"] == "http://page.example"
        preflight = server.send("OPTIONS", "/v1/chat/completions", headers={"origin": "http://page.example"})
        assert preflight.status == 204
        assert server.get("/v1/models", origin="http://other.example").status == 403


def test_a_unix_socket_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    process = subprocess.Popen(
        [str(COMMAND), "serve", "-m", MODEL, "--host", f"unix:{path}", "--pa-memory-mb", "16"], stderr=subprocess.DEVNULL
    )
    try:
        wait_until(path.exists, 30)
        assert path.stat().st_mode & 0o777 == 0o600
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    finally:
        process.terminate()
        assert process.wait(20) == 0
    assert not path.exists()


def test_sigterm_lets_what_runs_end() -> None:
    with serving("--disable-access-log", model=str(default_model()), memory="256") as server:
        with raw(server, {"prompt": "Hello", "max_tokens": 100, "ignore_eos": True, "stream": True}) as connection:
            begun = read_until(connection, b"data: ")
            server.process.send_signal(signal.SIGTERM)
            assert b"[DONE]" not in begun
            assert b"[DONE]" in rest(connection)
        assert server.process.wait(20) == 0


def test_sigterm_ends_a_stream_with_an_error_when_its_time_is_over() -> None:
    with serving("--shutdown-timeout", "0.2", "--disable-access-log", model=str(default_model()), memory="256") as server:
        with raw(server, {**LONG, "stream": True}) as connection:
            read_until(connection, b"data: ")
            server.process.send_signal(signal.SIGTERM)
            answer = rest(connection)
        assert b'"code":"draining"' in answer
        assert server.process.wait(20) == 143


def test_sigterm_before_the_server_listens_ends_it() -> None:
    command = [str(COMMAND), "serve", "-m", str(default_model()), "--port", "0"]
    for delay in (0.05, 0.3):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        time.sleep(delay)
        process.terminate()
        # By then it may listen: it has drained.
        assert process.wait(20) in (0, 143, -signal.SIGTERM)


def test_sigterm_ends_an_idle_server_and_connections_that_ask_nothing() -> None:
    with serving("--disable-access-log") as server:
        address = ("127.0.0.1", server.port)
        with socket.create_connection(address) as silent, socket.create_connection(address) as kept:
            kept.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            read_until(kept, b"}")
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(15) == 0
            assert rest(silent) == rest(kept) == b""


def test_sigterm_lets_what_waits_have_its_answer() -> None:
    options = ["--max-seqs", "1", "--disable-access-log"]
    with serving(*options, model=str(default_model()), memory="256") as server:
        with raw(server, {"prompt": "Hello", "max_tokens": 300, "ignore_eos": True, "stream": True}) as runs:
            wait_until(lambda: server.metric("vllm:num_requests_running") == 1)
            with raw(server, {"prompt": "World", "max_tokens": 4, "ignore_eos": True}) as waits:
                wait_until(lambda: server.metric("vllm:num_requests_waiting") == 1)
                server.process.send_signal(signal.SIGTERM)
                assert b"[DONE]" in rest(runs)
                answer = rest(waits)
        assert answer.startswith(b"HTTP/1.1 200")
        assert json.loads(answer.split(b"\r\n\r\n")[1])["usage"]["completion_tokens"] == 4
        assert server.process.wait(20) == 0


def test_after_sigterm_a_body_that_is_still_coming_is_refused_as_draining() -> None:
    with serving("--disable-access-log") as server:
        data = json.dumps({"prompt": "Hello", "max_tokens": 2}).encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
            connection.sendall(head.encode() + data[:5])
            wait_until(lambda: server.metric("http_requests_in_flight") == 2)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: is_refused(server.port))
            connection.sendall(data[5:])
            answer = rest(connection)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b'"code":"draining"' in answer
        assert server.process.wait(20) == 0


def is_refused(port: int) -> bool:
    """Nobody listens any more. A connection that nobody has accepted when the listener closes is reset."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    return False


def test_sigterm_ends_a_paused_server_when_its_time_is_over() -> None:
    with serving("--shutdown-timeout", "0.3", "--disable-access-log") as server:
        assert server.post("/admin/pause", None).status == 200
        with raw(server, {"prompt": "Hello", "max_tokens": 4}) as waits:
            wait_until(lambda: server.get("/health").json["in_flight"] == 1)
            server.process.send_signal(signal.SIGTERM)
            answer = rest(waits)
        assert b'"code":"draining"' in answer
        assert server.process.wait(20) == 143


def test_a_second_signal_ends_the_server_at_once() -> None:
    with serving("--disable-access-log", model=str(default_model()), memory="256") as server:
        with raw(server, {**LONG, "stream": True}) as connection:
            read_until(connection, b"data: ")
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: is_refused(server.port))
            server.process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            answer = rest(connection)
            assert server.process.wait(20) == 143
            assert time.monotonic() - began < 10, "the 30 s of a drain were waited for"
        assert b'"code":"draining"' in answer


def test_ctrl_c_ends_an_idle_server() -> None:
    with serving() as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 130


def test_the_access_log_has_no_word_of_a_prompt() -> None:
    with serving("--access-log-format", "json") as server:
        server.chat(messages=[{"role": "user", "content": "zebra"}])
        server.get("/health")
        server.get("/x%0aGET")
        server.process.send_signal(signal.SIGTERM)
        _, log = server.process.communicate(timeout=20)
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [
        ("POST", "/v1/chat/completions", 200),
        ("GET", "/x%0aGET", 404),
    ]
    assert "zebra" not in log


def test_a_panic_or_a_bad_setting_is_an_error_before_loading(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(COMMAND), "serve", "-m", MODEL, *arguments], capture_output=True, text=True, timeout=60, check=False
        )

    assert run("--port", "70000").returncode == 2
    assert "--from-uqff <FILE>" in run("--from-uqff", "x").stderr
    assert run("--from-uqff", "x").returncode == 2
    both = run("--pa-memory-mb", "5", "--pa-context-len", "5")
    assert both.returncode == 2
    assert "cannot be used with" in both.stderr
    assert run("speech").returncode == 2
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("--port", str(taken.getsockname()[1]), "--pa-memory-mb", "16")
    assert done.returncode == 1
    assert "cannot listen" in done.stderr
