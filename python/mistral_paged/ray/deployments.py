"""The two deployments: replicas, each with the server in a process of its own, and the ingress that sends requests to them."""

from __future__ import annotations

import collections
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import ray.exceptions
from ray.serve.config import AutoscalingContext
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from yarl import URL

from mistral_paged.ray.routing import Forwarded, digests_of

HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
"""Headers that are about one connection, and are not passed on."""
AUTOMATIC = ("accept", "accept-encoding", "content-type", "user-agent")
"""Headers that the client library would add of its own."""
TARGET_KV_USAGE = 0.8
"""Share of the KV blocks that requests hold, at which scaling aims."""
ONE_REPLICA_ONLY = re.compile(r"/(metrics|ui|admin|re_isq|v1/(load|unload)_lora_adapter|v1/responses/resp_)")
"""Routes that are about one replica: through a router they would reach any."""
LINES = 20
"""Lines of a server's standard error that are told when it ends."""


class ReplicaLost(Exception):
    """The server of a replica is gone, with the requests that it had."""


class Replica:
    """A server on a socket of its own, as a child process, and the way to it."""

    def __init__(self, words: list[str], key: str | None) -> None:
        """Starts `mistral-paged WORDS` and waits until it serves; `RuntimeError` with what it said where it ends before.

        `key`: one that opens the server, besides those of WORDS; None where clients need none. The metrics are read with it.
        """
        self.folder = tempfile.TemporaryDirectory(prefix="mistral-paged-")
        self.path = str(Path(self.folder.name) / "socket")
        self.key = key or os.environ.get("MISTRAL_PAGED_API_KEY", "")
        command = [sys.executable, "-m", "mistral_paged.attended", *words, f"--host=unix:{self.path}"]
        environment = {**os.environ, "MISTRAL_PAGED_API_KEY": self.key}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        self.said: collections.deque[str] = collections.deque(maxlen=LINES)
        self.is_closing = False
        self.is_serving = False
        self.client: aiohttp.ClientSession | None = None
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()
        self._wait_until_it_serves()

    def _listen(self) -> None:
        """Passes on what the server says, until it ends; a replica without a server ends as well, so that Ray starts another."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            sys.stderr.write(line)
        status = self.process.wait()
        if self.is_serving and not self.is_closing:
            sys.stderr.write(f"the server ended with status {status}: the replica ends too\n")
            sys.stderr.flush()
            self.folder.cleanup()
            os._exit(1)

    def _wait_until_it_serves(self) -> None:
        while self.process.poll() is None:
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(self.path)
                except OSError:
                    time.sleep(0.05)
                    continue
            self.is_serving = True
            return
        self.listener.join(timeout=5)
        raise RuntimeError(f"mistral-paged serve ended with status {self.process.returncode}: {''.join(self.said).strip()}")

    def _session(self) -> aiohttp.ClientSession:
        """The way to the server; made on the loop that uses it."""
        if self.client is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
            connector = aiohttp.UnixConnector(self.path, limit=0)
            self.client = aiohttp.ClientSession("http://localhost", connector=connector, timeout=timeout, auto_decompress=False)
        return self.client

    async def forward(self, request: Forwarded) -> AsyncIterator[Any]:
        """The answer of the server: status and headers, then the parts of the body as they come. `ReplicaLost`."""
        try:
            async with self._session().request(
                request.method,
                URL(f"http://localhost{request.target}", encoded=True),
                headers=request.headers,
                skip_auto_headers=AUTOMATIC,
                data=request.body or None,
                allow_redirects=False,
            ) as reply:
                yield reply.status, [(name, value) for name, value in reply.headers.items() if name.lower() not in HOP_BY_HOP]
                async for part in reply.content.iter_any():
                    yield part
        except aiohttp.ClientError as error:
            raise ReplicaLost(str(error)) from None

    async def check_health(self) -> None:
        """Raises unless the engine's steps go on: `GET /health`."""
        async with self._session().get("/health", timeout=aiohttp.ClientTimeout(total=5)) as reply:
            if reply.status != 200:
                raise RuntimeError(f"the engine is not well: {(await reply.text())[:500]}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """`waiting` and `running` requests, and `kv_usage`, the share of the KV blocks that requests hold."""
        headers = {"authorization": f"Bearer {self.key}"}
        async with self._session().get("/metrics", headers=headers, timeout=aiohttp.ClientTimeout(total=5)) as reply:
            page = await reply.text()
        names = {"waiting": "num_requests_waiting", "running": "num_requests_running", "kv_usage": "kv_cache_usage_perc"}
        return {key: float(re.search(rf"^vllm:{name}{{.*}} (\S+)$", page, re.MULTILINE)[1]) for key, name in names.items()}  # type: ignore[index]

    def __del__(self) -> None:
        """Lets the server serve to the end what it has, and ends it. Ray calls this when it ends a replica in order."""
        self.is_closing = True
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=35)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.folder.cleanup()


class Ingress:
    """Sends each request to a replica, and its answer back. Replicas read requests; here they are only looked at for routing."""

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int) -> None:
        """Over these replicas; larger bodies are refused."""
        self.replicas = replicas.options(stream=True)
        self.max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        """The answer."""
        path = request.url.path
        if ONE_REPLICA_ONLY.match(path):
            return refusal(
                path, 404, "route_not_found", f"{path} is about one replica, and a request reaches any: ask Ray instead"
            )
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.max_body_bytes:
                return refusal(
                    path, 413, "request_too_large", f"a body may have {self.max_body_bytes} bytes; max_body_mb sets it"
                )
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP]
        key = request.headers.get("authorization") or request.headers.get("x-api-key") or ""
        raw_path: bytes = request.scope.get("raw_path") or quote(path).encode()
        target = raw_path.decode("latin-1") + (f"?{request.url.query}" if request.url.query else "")
        forwarded = Forwarded(request.method, target, headers, bytes(body), digests_of(bytes(body), key))
        parts = self.replicas.forward.remote(forwarded)
        try:
            status, answered = await anext(parts)
        except BackPressureError:
            return refusal(path, 429, "queue_full", "all replicas are full and as many requests wait as may", retry_after=1)
        except Exception as error:
            if not is_loss(error):
                raise
            return refusal(path, 503, "replica_lost", "the replica of this request is gone: ask again", retry_after=1)
        response = StreamingResponse(rest(parts, path, dict(answered)), status)
        for name, value in answered:
            response.headers.append(name, value)
        return response


async def rest(parts: Any, path: str, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """What follows the headers; a stream whose replica is lost ends with an error, other bodies break off.

    Events are passed on when they are whole, so that none is cut in the middle.
    """
    is_stream = any(name.lower() == "content-type" and "event-stream" in value for name, value in headers.items())
    held = b""
    try:
        async for part in parts:
            if not is_stream:
                yield part
                continue
            held += part
            cut = held.rfind(b"\n\n")
            if cut >= 0:
                yield held[: cut + 2]
                held = held[cut + 2 :]
        if held:
            yield held
    except Exception as error:
        if not (is_loss(error) and is_stream):
            raise
        yield lost_event(path)
    finally:
        # A client that leaves ends the request in the replica too.
        parts.cancel()


def is_loss(error: BaseException) -> bool:
    """Whether a replica is gone, not the request wrong."""
    return isinstance(error, (ReplicaLost, ray.exceptions.RayActorError, ray.exceptions.ActorUnavailableError)) or isinstance(
        getattr(error, "cause", None), ReplicaLost
    )


def error_body(path: str, kind: str, code: str, message: str) -> dict[str, Any]:
    """An error in the form of the interface that was asked: Anthropic's or OpenAI's."""
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def lost_event(path: str) -> bytes:
    """The event that ends a stream whose replica is lost. Clients raise on it."""
    message = "the replica of this answer is gone: ask again"
    if path.startswith("/v1/responses"):
        body: dict[str, Any] = {"type": "error", "code": "replica_lost", "message": message, "param": None}
    else:
        kind = "overloaded_error" if path.startswith("/v1/messages") else "server_error"
        body = error_body(path, kind, "replica_lost", message)
    name = f"event: {body['type']}\n" if "type" in body else ""
    return f"{name}data: {json.dumps(body)}\n\n".encode()


def refusal(path: str, status: int, code: str, message: str, retry_after: int | None = None) -> JSONResponse:
    """An error that clients understand; with `retry_after` they ask again after so many seconds."""
    kinds = {404: "not_found_error", 413: "invalid_request_error", 429: "rate_limit_error", 503: "server_error"}
    if path.startswith("/v1/messages"):
        kinds[503] = "overloaded_error"
    headers = {} if retry_after is None else {"retry-after": str(retry_after)}
    return JSONResponse(error_body(path, kinds[status], code, message), status, headers)


def target_num_replicas(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Replicas that are wanted: as many as requests under way need, and as many as the KV blocks that requests hold need.

    Ray applies delays, factors and limits to it.
    """
    current = context.current_num_replicas
    if current == 0:
        return context.target_num_replicas, {}
    by_requests = context.total_num_requests / context.config.get_target_ongoing_requests()
    usage = ((context.aggregated_metrics or {}).get("kv_usage") or {}).values()
    by_blocks = current * sum(usage) / len(usage) / TARGET_KV_USAGE if usage else 0.0
    return max(by_requests, by_blocks), {}
