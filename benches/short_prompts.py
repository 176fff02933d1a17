"""How long prompts wait for their first token in the simulator: writes docs/short-prompts.md.

Every figure comes from a simulation, which has no clock and no randomness but a seed: the file is the same on every machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tables import table

from mistral_paged.simulator import Device, SimulationResult, poisson_trace, simulate

ROOT = Path(__file__).parent.parent
DATA = ROOT / "examples" / "data" / "sharegpt.csv"
REQUESTS = 2000
BLOCKS, BLOCK_SIZE = 6250, 16
LONG_PROMPT, EVERY = 6000, 20
"""Tokens of a long prompt, and the requests of which one has it."""
SHORT = 64
"""Most tokens of a short prompt."""
CORES = Device(step_seconds=2e-4, weights_seconds=5e-3, token_seconds=1.2e-3, kv_token_seconds=3e-7)
"""SmolLM2-135M on two cores of a server, rounded."""
MACHINES: dict[str, tuple[str | Device, float, float]] = {
    "Llama-3-8B on an H200": ("llama-8b-h200", 25.0, 0.05),
    "SmolLM2-135M on two cores": (CORES, 0.6, 0.25),
}
"""Device, requests a second, and `max_step_latency`."""
DOCUMENT = """# How long short prompts wait

Written by `make docs-figures` from simulations of the production scheduler; the same on every machine.

Two rules keep a short prompt from waiting for a long one. A step takes about `max_step_latency`, also where nobody is being
answered. And a quarter of a step's prompt tokens goes to the prompts with the least left to compute; the first in order of rank
keeps the rest. So a long prompt takes at most a third longer, however many short ones come. `fairness="fcfs"` computes prompts
strictly as they come.

Workload: {requests:,} requests with the lengths of real conversations ([sharegpt.csv](../examples/data/README.md), drawn with
replacement), arriving at random; one in {every} has a prompt of {long:,} tokens instead. Seconds from arrival to the first token.
"Before" is first come, first served, with steps as long as their tokens take.

{machines}"""


def trace(rate: float) -> list[tuple[float, int, int]]:
    """Conversations, some of which begin with a document."""
    requests = poisson_trace(DATA, rate=rate, count=REQUESTS)
    return [
        (arrival, LONG_PROMPT if number % EVERY == EVERY // 2 else prompt, output)
        for number, (arrival, prompt, output) in enumerate(requests)
    ]


def rows(name: str, result: SimulationResult, prompts: np.ndarray) -> list[list[str]]:
    """Percentiles of the first token's time, of short prompts and of long ones."""
    kinds = {f"up to {SHORT} tokens": prompts <= SHORT, f"{LONG_PROMPT:,} tokens": prompts == LONG_PROMPT}
    found = []
    for kind, chosen in kinds.items():
        quantiles = np.percentile(result.time_to_first_token[chosen], [50, 95, 99])
        found.append([kind, name, *(f"{seconds:.2f}" for seconds in quantiles), f"{result.throughput:,.0f}"])
    return found


def machine(device: str | Device, rate: float, latency: float) -> list[str]:
    """The table of a device."""
    requests = trace(rate)
    prompts = np.array([prompt for _, prompt, _ in requests])
    settings: dict[str, Any] = {"blocks": BLOCKS, "block_size": BLOCK_SIZE, "device": device, "prefix_caching": False}
    results = {
        "before": simulate(requests, policy="fcfs", **settings),
        f"steps of {latency:g} s": simulate(requests, policy="fcfs", max_step_latency=latency, **settings),
        "and a quarter for the shortest": simulate(requests, max_step_latency=latency, **settings),
    }
    lines = [row for name, result in results.items() for row in rows(name, result, prompts)]
    lines.sort(key=lambda row: row[0].startswith(f"{LONG_PROMPT:,}"))
    return table(["prompt", "scheduler", "p50", "p95", "p99", "output tokens/s"], lines)


def main() -> None:
    """Simulates and writes."""
    lines = []
    for name, (device, rate, latency) in MACHINES.items():
        lines += [f"{name}, {rate:g} requests a second:", "", *machine(device, rate, latency)]
    text = DOCUMENT.format(requests=REQUESTS, every=EVERY, long=LONG_PROMPT, machines="\n".join(lines))
    (ROOT / "docs" / "short-prompts.md").write_text(text)


if __name__ == "__main__":
    main()
