"""The `bench serve` command: drives a server that speaks OpenAI's chat completions with the packaged conversations.

Requests come open loop, as a Poisson process that waits for no answer, or closed loop, so many at once. One thread reads all
streams as bytes arrive, so that the client takes little of the machine it measures; what it takes is in the report.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import math
import random
import ssl
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from mistral_paged.exceptions import MistralPagedError
from mistral_paged.flags import Usage
from mistral_paged.memory import conversations

POOL = 99
"""Packaged conversations."""
PERCENTILES = (50, 95, 99)


@dataclass
class Outcome:
    """What became of a request. Times are of one clock, in seconds."""

    due: float
    """When it was to be sent: in an open loop the moment of its arrival, whenever the client got to it."""
    sent: float = 0.0
    pieces: list[float] = field(default_factory=list)
    """When each piece of the answer came."""
    end: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first piece."""
        return self.pieces[0] - self.due

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring pieces."""
        return [after - before for before, after in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def itl(self) -> float:
        """Mean seconds from token to token behind the first; 0 of one token."""
        return (self.pieces[-1] - self.pieces[0]) / max(self.output_tokens - 1, 1)

    @property
    def e2e(self) -> float:
        """Seconds to the end."""
        return self.end - self.due


@dataclass(frozen=True)
class Target:
    """The server."""

    host: str
    port: int
    path: str
    """What comes before `/chat/completions`, such as `/v1`."""
    tls: bool
    headers: dict[str, str]

    @classmethod
    def parse(cls, url: str, api_key: str | None) -> Target:
        """A base URL with or without `/v1`; `Usage` for anything else."""
        try:
            parts: SplitResult = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise Usage(f"--url {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise Usage(f"--url is {url!r}; it must be such as http://127.0.0.1:1234")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise Usage("--api-key has characters that cannot be in a header")
        path = parts.path.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key is not None else {}
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), path if path.endswith("/v1") else f"{path}/v1", tls, headers)

    def first_model(self) -> str:
        """The model that the server names first."""
        connect = http.client.HTTPSConnection if self.tls else http.client.HTTPConnection
        connection = connect(self.host, self.port, timeout=30)
        try:
            connection.request("GET", f"{self.path}/models", headers=self.headers)
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise MistralPagedError(f"no server answers at {self.host}:{self.port}: {error}") from None
        finally:
            connection.close()
        if response.status != 200:
            raise MistralPagedError(f"{self.path}/models answers with {response.status}; --model names the model")
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise MistralPagedError(f"{self.path}/models lists no model; --model names it") from None

    def request(self, body: dict[str, Any]) -> bytes:
        """The bytes of a chat completion's request."""
        data = json.dumps(body).encode()
        host = f"[{self.host}]" if ":" in self.host else self.host
        headers = {
            "Host": f"{host}:{self.port}",
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            "Connection": "close",
            **self.headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"POST {self.path}/chat/completions HTTP/1.1\r\n{lines}\r\n".encode() + data


class Stream(asyncio.Protocol):
    """One request and its stream, over a connection of its own."""

    def __init__(self, request: bytes, outcome: Outcome, done: asyncio.Future[None]) -> None:
        self.request = request
        self.outcome = outcome
        self.done = done
        self.raw = bytearray()
        """Bytes of the response, of which the head or a chunk is not whole yet."""
        self.text = bytearray()
        """Bytes of the body, of which a line is not whole yet."""
        self.status: int | None = None
        self.chunked = False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the request."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Takes what the server sent, in whatever pieces."""
        now = time.perf_counter()
        self.raw += data
        try:
            if self.status is None and not self.read_head():
                return None
            if self.status != 200:
                return self.finish(now, f"HTTP {self.status}")
            self.read_body()
            while not self.done.done() and (end := self.text.find(b"\n")) >= 0:
                line = bytes(self.text[:end])
                del self.text[: end + 1]
                if line.startswith(b"data:"):
                    self.read_event(line[5:].strip(), now)
        except (ValueError, LookupError, TypeError, AttributeError):
            self.finish(now, "malformed response")
        return None

    def connection_lost(self, error: Exception | None) -> None:
        """Ends a request that had no end."""
        self.finish(time.perf_counter(), "connection reset" if error is not None else "connection closed before the end")

    def read_head(self) -> bool:
        """Reads the head if it is whole."""
        end = self.raw.find(b"\r\n\r\n")
        if end < 0:
            return False
        status, _, headers = bytes(self.raw[:end]).decode("latin-1").partition("\r\n")
        del self.raw[: end + 4]
        self.status = int(status.split(" ", 2)[1])
        fields = (line.lower().partition(":") for line in headers.split("\r\n"))
        self.chunked = any(name == "transfer-encoding" and "chunked" in value for name, _, value in fields)
        return True

    def read_body(self) -> None:
        """Moves the body's bytes over, without the frames of chunks."""
        if not self.chunked:
            self.text += self.raw
            self.raw.clear()
            return
        while (end := self.raw.find(b"\r\n")) >= 0:
            size = int(self.raw[:end].partition(b";")[0], 16)
            if len(self.raw) < end + size + 4:
                return
            self.text += self.raw[end + 2 : end + 2 + size]
            del self.raw[: end + size + 4]

    def read_event(self, payload: bytes, now: float) -> None:
        """Takes one event."""
        if payload == b"[DONE]":
            if not self.outcome.pieces:
                return self.finish(now, "no token")
            return self.finish(now, None)
        event = json.loads(payload)
        if event.get("error") is not None:
            return self.finish(now, "error in the stream")
        if usage := event.get("usage"):
            self.outcome.prompt_tokens, self.outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in event.get("choices") or ():
            delta = choice["delta"]
            if delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
                self.outcome.pieces.append(now)
        return None

    def finish(self, now: float, error: str | None) -> None:
        """Notes the end, once."""
        if self.done.done():
            return
        self.outcome.end = now
        self.outcome.error = error
        self.outcome.output_tokens = self.outcome.output_tokens or len(self.outcome.pieces)
        self.done.set_result(None)
        if self.transport is not None:
            self.transport.close()


def prompts(count: int, seed: int) -> list[str]:
    """The conversations in an order that follows from the seed, over and over.

    From the second time on a prompt begins with its number, so that no server finds all of it in its prefix cache.
    """
    pool = [each.prompt for each in conversations(POOL)]
    random.Random(seed).shuffle(pool)
    rounds = (divmod(index, len(pool)) for index in range(count))
    return [f"({number + 1}) {pool[at]}" if number else pool[at] for number, at in rounds]


def check(options: argparse.Namespace) -> None:
    """Refuses what cannot be; `Usage`."""
    if options.requests < 1 or options.max_tokens < 1:
        raise Usage(f"--requests is {options.requests} and --max-tokens {options.max_tokens}; they must be 1 or more")
    if options.rate is not None and not 0 < options.rate < math.inf:
        raise Usage(f"--rate is {options.rate}; it must be requests a second, above 0")
    if options.concurrency < 1:
        raise Usage(f"--concurrency is {options.concurrency}; it must be 1 or more")
    if not 0 < options.timeout < math.inf:
        raise Usage(f"--timeout is {options.timeout}; it must be seconds above 0")


class Load:
    """The requests of a run."""

    def __init__(self, target: Target, model: str, options: argparse.Namespace) -> None:
        self.target = target
        self.timeout = options.timeout
        self.tls = ssl.create_default_context() if target.tls else None
        fixed = {
            "model": model,
            "max_tokens": options.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if options.ignore_eos else {}),
        }
        self.requests = [
            target.request({**fixed, "messages": [{"role": "user", "content": prompt}]})
            for prompt in prompts(options.requests, options.seed)
        ]

    async def send(self, request: bytes, due: float) -> Outcome:
        """Sends a request and follows its stream to the end."""
        outcome = Outcome(due, sent=time.perf_counter())
        loop = asyncio.get_running_loop()
        stream = Stream(request, outcome, loop.create_future())

        async def follow() -> None:
            await loop.create_connection(lambda: stream, self.target.host, self.target.port, ssl=self.tls)
            await stream.done

        try:
            await asyncio.wait_for(follow(), self.timeout)
        except asyncio.TimeoutError:
            self.give_up(stream, "timeout")
        except ConnectionRefusedError:
            self.give_up(stream, "connection refused")
        except OSError as error:
            self.give_up(stream, f"connection failed: {error.strerror or type(error).__name__}")
        return outcome

    @staticmethod
    def give_up(stream: Stream, error: str) -> None:
        """Ends a stream from this side."""
        if stream.transport is not None:
            stream.transport.abort()
        stream.outcome.end = time.perf_counter()
        stream.outcome.error = error

    async def open_loop(self, rate: float, seed: int) -> list[Outcome]:
        """Sends requests at the times of a Poisson process of `rate` a second, whether or not others are answered."""
        arrivals = random.Random(seed)
        due = time.perf_counter()
        running = []
        for request in self.requests:
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            running.append(asyncio.create_task(self.send(request, due)))
            due += arrivals.expovariate(rate)
        return await asyncio.gather(*running)

    async def closed_loop(self, concurrency: int) -> list[Outcome]:
        """Keeps `concurrency` requests running until all are answered."""
        waiting = iter(self.requests)
        outcomes: list[Outcome] = []

        async def follow() -> None:
            for request in waiting:
                outcomes.append(await self.send(request, time.perf_counter()))

        await asyncio.gather(*(follow() for _ in range(concurrency)))
        return outcomes


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and maximum in milliseconds; percentiles between two values lie on the line through them."""
    ordered = sorted(seconds)
    if not ordered:
        return {}

    def at(percent: int) -> float:
        place = (len(ordered) - 1) * percent / 100
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    found = {"mean": sum(ordered) / len(ordered), **{f"p{percent}": at(percent) for percent in PERCENTILES}, "max": ordered[-1]}
    return {name: value * 1000 for name, value in found.items()}


def report(outcomes: Sequence[Outcome], limits: dict[str, float]) -> dict[str, Any]:
    """The figures of a run."""
    answered = [outcome for outcome in outcomes if outcome.error is None]
    duration = max(outcome.end for outcome in outcomes) - min(outcome.due for outcome in outcomes)
    output = sum(outcome.output_tokens for outcome in answered)
    prompt = sum(outcome.prompt_tokens for outcome in answered)
    good = [one for one in answered if all(getattr(one, name) <= most for name, most in limits.items())]
    return {
        "requests": len(outcomes),
        "answered": len(answered),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None)),
        "duration_s": duration,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": len(answered) / duration,
        "output_tokens_per_s": output / duration,
        "total_tokens_per_s": (prompt + output) / duration,
        "ttft_ms": summary([one.ttft for one in answered]),
        "itl_ms": summary([gap for one in answered for gap in one.gaps]),
        "e2e_ms": summary([one.e2e for one in answered]),
        "goodput": {
            "limits_ms": {name: most * 1000 for name, most in limits.items()},
            "requests_per_s": len(good) / duration,
            "share": len(good) / len(outcomes),
        },
        "late_ms": summary([outcome.sent - outcome.due for outcome in outcomes]),
    }


def describe(found: dict[str, Any]) -> str:
    """The report as text."""
    lines = [
        f"{found['answered']} of {found['requests']} requests answered in {found['duration_s']:.2f} s ({found['load']})",
        f"{found['requests_per_s']:.2f} requests/s, {found['output_tokens_per_s']:.1f} output tokens/s, "
        f"{found['total_tokens_per_s']:.1f} tokens/s with prompts",
        "",
        f"{'ms':<6}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p95", "p99", "max")),
    ]
    for name in ("ttft", "itl", "e2e"):
        if values := found[f"{name}_ms"]:
            lines.append(f"{name.upper():<6}" + "".join(f"{value:>10.1f}" for value in values.values()))
    good = found["goodput"]
    if good["limits_ms"]:
        limits = ", ".join(f"{name} <= {most:g} ms" for name, most in good["limits_ms"].items())
        lines += ["", f"goodput {good['requests_per_s']:.2f} requests/s ({good['share']:.0%} of all; {limits})"]
    if found["errors"]:
        lines += ["", "errors: " + ", ".join(f"{kind}: {count}" for kind, count in found["errors"].items())]
    late = found["late_ms"]["p99"]
    lines += ["", f"the client took {found['client_cpu_s']:.2f} s of a core; it sent 99 % of requests within {late:.1f} ms"]
    return "\n".join(lines)


def run(options: argparse.Namespace) -> None:
    """Drives the server and prints what it did; `MistralPagedError` when no request was answered."""
    check(options)
    target = Target.parse(options.url, options.api_key)
    load = Load(target, options.model or target.first_model(), options)
    before = time.process_time()
    is_open = options.rate is not None
    work = load.open_loop(options.rate, options.seed) if is_open else load.closed_loop(options.concurrency)
    outcomes = asyncio.run(work)
    found = report(outcomes, {name: most / 1000 for name, most in options.goodput or ()})
    found["client_cpu_s"] = time.process_time() - before
    found["load"] = f"open loop, {options.rate:g} a second" if is_open else f"closed loop, {options.concurrency} at once"
    print(json.dumps(found) if options.json else describe(found))
    sys.stdout.flush()
    if not found["answered"]:
        raise MistralPagedError("no request was answered: " + ", ".join(found["errors"]))
