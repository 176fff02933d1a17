"""How long a server takes to refuse hostile grammars, or to answer them, and what it costs a stream beside them.

    python benches/hostile_grammars.py [--rounds 3] [--limit 100]

Prints the slowest of each grammar's rounds over HTTP, each round with grammars that were not seen before, and how far apart the
parts of a stream of free text come with them and without. Ends with 1 where a refusal took longer than `--limit` milliseconds,
or a grammar ended otherwise than it should.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from hostile import hostile  # type: ignore[import-not-found]
from test_server import Server, serving  # type: ignore[import-not-found]

from mistral_paged.default_model import default_model


def gaps(server: Server, until: threading.Event) -> list[float]:
    """Milliseconds between the parts of streams of free text, one after the other until it is said to be enough."""
    between: list[float] = []
    while not until.is_set():
        body = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response, last = connection.getresponse(), None
        while (line := response.readline()) and not until.is_set():
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                between.extend([(now - last) * 1e3] if last else [])
                last = now
        connection.close()
    return sorted(between)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=100, help="milliseconds that a refusal may take")
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {}
    ends: dict[str, str] = {}
    apart: dict[str, list[float]] = {}
    others = 0
    with serving("--disable-access-log", model=str(default_model()), memory="256") as server:
        # The first grammar reads the vocabulary.
        server.complete(guided_regex="a", max_tokens=1)
        for name in ("alone", "beside"):
            until = threading.Event()
            found: list[float] = []
            thread = threading.Thread(target=lambda until=until, found=found: found.extend(gaps(server, until)))
            thread.start()
            if name == "alone":
                time.sleep(10)
            for number in range(arguments.rounds if name == "beside" else 0):
                for kind, form, expected in hostile(time.time_ns() // 1000 % 10**8 + number):
                    began = time.perf_counter()
                    reply = server.complete(**form, max_tokens=1)
                    times.setdefault(kind, []).append((time.perf_counter() - began) * 1e3)
                    ends[kind] = reply.error["code"] if reply.status == 400 else str(reply.status)
                    if ends[kind] != (expected or "200"):
                        print(f"{kind}: {ends[kind]} instead of {expected or 200}", file=sys.stderr)
                        others += 1
            until.set()
            thread.join()
            apart[name] = found
    print("| grammar | end | slowest, ms |\n| --- | --- | --- |")
    for kind, slowest in sorted(times.items(), key=lambda item: -max(item[1])):
        print(f"| {kind} | {ends[kind]} | {max(slowest):.1f} |")
    longest = max(max(times[kind]) for kind, end in ends.items() if end != "200")
    print(f"\nThe slowest refusal takes {longest:.1f} ms.")
    for name, between in apart.items():
        at = [between[min(int(len(between) * share), len(between) - 1)] for share in (0.5, 0.99, 1.0)]
        print(f"{name}: {len(between)} parts, apart by {at[0]:.1f} ms (median), {at[1]:.1f} ms (p99), {at[2]:.1f} ms (largest)")
    if longest > arguments.limit or others:
        sys.exit(1)


if __name__ == "__main__":
    main()
