"""The server and llama.cpp's under the same open loop, at shares of what llama.cpp's can do. Prints a table.

python benches/serve_peers.py [--requests N]

Both have the default model's file, one thread, so that the client has a processor, and the packaged conversations by
`mistral-paged bench serve`, in turns. The package xllamacpp, which has llama.cpp's server, must be installed. Its capacity is
what a closed loop of 16 clients gets.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from http_many import COMMAND, serving

from mistral_paged.default_model import default_model

SHARES = (0.3, 0.7, 1.0, 1.5, 2.0, 3.0)
"""Of llama.cpp's capacity."""
MOST_OF_PEER = 1.0
"""Its queue would only grow beyond."""
LIMITS = ("ttft:1000", "itl:100")
OURS, PEER = "mistral_paged", "llama.cpp"


def serve_llama_cpp() -> None:
    """Serves the default model with the server of llama.cpp, until killed."""
    xllamacpp = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(default_model())
    params.n_ctx = 32 * 2048
    params.n_parallel = 32
    params.kv_unified = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.port = 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    time.sleep(1e9)


@contextmanager
def llama_cpp() -> Iterator[str]:
    """The address of llama.cpp's server, in a process of its own."""
    command = [sys.executable, __file__, "--serve-llama-cpp"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            yield next(line.strip() for line in server.stdout if line.startswith("http"))
        finally:
            server.kill()


def drive(url: str, requests: int, *load: str) -> dict[str, Any]:
    """What `bench serve` reports."""
    command = [str(COMMAND), "bench", "serve", "--url", url, "--requests", str(requests), *load, "--json"]
    done = subprocess.run([*command, "--goodput", *LIMITS], check=True, capture_output=True, text=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def row(load: str, name: str, report: dict[str, Any]) -> str:
    """A row of the table."""
    ttft, itl, good = report["ttft_ms"], report["itl_ms"], report["goodput"]
    times = [ttft["p50"], ttft["p95"], itl["p50"], itl["p95"], itl["p99"]]
    cells = [load, name, f"{report['requests_per_s']:.2f}", *(f"{time:,.0f}" for time in times)]
    cells += [f"{good['requests_per_s']:.2f}", f"{good['share']:.0%}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=99)
    parser.add_argument("--serve-llama-cpp", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_llama_cpp:
        return serve_llama_cpp()
    with serving(default_model(), "--pa-memory-mb", "512", "--num-threads", "1") as (port, _), llama_cpp() as peer:
        urls = {OURS: f"http://127.0.0.1:{port}", PEER: peer}
        clients = {name: drive(url, options.requests, "--concurrency", "16") for name, url in urls.items()}
        capacity = clients[PEER]["requests_per_s"]
        print("| load | server | requests/s | TTFT p50, ms | p95 | ITL p50, ms | p95 | p99 | goodput/s | good |")
        print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        for name, report in clients.items():
            print(row("16 clients", name, report), flush=True)
        for share in SHARES:
            load = ("--rate", f"{capacity * share:.3f}")
            for name, url in urls.items():
                if name == OURS or share <= MOST_OF_PEER:
                    print(row(f"{capacity * share:.2f}/s, {share:.0%}", name, drive(url, options.requests, *load)), flush=True)
    return None


if __name__ == "__main__":
    main()
