"""Spans of requests, as a collector gets them: OTLP over HTTP."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from test_server import COMMAND, MODEL, serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "Ozymandias"


class Collector:
    """What it was sent."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.paths: list[str] = []

    def resources(self) -> list[dict[str, Any]]:
        return [attributes(group.resource.attributes) for group in self._groups()]

    def spans(self) -> list[Span]:
        return [span for group in self._groups() for scope in group.scope_spans for span in scope.spans]

    def _groups(self) -> list[Any]:
        return [group for body in self.bodies for group in ExportTraceServiceRequest.FromString(body).resource_spans]


@contextmanager
def collecting(status: int = 200) -> Iterator[tuple[str, Collector]]:
    """A collector's address, and what arrives there; complete when the server has ended."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["content-type"] == "application/x-protobuf"
            collector.paths.append(self.path)
            collector.bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.server_port}", collector
        finally:
            listener.shutdown()
            thread.join()


def value(of: AnyValue) -> Any:
    kind = of.WhichOneof("value")
    assert kind is not None
    return [value(item) for item in of.array_value.values] if kind == "array_value" else getattr(of, kind)


def attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: value(pair.value) for pair in pairs}


def test_an_answer_is_a_span_of_its_caller_s_trace() -> None:
    with collecting() as (address, collector), serving("--otlp-endpoint", address) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4, "temperature": 0.5, "ignore_eos": True}
        reply = server.post("/v1/chat/completions", chat, headers)
        assert reply.status == 200, reply.body
        usage = reply.json["usage"]
        assert server.complete(n=2, max_tokens=3, ignore_eos=True).status == 200
    assert set(collector.paths) == {"/v1/traces"}
    assert {resource["service.name"] for resource in collector.resources()} == {"mistral_paged"}
    assert not any(SECRET.encode() in body for body in collector.bodies)
    spans = collector.spans()
    assert [span.name for span in spans] == ["chat llama", "text_completion llama"]

    chat_span, completion = spans
    assert (chat_span.trace_id.hex(), chat_span.parent_span_id.hex()) == (TRACE, PARENT)
    assert (chat_span.kind, chat_span.status.code) == (Span.SPAN_KIND_SERVER, Status.STATUS_CODE_UNSET)
    assert chat_span.end_time_unix_nano > chat_span.start_time_unix_nano
    told = attributes(chat_span.attributes)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "llama",
        "gen_ai.request.id": "mine",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.choice.count": 1,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 4,
    }
    assert {name: told[name] for name in expected} == expected
    assert 0 < told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"]

    assert completion.parent_span_id == b""
    assert completion.trace_id.hex() != TRACE
    told = attributes(completion.attributes)
    assert told["gen_ai.response.finish_reasons"] == ["length"] * 2
    assert told["gen_ai.usage.output_tokens"] == 6


def test_a_trace_that_is_not_sampled_has_no_span() -> None:
    with collecting() as (address, collector), serving("--otlp-endpoint", address) as server:
        body = {"prompt": "Hello", "max_tokens": 2}
        assert server.post("/v1/completions", body, {"traceparent": f"00-{TRACE}-{PARENT}-00"}).status == 200
        assert server.post("/v1/completions", body, {"traceparent": "garbage"}).status == 200
    [span] = collector.spans()
    assert span.trace_id.hex() != TRACE


def test_a_refused_request_is_a_span_that_says_so() -> None:
    with collecting() as (address, collector), serving("--otlp-endpoint", address) as server:
        assert server.complete(prompt="Hello " * 4000).status == 400
    [span] = collector.spans()
    assert attributes(span.attributes)["error.type"] == "refused"
    assert span.status.code == Status.STATUS_CODE_ERROR


@pytest.mark.parametrize("status", [0, 503])
def test_a_collector_that_fails_is_a_warning(status: int) -> None:
    with collecting(status or 200) as (address, _):
        if status == 0:
            address = "http://127.0.0.1:1"
        with serving("--otlp-endpoint", address) as server:
            assert server.complete().status == 200
            server.process.terminate()
            assert server.process.stderr is not None
            said = server.process.stderr.read()
            assert server.process.wait(20) == 0
    assert said.count("traces do not reach the collector") == 1


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("https://collector:4318", "is https"),
        ("collector:4318", "is no address over HTTP"),
        ("http://", "is no address"),
        ("grpc://collector:4317", "is no address over HTTP"),
    ],
)
def test_an_address_that_cannot_be_used_is_named(address: str, why: str) -> None:
    command = [COMMAND, "serve", "-m", MODEL, "--port", "0", "--pa-memory-mb", "16", "--otlp-endpoint", address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1, ended.stderr
    assert f'--otlp-endpoint "{address}" {why}' in ended.stderr
    assert "give http://HOST:4318" in ended.stderr
