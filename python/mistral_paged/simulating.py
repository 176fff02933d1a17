"""The command `simulate`: what a trace of requests comes to, in one engine or in several behind a router."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from mistral_paged.simulator import SimulationResult, simulate

COLUMNS = ("replica", "requests", "output tokens/s", "hit rate", "TTFT p50", "TTFT p99", "preemptions", "seconds")


def run(options: argparse.Namespace) -> None:
    """Simulates and prints the figures, of each replica where there are several."""
    result = simulate(
        options.trace,
        blocks=options.blocks,
        block_size=options.block_size,
        device=options.device,
        policy=options.policy or (),
        max_num_seqs=options.max_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_step_latency=options.max_step_latency,
        prefix_caching=not options.no_prefix_cache,
        replicas=options.replicas,
        router=options.router,
    )
    figures = [{"replica": "all", **figures_of(result)}]
    figures += [{"replica": number, **figures_of(one)} for number, one in enumerate(result.replicas)]
    if options.json:
        whole, *parts = figures
        print(json.dumps({**whole, "rejected": result.rejected, "replicas": parts}))
        return
    rows = [COLUMNS, *(shown(one) for one in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    for number, reason in result.rejected.items():
        print(f"row {number} can never be served: {reason}")


def figures_of(result: SimulationResult) -> dict[str, Any]:
    """The figures of a whole, or of one replica; None where there is nothing to measure."""
    import numpy as np

    waits = result.time_to_first_token[~np.isnan(result.time_to_first_token)]
    median, most = (float(np.quantile(waits, share)) if len(waits) else None for share in (0.5, 0.99))
    return {
        "requests": len(result.end_time),
        "tokens_per_second": None if math.isnan(result.throughput) else result.throughput,
        "hit_rate": None if math.isnan(result.hit_rate) else result.hit_rate,
        "ttft_p50": median,
        "ttft_p99": most,
        "preemptions": int(result.preemptions.sum()),
        "seconds": result.seconds,
        "steps": result.steps,
        "output_tokens": int(result.output_tokens.sum()),
        "computed_tokens": result.computed_tokens,
    }


def shown(figures: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table."""

    def number(name: str, form: str) -> str:
        return "-" if figures[name] is None else format(figures[name], form)

    return (
        str(figures["replica"]),
        number("requests", "d"),
        number("tokens_per_second", ",.0f"),
        number("hit_rate", ".1%"),
        number("ttft_p50", ".3f"),
        number("ttft_p99", ".3f"),
        number("preemptions", "d"),
        number("seconds", ",.1f"),
    )
