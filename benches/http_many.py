"""What a server does under many clients: 256 streams at once with /health beside them, and requests of which a third disconnect.

python benches/http_many.py [--streams N] [--requests N] [--tiny FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mistral_paged.default_model import default_model

COMMAND = Path(sys.executable).with_name("mistral-paged")
TINY = Path(__file__).parent.parent / "tests" / "data" / "golden" / "text" / "llama"


@contextmanager
def serving(model: Path, *flags: str) -> Iterator[tuple[int, int]]:
    """A server's port and process."""
    command = [str(COMMAND), "serve", "-m", str(model), "--port", "0", "--disable-access-log", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            ports = (found for line in server.stderr if (found := re.search(r"at http://[^:]+:(\d+)/v1", line)))
            yield int(next(ports)[1]), server.pid
        finally:
            server.terminate()


async def ask(port: int, path: str, body: dict[str, Any] | None = None, leave_after: int | None = None) -> bytes:
    """The whole answer of a connection of its own, or its first bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
    answer = await reader.read(leave_after) if leave_after else await reader.read(-1)
    writer.close()
    return answer


def text_of(stream: bytes) -> str:
    """What the events of a stream add up to; an error unless they end as they should."""
    events = re.findall(rb"data: (.*)", stream)
    if events[-1].strip() != b"[DONE]":
        raise RuntimeError(f"a stream ended with {events[-1]!r}")
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def many_streams(port: int, num_streams: int) -> None:
    """Compares streams that run together with each alone."""

    def body(number: int, stream: bool) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"Tell me a story about number {number}."}]
        return {"messages": messages, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": stream}

    began = time.perf_counter()
    streams = [asyncio.create_task(ask(port, "/v1/chat/completions", body(i, True))) for i in range(num_streams)]
    health = []
    while not all(stream.done() for stream in streams):
        asked = time.perf_counter()
        assert b" 200 " in await ask(port, "/health")
        health.append(time.perf_counter() - asked)
        await asyncio.sleep(0.02)
    took = time.perf_counter() - began
    texts = [text_of(stream.result()) for stream in streams]
    different = 0
    for number, text in enumerate(texts):
        alone = await ask(port, "/v1/chat/completions", body(number, False))
        message = json.loads(alone.split(b"\r\n\r\n", 1)[1])["choices"][0]["message"]
        different += message["content"] != text
    quantiles = np.percentile(np.array(health) * 1e3, [50, 99])
    print(f"{num_streams} streams of 24 tokens in {took:.1f} s: {different} differ from the same request alone")
    print(f"/health beside them, {len(health)} times: p50 {quantiles[0]:.2f} ms, p99 {quantiles[1]:.2f} ms")


def anonymous_kib(pid: int) -> int:
    """Anonymous memory of a process that is resident."""
    found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


async def many_requests(port: int, pid: int, count: int) -> None:
    """Sends requests, leaves a third of them, and prints what the server is left with."""
    draw = random.Random(1)
    left = answered = 0

    async def client(number: int) -> None:
        nonlocal left, answered
        prompt = [draw.randrange(10, 500) for _ in range(draw.randrange(1, 60))]
        leaves = number % 3 == 0
        body = {"prompt": prompt, "max_tokens": 200 if leaves else 8, "temperature": 0, "ignore_eos": True, "stream": leaves}
        answer = await ask(port, "/v1/completions", body, leave_after=64 if leaves else None)
        assert b" 200 " in answer[:16], answer[:200]
        left += leaves
        answered += not leaves

    began = time.perf_counter()
    tenth = max(1, count // 10)
    for first in range(0, count, tenth):
        numbers = iter(range(first, min(first + tenth, count)))

        async def worker(numbers: Iterator[int] = numbers) -> None:
            for number in numbers:
                await client(number)

        await asyncio.gather(*(worker() for _ in range(32)))
        print(f"{left + answered:,} requests, {anonymous_kib(pid) / 1024:.1f} MiB anonymous", flush=True)
    await asyncio.sleep(1)
    metrics = (await ask(port, "/metrics")).decode()
    used = re.search(r"^mistralrs_kv_cache_blocks_used\S* (\S+)", metrics, re.MULTILINE)
    took = time.perf_counter() - began
    print(f"{left:,} of {count:,} left, in {took:.0f} s; blocks in use at the end: {used[1] if used else 'unknown'}")


def main() -> None:
    """Prints figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--tiny", type=Path, default=TINY)
    options = parser.parse_args()
    with serving(default_model(), "--pa-memory-mb", "512", "--max-seqs", "256", "--deterministic") as (port, _):
        asyncio.run(many_streams(port, options.streams))
    # A pool that is soon full, for its pages count as they are first written.
    with serving(options.tiny, "--pa-memory-mb", "16") as (port, pid):
        asyncio.run(many_requests(port, pid, options.requests))


if __name__ == "__main__":
    main()
