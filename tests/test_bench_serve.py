"""`mistral-paged bench serve`, against servers that say and wait what a test wants, and against ours."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from test_server import serving

from mistral_paged import bench_serve, cli, flags
from mistral_paged.bench_serve import Outcome, Target
from mistral_paged.default_model import default_model
from mistral_paged.exceptions import MistralPagedError

Answer = Callable[[Any, Callable[[bytes], None]], None]
"""What a server does with a request's body and a way to send bytes."""
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


class Fake(socketserver.ThreadingTCPServer):
    """A server of chat completions."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.bodies: list[Any] = []
        self.heads: list[str] = []
        self.running = self.most = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(socketserver.StreamRequestHandler):
    server: Fake

    def handle(self) -> None:
        head = ""
        while not head.endswith("\r\n\r\n"):
            head += self.rfile.readline().decode()
        length = next((int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length:")), 0)
        body = self.rfile.read(length)
        self.server.heads.append(head)
        if head.startswith("GET /v1/models "):
            listed = json.dumps({"data": [{"id": "tiny"}, {"id": "other"}]}).encode()
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(listed), listed))
            return
        with self.server.lock:
            self.server.bodies.append(json.loads(body))
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
        self.is_running = True
        try:
            self.server.answer(json.loads(body), self.send)
        finally:
            self.end()

    def send(self, data: bytes) -> None:
        if data.endswith(LAST_CHUNK):
            # The client may ask again before this thread goes on.
            self.end()
        self.wfile.write(data)

    def end(self) -> None:
        with self.server.lock:
            if self.is_running:
                self.server.running -= 1
            self.is_running = False


@contextmanager
def fake(answer: Answer) -> Iterator[Fake]:
    with Fake(answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def chunk(payload: str) -> bytes:
    line = f"data: {payload}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(line), line)


def piece(**delta: Any) -> bytes:
    return chunk(json.dumps({"choices": [{"index": 0, "delta": delta}], "usage": None}))


def ending(prompt: int, completion: int) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    return chunk(json.dumps({"choices": [], "usage": usage})) + chunk("[DONE]") + LAST_CHUNK


def told(tokens: int, first: float = 0.0, gap: float = 0.0) -> Answer:
    """A server whose tokens come after `first` seconds and then every `gap` seconds."""

    def answer(_: Any, send: Callable[[bytes], None]) -> None:
        send(HEAD + piece(role="assistant", content=""))
        time.sleep(first)
        for index in range(tokens):
            send(piece(content=f"w{index} "))
            time.sleep(gap if index < tokens - 1 else 0)
        send(ending(7, tokens))

    return answer


def bench(server: Fake, capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    assert cli.main(["bench", "serve", "--url", server.url, "--json", *arguments]) == status
    return json.loads(capsys.readouterr().out)


def test_times_are_those_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    with fake(told(5, first=0.2, gap=0.1)) as server:
        found = bench(server, capsys, "--requests", "4", "--concurrency", "4")
    assert found["answered"] == found["requests"] == server.most == 4
    assert (found["prompt_tokens"], found["output_tokens"]) == (28, 20)
    assert 200 <= found["ttft_ms"]["p50"] < 400
    assert 90 <= found["itl_ms"]["p50"] < 150
    assert 600 <= found["e2e_ms"]["p50"] < 900
    assert found["output_tokens_per_s"] == pytest.approx(20 / found["duration_s"])
    assert found["errors"] == {}


def test_what_a_request_says(capsys: pytest.CaptureFixture[str]) -> None:
    with fake(told(1)) as server:
        bench(server, capsys, "--requests", "2", "--max-tokens", "9", "--api-key", "secret", "--ignore-eos")
        named = bench(server, capsys, "--requests", "1", "--model", "mine")
    assert named["answered"] == 1
    for body in server.bodies[:2]:
        assert body.pop("messages")[0]["role"] == "user"
        assert body == {
            "model": "tiny",
            "max_tokens": 9,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    assert "Authorization: Bearer secret\r\n" in server.heads[1]
    assert server.bodies[2]["model"] == "mine"
    assert "ignore_eos" not in server.bodies[2]


def test_a_response_may_come_byte_by_byte(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(_: Any, send: Callable[[bytes], None]) -> None:
        whole = HEAD + piece(role="assistant") + piece(content="é") + piece(content="b")
        for byte in whole + ending(3, 2):
            send(bytes([byte]))

    with fake(answer) as server:
        found = bench(server, capsys, "--requests", "2")
    assert (found["answered"], found["prompt_tokens"], found["output_tokens"]) == (2, 6, 4)


def test_a_server_without_chunks_and_without_usage(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(_: Any, send: Callable[[bytes], None]) -> None:
        event = json.dumps({"choices": [{"delta": {"reasoning_content": "x"}}]})
        send(f"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n: hello\r\n\r\ndata:{event}\r\n\r\ndata: [DONE]\n\n".encode())

    with fake(answer) as server:
        found = bench(server, capsys, "--requests", "2")
    assert (found["answered"], found["output_tokens"]) == (2, 2)


ERRORS: dict[str, bytes] = {
    "HTTP 429": b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n",
    "connection closed before the end": HEAD + piece(content="a"),
    "error in the stream": HEAD + piece(content="a") + chunk('{"error": {"message": "no"}}'),
    "malformed response": HEAD + chunk("{"),
    "no token": HEAD + chunk("[DONE]"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_are_counted_by_kind(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    turn = iter(range(99))
    good = told(1)

    def answer(body: Any, send: Callable[[bytes], None]) -> None:
        if next(turn) % 2:
            send(ERRORS[kind])
        else:
            good(body, send)

    with fake(answer) as server:
        found = bench(server, capsys, "--requests", "6", "--concurrency", "1", "--goodput", "ttft:5000")
    assert found["errors"] == {kind: 3}
    assert found["answered"] == 3
    assert found["goodput"]["share"] == 0.5


def test_a_request_that_takes_too_long_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    with fake(told(2, first=1.0)) as server:
        found = bench(server, capsys, "--requests", "2", "--timeout", "0.2", status=1)
    assert found["errors"] == {"timeout": 2}


def test_an_open_loop_does_not_wait_for_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with fake(told(1, first=0.5)) as server:
        found = bench(server, capsys, "--requests", "20", "--rate", "100")
    assert server.most > 10
    assert found["duration_s"] < 2
    assert 490 <= found["ttft_ms"]["p50"] < 900


def test_a_closed_loop_has_no_more_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with fake(told(1, first=0.05)) as server:
        bench(server, capsys, "--requests", "12", "--concurrency", "3")
    assert server.most == 3


def test_goodput_counts_what_keeps_every_limit() -> None:
    def outcome(ttft: float, gap: float, error: str | None = None) -> Outcome:
        pieces = [ttft + gap * index for index in range(3)]
        return Outcome(0.0, 0.0, pieces, pieces[-1], 10, 3, error)

    outcomes = [outcome(0.1, 0.01), outcome(0.3, 0.01), outcome(0.1, 0.1), outcome(0.1, 0.01, "HTTP 500")]
    found = bench_serve.report(outcomes, {"ttft": 0.2, "itl": 0.05})
    assert found["goodput"]["share"] == 0.25
    assert found["goodput"]["requests_per_s"] == pytest.approx(1 / found["duration_s"])
    assert found["answered"] == 3
    assert bench_serve.report(outcomes, {"e2e": 0.15})["goodput"]["share"] == 0.25


def test_percentiles() -> None:
    found = bench_serve.summary([index / 1000 for index in range(101)])
    assert found == pytest.approx({"mean": 50.0, "p50": 50.0, "p95": 95.0, "p99": 99.0, "max": 100.0})
    assert bench_serve.summary([0.002]) == pytest.approx(dict.fromkeys(["mean", "p50", "p95", "p99", "max"], 2.0))


def test_prompts_follow_from_the_seed_and_none_comes_twice() -> None:
    many = bench_serve.prompts(250, 1)
    assert many == bench_serve.prompts(250, 1)
    assert many[:99] != bench_serve.prompts(99, 2)
    assert len(set(many)) == 250
    assert many[99] == f"(2) {many[0]}"


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("http://127.0.0.1:80", ("127.0.0.1", 80, "/v1", False)),
        ("http://[::1]:8000/v1/", ("::1", 8000, "/v1", False)),
        ("https://example.com/api/v1", ("example.com", 443, "/api/v1", True)),
        ("https://example.com/api", ("example.com", 443, "/api/v1", True)),
    ],
)
def test_urls(url: str, where: tuple[str, int, str, bool]) -> None:
    target = Target.parse(url, None)
    assert (target.host, target.port, target.path, target.tls) == where


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://x", "http://", "http://x:port", "http://x/v1?y"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(flags.Usage, match="--url"):
        Target.parse(url, None)
    with pytest.raises(flags.Usage, match="--api-key"):
        Target.parse("http://x", "a\r\nb: c")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--requests", "0"],
        ["--max-tokens", "0"],
        ["--concurrency", "0"],
        ["--timeout", "0"],
        ["--rate", "1", "--concurrency", "2"],
        ["--goodput", "tpot:3"],
        ["--goodput", "ttft"],
    ],
)
def test_what_cannot_be_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "serve", "--url", "http://127.0.0.1:1", *arguments])
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("error: no server answers at 127.0.0.1:1: ")
    assert cli.main(["bench", "serve", "--url", "http://127.0.0.1:1", "--model", "m", "--requests", "2"]) == 1
    assert "no request was answered: connection refused" in capsys.readouterr().err


def test_flags_of_bench_do_not_go_with_bench_serve(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "-m", "x", "serve", "--url", "http://127.0.0.1:1"])
    assert "'--model-id <MODEL>' cannot be used with 'mistral-paged bench serve'" in capsys.readouterr().err


def test_the_client_is_cheap(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(_: Any, send: Callable[[bytes], None]) -> None:
        send(HEAD + piece(content="word") * 500 + ending(1, 500))

    with fake(answer) as server:
        options = cli.build_parser().parse_args(["bench", "serve", "--url", server.url, "--requests", "20"])
        load = bench_serve.Load(Target.parse(server.url, None), "m", options)
        before = time.thread_time()
        outcomes = bench_serve.asyncio.run(load.closed_loop(4))
        spent = time.thread_time() - before
    assert sum(len(outcome.pieces) for outcome in outcomes) == 10_000
    assert spent < 1.0, "a token takes the client more than 0.1 ms"


def test_our_server(capsys: pytest.CaptureFixture[str]) -> None:
    with serving("--disable-access-log", "--api-key", "k", model=str(default_model()), memory="256") as server:
        arguments = ["bench", "serve", "--url", f"http://127.0.0.1:{server.port}", "--api-key", "k", "--requests", "4"]
        assert cli.main([*arguments, "--max-tokens", "8", "--ignore-eos", "--goodput", "ttft:60000", "itl:60000"]) == 0
        shown = capsys.readouterr().out
        assert cli.main([*arguments[:4], "--requests", "1"]) == 1
        assert "/v1/models answers with 401; --model names the model" in capsys.readouterr().err
    assert shown.startswith("4 of 4 requests answered")
    assert "closed loop, 8 at once" in shown
    assert "(100% of all; ttft <= 60000 ms, itl <= 60000 ms)" in shown
    assert "the client took" in shown


@pytest.mark.parametrize("listed", [b'{"data": []}', b"[]", b"no JSON"])
def test_a_list_without_a_model_is_told_of(listed: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "dumps", lambda _: listed.decode())
    with fake(told(1)) as server, pytest.raises(MistralPagedError, match=r"/v1/models lists no model; --model names it"):
        Target.parse(server.url, None).first_model()
