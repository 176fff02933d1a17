"""The paper's four allocators in the simulator: writes docs/allocators.md and docs/allocators.png.

Every figure comes from a simulation, which has no clock and no randomness but a seed: the files are the same on every machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tables import table

from mistral_paged.simulator import SOURCES, SimulationResult, poisson_trace, simulate
from mistral_paged.simulator_plot import KINDS, STYLE

ROOT = Path(__file__).parent.parent
DATA = ROOT / "examples" / "data" / "sharegpt.csv"
DEVICE = "llama-8b-h200"
BLOCKS, BLOCK_SIZE = 6250, 16
MAX_MODEL_LEN = 4096
REQUESTS = 4000
SATURATING = 50.0
RATES = [float(rate) for rate in range(2, 66, 2)]
ALLOCATORS = {
    "max": ("Max", "#d1495b"),
    "pow2": ("Pow2", "#f4a261"),
    "oracle": ("Oracle", "#6a994e"),
    "paged": ("Paged", "#2a6f97"),
}
"""Labels and colours."""
PAPER = ("watermark", "newest", "fcfs")
"""What the paper's engine goes by."""
POLICIES = [(admission, victim) for admission in ("watermark", "optimistic", "reserved") for victim in ("least_cost", "newest")]
LIMITS = [0.02, 0.1]
"""Seconds a token that may be too slow."""
SLOW = 0.2
"""Seconds a token, at which the second picture ends."""
DOCUMENT = """# Four ways to give requests their KV memory

Written by `make docs-figures` from simulations of the production scheduler and pool; the same on every machine.

The baselines of the PagedAttention paper (arXiv 2309.06180, section 6.1) reserve contiguous memory from a buddy allocator when a
request is admitted: for the longest context ({max_model_len:,} tokens, Max), for the prompt and the output's length rounded up to
a power of two (Pow2), or for just what will be needed, the output's length being foreknown (Oracle). All are served first come,
first served, and batched step by step.

Workload: {requests:,} requests with the lengths of real conversations ([sharegpt.csv](../examples/data/README.md), drawn with
replacement), arriving at random at {rate:g} a second. Memory: {slots:,} tokens, in blocks of {block_size} when paged; no prefix
cache. Device {device}.

![What the KV memory holds, and the latency of a token](allocators.png)

Percent of the whole KV memory, a mean over the time in which requests wait:

{memory}
Reserved slots will be filled later by the request that holds them; internal fragmentation never will. External fragmentation is
what the buddy allocator rounds up, and free pieces too small for the request that waits. The requests run at once are a mean
over the same time.

The highest rate of those tried at which a request takes, from its arrival to its end, at most so long a generated token:

{rates}
The paged engine above goes by the paper's policies: first come, first served, and who came last is preempted. The scheduler has
others (`watermark` and `least_cost` by default), here on the same requests with fairness `priority`; recomputed is the share of
all computed tokens, the first token a median:

{policies}"""


def run(allocator: str, rate: float, requests: int, policy: Sequence[str] | None = None) -> SimulationResult:
    """One simulation of the setting that all have in common."""
    return simulate(
        poisson_trace(DATA, rate=rate, count=requests),
        blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        device=DEVICE,
        allocator=allocator,
        policy=(PAPER if allocator == "paged" else ()) if policy is None else policy,
        max_num_seqs=512,
        max_model_len=MAX_MODEL_LEN,
        prefix_caching=False,
    )


def shares(result: SimulationResult) -> dict[str, float]:
    """Percent of the memory by kind, over the steps in which a request had to wait."""
    assert result.saturated is not None, "the rate must be high enough that requests wait"
    return {kind: 100 * slots / (BLOCKS * BLOCK_SIZE) for kind, slots in result.saturated.memory.items()}


def running(result: SimulationResult) -> float:
    """Mean of the requests that ran while others had to wait."""
    return result.saturated.running if result.saturated else 0.0


