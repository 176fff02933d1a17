"""Eight conversations behind a router and in one engine: which share of the cached tokens is found again, and what a kill does.

    python conversations.py http://127.0.0.1:8100 --pooled http://127.0.0.1:8101
    python conversations.py http://127.0.0.1:8100 --kill PID

The first asks conversations with one system prompt, of two tenants with a salt each, behind the router and then, in other words,
at one engine. The second kills a process while eight streams run, and tells how each ended and how long requests failed.
LITELLM_MASTER_KEY is sent as the key. Needs the package openai.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]
CONVERSATIONS, TURNS, STREAMS = 8, 8, 8
SECONDS = 40
"""How long requests are sent behind a kill."""


def client_of(url: str, **options: Any) -> openai.OpenAI:
    """A client that tries nothing again by itself."""
    key = os.environ.get("LITELLM_MASTER_KEY", "none")
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60, **options)


def text(numbers: random.Random, count: int) -> str:
    """So many random words."""
    return " ".join(numbers.choice(WORDS) for _ in range(count))


def conversation(client: openai.OpenAI, system: str, salt: str, seed: int) -> tuple[int, int]:
    """Prompt tokens, and those that were found in the cache, of all turns."""
    numbers = random.Random(seed)
    messages: list[Any] = [{"role": "system", "content": system}]
    found = total = 0
    for _ in range(TURNS):
        messages.append({"role": "user", "content": text(numbers, 40)})
        answer = client.chat.completions.create(
            model="default-model",
            messages=messages,
            max_tokens=16,
            temperature=0,
            extra_body={"cache_salt": salt},
            extra_headers={"x-session-id": str(seed)},
        )
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        found += (details and details.cached_tokens) or 0
        total += answer.usage.prompt_tokens
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    return found, total


def hit_rate(url: str) -> float:
    """The share of prompt tokens that were found, over all conversations."""
    seed = time.time_ns()
    system = text(random.Random(seed), 120)
    with client_of(url) as client, ThreadPoolExecutor(CONVERSATIONS) as pool:
        runs = [pool.submit(conversation, client, system, f"tenant {n % 2}", seed + n) for n in range(CONVERSATIONS)]
        counts = [run.result() for run in runs]
    return sum(found for found, _ in counts) / sum(total for _, total in counts)


def stream(client: openai.OpenAI, number: int, begun: threading.Semaphore) -> str:
    """How a long stream ended."""
    parts = 0
    try:
        for _ in client.completions.create(
            model="default-model",
            prompt=text(random.Random(number), 50),
            max_tokens=600,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        ):
            parts += 1
            if parts == 1:
                begun.release()
    except Exception as error:
        return f"{type(error).__module__.split('.')[0]}.{type(error).__name__}: {str(error)[:120]}"
    return "finished"


def kill(url: str, pid: int) -> None:
    """Kills a process while streams run."""
    begun = threading.Semaphore(0)
    with client_of(url) as client, ThreadPoolExecutor(STREAMS) as pool:
        runs = [pool.submit(stream, client, number, begun) for number in range(STREAMS)]
        for _ in range(STREAMS):
            begun.acquire()
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        last, failures, asked = 0.0, collections.Counter[str](), 0
        while (since := time.monotonic() - killed) < SECONDS:
            asked += 1
            try:
                client.completions.create(model="default-model", prompt=f"{since} is", max_tokens=1)
            except openai.OpenAIError as error:
                failures[type(error).__name__] += 1
                last = since
            time.sleep(0.1)
        ends = collections.Counter(run.result() for run in runs)
    for end, count in ends.most_common():
        print(f"{count} of {STREAMS} streams: {end}")
    told = ", ".join(f"{count} {name}" for name, count in failures.items()) or "none"
    print(f"of {asked} requests behind the kill failed: {told}; the last after {last:.1f} s")


def main() -> None:
    """Runs one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("router", help="http://HOST:PORT")
    parser.add_argument("--pooled", metavar="URL", help="one engine, to compare with")
    parser.add_argument("--kill", metavar="PID", type=int, help="kill this process while streams run")
    options = parser.parse_args()
    if options.kill is not None:
        kill(options.router, options.kill)
        return
    routed = hit_rate(options.router)
    print(f"{routed:.1%} of the prompt tokens were found behind the router")
    if options.pooled is not None:
        pooled = hit_rate(options.pooled)
        print(f"{pooled:.1%} in one engine: the router keeps {routed / pooled:.1%}")


if __name__ == "__main__":
    main()
