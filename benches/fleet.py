"""How replicas behind a router grow, on paper: the table of docs/fleet.md, from simulations. Minutes; the same on every machine.

    python benches/fleet.py [--replicas 1,4,16,100] [--conversations 400]

Every replica has as much to do, however many there are: conversations come at a rate of their own, each of six turns, which begin
with all of the turn before.
"""

from __future__ import annotations

import argparse
import random

import numpy as np

from mistral_paged import simulate

RATE, TURNS = 6.0, 6
"""Conversations a second and a replica, and their turns."""
BLOCKS, DEVICE = 50_000, "llama-8b-h200"
ROUTERS = ("round_robin", "least_loaded", "prefix")


def trace(replicas: int, conversations: int, seed: int = 1) -> list[tuple[float, int, int, int, int]]:
    """Arrival, prompt, answer, and what is shared with the turns of the same conversation."""
    draw = random.Random(seed)
    rows = []
    begin = 0.0
    for conversation in range(replicas * conversations):
        begin += draw.expovariate(RATE * replicas)
        arrival, prompt = begin, draw.randint(200, 1500)
        for _ in range(TURNS):
            answer = draw.randint(50, 400)
            rows.append((arrival, prompt, answer, conversation, prompt + answer))
            prompt += answer + draw.randint(20, 300)
            # Reading the answer as it comes, thinking, typing.
            arrival += 0.02 * answer + draw.expovariate(1 / 20)
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="1,4,16,100", metavar="LIST")
    parser.add_argument("--conversations", default=400, type=int, metavar="N", help="of each replica")
    options = parser.parse_args()
    print("| replicas | router | tokens found | computed, a replica | TTFT p50 | p99 | busiest replica |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for replicas in map(int, options.replicas.split(",")):
        rows = trace(replicas, options.conversations)
        for router in ROUTERS if replicas > 1 else ROUTERS[:1]:
            result = simulate(rows, blocks=BLOCKS, device=DEVICE, replicas=replicas, router=router, max_step_latency=0.25)
            median, most = np.nanquantile(result.time_to_first_token, [0.5, 0.99])
            outputs = [int(one.output_tokens.sum()) for one in result.replicas or (result,)]
            print(
                f"| {replicas} | {router if replicas > 1 else '-'} | {result.hit_rate:.1%} "
                f"| {result.computed_tokens / replicas / 1e6:.2f} M | {1000 * median:,.0f} ms | {1000 * most:,.0f} ms "
                f"| {max(outputs) / np.mean(outputs):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
