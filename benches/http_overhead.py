"""What HTTP costs: tokens a second through the server against those of the Python API, interleaved in one run.

The model has one thread, so that server and client have the other core. Streams on both sides, greedy, equal lengths.

    python benches/http_overhead.py [--model FILE] [--rounds N] [--streams 1,32] [--tokens N] [--num-threads N]
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mistral_paged import ChatCompletionRequest, Runner, Which
from mistral_paged.default_model import default_model

COMMAND = Path(sys.executable).with_name("mistral-paged")
QUESTION = "Tell me a story about number {}."


def direct(runner: Runner, tokens: int) -> Callable[[int], None]:
    """One stream through the Python API."""

    def stream(number: int) -> None:
        request = ChatCompletionRequest(
            QUESTION.format(number), "default", max_tokens=tokens, temperature=0, ignore_eos=True, stream=True
        )
        for _chunk in runner.send_chat_completion_request(request):
            pass

    return stream


def over_http(port: int, tokens: int) -> Callable[[int], None]:
    """One stream through the server, read as it comes."""

    def stream(number: int) -> None:
        messages = [{"role": "user", "content": QUESTION.format(number)}]
        body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        response = connection.getresponse()
        last = b""
        while part := response.read1(65536):
            last = (last + part)[-32:]
        connection.close()
        if not last.endswith(b"data: [DONE]\n\n"):
            raise RuntimeError(f"a stream ended with {last!r}")

    return stream


def tokens_a_second(stream: Callable[[int], None], num_streams: int, tokens: int) -> float:
    """Of so many streams at once."""
    with ThreadPoolExecutor(num_streams) as threads:
        began = time.perf_counter()
        list(threads.map(stream, range(num_streams)))
    return num_streams * tokens / (time.perf_counter() - began)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(default_model()))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--streams", default="1,32")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--num-threads", type=int, default=1)
    options = parser.parse_args()
    runner = Runner(which=Which.GGUF(options.model), pa_gpu_mem=512, num_threads=options.num_threads)
    command = [str(COMMAND), "serve", "-m", options.model, "--port", "0", "--pa-memory-mb", "512", "--disable-access-log"]
    command += ["--num-threads", str(options.num_threads)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            ports = (found for line in server.stderr if (found := re.search(r"at http://[^:]+:(\d+)/v1", line)))
            ways = {"direct": direct(runner, options.tokens), "http": over_http(int(next(ports)[1]), options.tokens)}
            for stream in ways.values():
                tokens_a_second(stream, 2, options.tokens)
            print("| streams | direct tokens/s | HTTP tokens/s | HTTP / direct, median of rounds |")
            print("| ---: | ---: | ---: | ---: |")
            for num_streams in (int(word) for word in options.streams.split(",")):
                rates: dict[str, list[float]] = {name: [] for name in ways}
                for number in range(options.rounds):
                    order = list(ways) if number % 2 else list(ways)[::-1]
                    for name in order:
                        rates[name].append(tokens_a_second(ways[name], num_streams, options.tokens))
                ratio = statistics.median(http / direct for direct, http in zip(rates["direct"], rates["http"], strict=True))
                medians = [statistics.median(rates[name]) for name in ("direct", "http")]
                print(f"| {num_streams} | {medians[0]:.1f} | {medians[1]:.1f} | {ratio:.3f} |", flush=True)
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
