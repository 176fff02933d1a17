"""What KV events cost: tokens a second of 32 streams with and without them, in turns, as JSON lines.

    python benches/kv_events.py --rounds 20

Each round has a run of either kind, in an order that alternates; a process of its own subscribes and decodes what comes. The last
line has the median of the rounds' ratios (with events to without) and the interval that 95 % of resamples put it in, and as
`cpu_share` what the threads that publish took of the processor time of the runs with events, which a busy machine blurs less.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from measures import which

from mistral_paged import CompletionRequest, Runner
from mistral_paged.default_model import default_model

STREAMS = 32
PROMPT, NEW = 64, 64
"""Tokens of a prompt and of its answer: two blocks each, so that every stream stores and evicts."""
SUBSCRIBER = """
import sys, msgspec, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.connect(sys.argv[1])
socket.setsockopt(zmq.SUBSCRIBE, b"")
while True:
    msgspec.msgpack.decode(socket.recv_multipart()[2])
"""


def run(runner: Runner, seed: int) -> float:
    """Tokens a second of prompts and answers, none of which is in the cache."""
    numbers = random.Random(seed)
    prompts = [[numbers.randrange(100, 20_000) for _ in range(PROMPT)] for _ in range(STREAMS)]

    def answer(prompt: list[int]) -> int:
        request = CompletionRequest(prompt, "m", max_tokens=NEW, temperature=0.0, ignore_eos=True)
        return runner.send_completion_request(request).usage.total_tokens

    start = time.perf_counter()
    with ThreadPoolExecutor(STREAMS) as pool:
        tokens = sum(pool.map(answer, prompts))
    return tokens / (time.perf_counter() - start)


def processor_seconds() -> tuple[float, float]:
    """Processor time of this process's threads that publish, and of all threads."""
    publishing = total = 0.0
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            seconds = int((thread / "schedstat").read_text().split()[0]) / 1e9
            total += seconds
            publishing += seconds * (thread / "comm").read_text().startswith("mistral-paged-k")
    return publishing, total


def interval(ratios: list[float]) -> tuple[float, float]:
    """Where the median of resampled ratios lies in 95 % of cases."""
    numbers = random.Random(0)
    medians = sorted(statistics.median(numbers.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    model, tokens = which(default_model()), STREAMS * (PROMPT + NEW) * 2
    without = Runner(which=model, pa_ctxt_len=tokens)
    told = Runner(which=model, pa_ctxt_len=tokens, kv_events="tcp://127.0.0.1:0", kv_events_replay="tcp://127.0.0.1:0")
    stats = told.kv_events_stats()
    assert stats is not None
    subscriber = subprocess.Popen([sys.executable, "-c", SUBSCRIBER, stats["address"]])
    try:
        for runner in (without, told):
            run(runner, 0)
        ratios = []
        publishing = total = 0.0
        for number in range(1, options.rounds + 1):
            order = (without, told) if number % 2 else (told, without)
            rates = {}
            for runner in order:
                before = processor_seconds()
                rates[runner] = run(runner, number)
                after = processor_seconds()
                if runner is told:
                    publishing += after[0] - before[0]
                    total += after[1] - before[1]
            ratios.append(rates[told] / rates[without])
            print(json.dumps({"without": round(rates[without], 1), "with": round(rates[told], 1)}), flush=True)
        low, high = interval(ratios)
        figures = {name: round(value, 4) for name, value in (("ratio", statistics.median(ratios)), ("low", low), ("high", high))}
        figures["cpu_share"] = round(publishing / total, 5)
        print(json.dumps({**figures, "rounds": options.rounds, "events": told.kv_events_stats()}))
    finally:
        subscriber.kill()


if __name__ == "__main__":
    main()
