"""Naive against paged on the default model: writes docs/memory.md, docs/memory.png and docs/memory_over_time.png.

Runs `mistral_paged.memory` once for each setting, some minutes in all. The budget and the workload decide what comes out; of the
machine's speed depends only which requests have arrived when the first step begins.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tables import table

from mistral_paged import Which, memory
from mistral_paged.default_model import default_model

ROOT = Path(__file__).parent.parent
REQUESTS = 99
SETTINGS = [("naive", 16), ("paged", 16), ("paged", 32)]
"""Mode and block size."""
LIVE, EMPTY, FREE = "#2a6f97", "#d1495b", "#e9ecef"
STYLE: Any = {"axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 150, "font.size": 10}

Report = dict[str, Any]
"""What `memory.as_json` gives."""


def name(report: Report) -> str:
    """A label."""
    return "naive" if report["mode"] == "naive" else f"paged, blocks of {report['block_size']}"


def draw_batch(axes: Axes, reports: Sequence[Report]) -> None:
    """Requests that ran at once."""
    colors = [EMPTY if report["mode"] == "naive" else LIVE for report in reports]
    bars = axes.barh([name(report) for report in reports], [report["batch_size"] for report in reports], color=colors)
    axes.bar_label(bars, padding=3)
    axes.set(title="Requests that run at once", xlim=(0, 1.12 * REQUESTS), xlabel=f"of {REQUESTS}, in one step")
    axes.invert_yaxis()


def draw_shares(axes: Axes, reports: Sequence[Report]) -> None:
    """Of the memory that requests hold, the part with and without keys and values."""
    names = [name(report) for report in reports]
    empty = [100 * report["fragmented_share_of_held"] for report in reports]
    live = [100 - share for share in empty]
    bars = axes.barh(names, live, color=LIVE, label="with keys and values")
    axes.bar_label(bars, [f"{share:.1f} %" for share in live], label_type="edge", padding=4)
    axes.barh(names, empty, left=live, color=EMPTY, label="empty")
    for text, share in zip(axes.texts, live, strict=True):
        text.set_color("white")
        if share > 50:
            text.set(position=(-4, 0), horizontalalignment="right")
    axes.set(
        title="What the memory that requests hold is for",
        xlim=(0, 100),
        xlabel="% of the bytes held, mean over all steps",
        yticks=[],
    )
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=2, frameon=False)


def draw_time(axes: Axes, report: Report) -> None:
    """The budget step by step."""
    budget = report["budget_bytes"] / memory.MIB
    timeline = report["timeline"]
    steps = [sample["step"] for sample in timeline]
    live = [sample["live_bytes"] / memory.MIB for sample in timeline]
    empty = [sample["held_bytes"] / memory.MIB - used for sample, used in zip(timeline, live, strict=True)]
    free = [budget - used - wasted for used, wasted in zip(live, empty, strict=True)]
    labels = ["keys and values", "held, empty", "free"]
    axes.stackplot(steps, live, empty, free, colors=[LIVE, EMPTY, FREE], labels=labels, step="pre", linewidth=0)
    peak = f"{report['batch_size']} requests at once"
    axes.set(title=f"{name(report)}: {peak}", xlabel="step", ylim=(0, budget), xlim=(0, steps[-1]))


def text(reports: Sequence[Report]) -> str:
    """The document."""
    naive, first = reports[0], reports[1]
    rows = []
    for report in reports:
        gigabytes = [report[f"{kind}_bytes"] / memory.GB for kind in ("held", "live", "fragmented")]
        shares = [report["fragmented_share_of_held"], report["fragmented_share_of_budget"]]
        cells = [*(f"{value:.3f}" for value in gigabytes), *(f"{share:.2%}" for share in shares)]
        ratio = report["batch_size"] / naive["batch_size"]
        rows.append([name(report), str(report["batch_size"]), f"{ratio:.1f}", str(report["preemptions"]), *cells])
    header = [
        "",
        "requests at once",
        "times naive",
        "preemptions",
        "held, GB",
        "live, GB",
        "fragmented, GB",
        "of held",
        "of the budget",
    ]
    context = naive["context_len"] * naive["token_bytes"] / memory.MIB
    budget_mb = naive["budget_bytes"] // memory.MIB
    workload = (
        f"Workload: the first human turn of {REQUESTS} real conversations, {first['prompt_tokens']:,} tokens in all, and to each "
        f"as many tokens are generated as the recorded reply has, {first['generated_tokens']:,} in all. All are sent at once. "
        f"Model: the default one, SmolLM2-135M-Instruct, with {naive['token_bytes']:,} bytes of keys and values a token and a "
        f"context of {naive['context_len']:,} tokens. KV budget: {budget_mb} MB. The prefix cache is off."
    )
    fitting = naive["batch_size"]
    modes = (
        f"Naive reserves {context:.0f} MB for each request, a whole context: {fitting} fit, {fitting + 1} do not, and the others "
        "are not sent. Requests at once: the most in one step before any preemption. A step has at most 4,096 tokens, so the "
        "prompts take several; a reply of few tokens can end before the last of them is computed."
    )
    terms = (
        "Held: bytes of the blocks that requests hold. Live: those of them with keys and values. Fragmented: the rest. All are "
        "means over the steps of a run, each taken before any of its requests ended; 1 GB is 10^9 bytes."
    )
    workload, modes, terms = (textwrap.fill(paragraph, 130) for paragraph in (workload, modes, terms))
    pictures = ["![Requests at once, and what they hold](memory.png)", "![The budget step by step](memory_over_time.png)"]
    written = "Written by `make docs-figures` from runs of the engine."
    parts = ["# Naive and paged KV memory", written, workload, modes, "\n".join(table(header, rows)).strip(), terms, *pictures]
    return "\n\n".join(parts) + "\n"


def run(mode: str, block_size: int) -> Report:
    """One run of the engine."""
    return memory.as_json(memory.run(mode, REQUESTS, Which.GGUF(str(default_model())), block_size=block_size))


def main() -> None:
    """Run, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help="folder to write to")
    parser.add_argument("reports", type=Path, nargs="*", help="what `mistral-paged memory --json` printed; left out, new runs")
    arguments = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in arguments.reports] or [run(*setting) for setting in SETTINGS]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 3), layout="constrained")
        batch, shares = figure.subplots(1, 2)
        draw_batch(batch, reports)
        draw_shares(shares, reports)
        figure.savefig(arguments.output / "memory.png")
        figure = Figure(figsize=(11, 4), layout="constrained")
        both = figure.subplots(1, 2, sharey=True)
        for axes, report in zip(both, reports[:2], strict=True):
            draw_time(axes, report)
        both[0].set_ylabel("MB of the KV budget")
        handles, labels = both[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(arguments.output / "memory_over_time.png")
    (arguments.output / "memory.md").write_text(text(reports))


if __name__ == "__main__":
    main()