def draw_memory(axes: Axes, results: dict[str, SimulationResult]) -> None:
    """Stacked bars of the memory by kind."""
    left = dict.fromkeys(results, 0.0)
    for kind, (label, color) in KINDS.items():
        widths = [shares(result)[kind] for result in results.values()]
        if max(widths) == 0.0:
            continue
        bars = axes.barh([ALLOCATORS[name][0] for name in results], widths, left=list(left.values()), color=color, label=label)
        texts = [f"{width:.1f}" if width >= 4 else "" for width in widths]
        axes.bar_label(bars, labels=texts, label_type="center", fontsize=9, color="white" if kind == "token_states" else "black")
        left = {name: left[name] + width for name, width in zip(results, widths, strict=True)}
    axes.set(title="What the KV memory holds while requests wait", xlabel="share of the KV memory, %", xlim=(0, 100))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, frameon=False)


def draw_latency(axes: Axes, latencies: dict[str, list[float]]) -> None:
    """Normalized latency against the rate of requests."""
    for name, values in latencies.items():
        label, color = ALLOCATORS[name]
        axes.plot(RATES, [1000 * value for value in values], linewidth=1.8, color=color, label=label)
    axes.set(title="Latency of a token", xlabel="requests a second", ylabel="normalized latency, ms a token")
    axes.set(ylim=(0, 1000 * SLOW), xlim=(0, RATES[-1]))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4, frameon=False)


def policy_row(policy: tuple[str, str], result: SimulationResult) -> list[str]:
    """What a pair of policies comes to."""
    return [
        *policy,
        f"{shares(result)['token_states']:.1f}",
        f"{running(result):.1f}",
        f"{result.preemptions.sum():,}",
        f"{100 * result.recomputed_tokens / result.computed_tokens:.1f}",
        f"{np.median(result.time_to_first_token):.1f}",
        f"{result.throughput:,.0f}",
    ]


def text(
    results: dict[str, SimulationResult], latencies: dict[str, list[float]], policies: dict[tuple[str, str], SimulationResult]
) -> str:
    """The document."""
    oracle = running(results["oracle"])
    rows = []
    for name, result in results.items():
        share = shares(result)
        cells = [f"{share[kind]:.1f}" for kind in ("token_states", "reserved", "internal", "external", "free")]
        rows.append([ALLOCATORS[name][0], *cells, f"{running(result):.1f}", f"{running(result) / oracle:.2f}"])
    header = ["", "token states", "reserved", "internal", "external", "free", "requests at once", "times Oracle"]
    rates = [[ALLOCATORS[name][0], *(str(value) for value in sustained(values))] for name, values in latencies.items()]
    requests = ["requests a second", *(f"{1000 * limit:g} ms" for limit in LIMITS)]
    columns = [
        "admission",
        "victim",
        "token states, %",
        "requests at once",
        "preemptions",
        "recomputed, %",
        "first token, s",
        "tokens/s",
    ]
    return DOCUMENT.format(
        policies="\n".join(table(columns, [policy_row(*pair) for pair in policies.items()])),
        device=f"`{DEVICE}`: {SOURCES[DEVICE]}",
        slots=BLOCKS * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        requests=len(results["paged"].end_time),
        rate=SATURATING,
        memory="\n".join(table(header, rows)),
        rates="\n".join(table(requests, rates)),
    )


def sustained(latencies: list[float]) -> list[str]:
    """The highest rate before the latency goes over each limit."""
    found = []
    for limit in LIMITS:
        within = [rate for rate, latency in zip(RATES, latencies, strict=True) if latency <= limit]
        found.append(f"{max(within):g}" if within else f"below {RATES[0]:g}")
    return found


def main() -> None:
    """Simulate, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help="folder to write to")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="requests of each simulation")
    arguments: Any = parser.parse_args()
    results = {name: run(name, SATURATING, arguments.requests) for name in ALLOCATORS}
    latencies = {name: [run(name, rate, arguments.requests).normalized_latency for rate in RATES] for name in ALLOCATORS}
    policies = {policy: run("paged", SATURATING, arguments.requests, policy) for policy in POLICIES}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 4.6), layout="constrained")
        memory, latency = figure.subplots(1, 2, width_ratios=[1.25, 1])
        draw_memory(memory, results)
        draw_latency(latency, latencies)
        figure.savefig(arguments.output / "allocators.png")
    (arguments.output / "allocators.md").write_text(text(results, latencies, policies))


if __name__ == "__main__":
    main()
