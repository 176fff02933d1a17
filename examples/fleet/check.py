"""Asks each of two replicas a share of some prompts, then a router all of them again, and says where they went.

For replicas.sh with a router at http://127.0.0.1:8100; LITELLM_MASTER_KEY is sent as its key.
"""

from __future__ import annotations

import json
import os
import random
import time
import urllib.request
from typing import Any

ROUTER = "http://127.0.0.1:8100"
REPLICAS = ["http://127.0.0.1:8101", "http://127.0.0.1:8102"]
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]
PROMPTS, LENGTH = 20, 150
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('LITELLM_MASTER_KEY', 'none')}"}


def post(url: str, **body: Any) -> dict[str, Any]:
    """The answer to a request."""
    data = json.dumps({"model": "default-model", "temperature": 0, **body}).encode()
    request = urllib.request.Request(url, data, HEADERS)
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def served(replica: str) -> float:
    """Answers that a replica has given so far."""
    with urllib.request.urlopen(f"{replica}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:request_success_total{"))


numbers = random.Random(time.time_ns())
prompts = [" ".join(numbers.choice(WORDS) for _ in range(LENGTH)) for _ in range(PROMPTS)]
for number, prompt in enumerate(prompts):
    post(f"{REPLICAS[number % 2]}/v1/completions", prompt=prompt, max_tokens=1)
# Events travel.
time.sleep(1)
at_home = cached = total = 0
for number, prompt in enumerate(prompts):
    before = served(REPLICAS[number % 2])
    usage = post(f"{ROUTER}/v1/completions", prompt=prompt + " and then", max_tokens=1)["usage"]
    at_home += served(REPLICAS[number % 2]) > before
    cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    total += usage["prompt_tokens"]
chat = post(f"{ROUTER}/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}], max_tokens=8)
print(f"{at_home} of {PROMPTS} prompts went to the replica that had them; {cached} of {total} tokens were not computed")
print(f"a chat: {chat['choices'][0]['message']['content']!r}")
