"""From the JSON lines of benches/gpu.py to docs/gpu.md and docs/gpu.png. Every figure in them was measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu_plan
from gpu_plan import BASE, SMALL, Work
from tables import percent, table, whole

OWN = "mistral_paged"
MODEL_GOALS = {"BF16": 0.85, "Q4_K": 0.75}
"""Of the roof, with one request."""
INTRODUCTION = """# Benchmarks on a GPU

Written by `make bench-gpu`. Times are medians of runs over synthetic buffers, by events on the GPU; inputs take turns, so that
no run finds its own in a cache. A share is that of the bandwidth of a device-to-device copy, counting bytes read and written,
which was measured first. Bytes are those that have to move: keys and values, or the weight, once, and input and output.
"""


@dataclass
class GpuRecords:
    """One run of gpu.py."""

    machine: dict[str, Any] = field(default_factory=dict)
    works: list[tuple[Work, dict[str, float]]] = field(default_factory=list)
    """Median seconds of each work by engine."""
    models: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    """What was not measured, with the error."""
    seconds: float = 0.0

    def of(self, wanted: Work, engine: str = OWN) -> float | None:
        """Median seconds of a work."""
        return next((times.get(engine) for work, times in self.works if work == wanted), None)

    def kind(self, kind: str) -> list[tuple[Work, dict[str, float]]]:
        """All works of one kind."""
        return [(work, times) for work, times in self.works if work["kind"] == kind and OWN in times]

    @property
    def copy(self) -> float:
        """Bytes a second that a copy moves."""
        ((work, times),) = self.kind("copy")
        return gpu_plan.moved_bytes(work) / times[OWN]

    def share(self, work: Work, seconds: float | None) -> float | None:
        """Of the copy's bandwidth."""
        return None if seconds is None else gpu_plan.moved_bytes(work) / seconds / self.copy

    def peers(self, kind: str) -> list[str]:
        """Others that did some of these works."""
        return sorted({engine for _, times in self.kind(kind) for engine in times} - {OWN})

    def of_model(self, config: dict[str, int]) -> GpuRecords:
        """Those of one model alone."""
        return replace(self, models=[entry for entry in self.models if entry["config"] == config])

    def speed(self, form: str, batch: int, graphs: bool) -> float | None:
        """Median tokens a second of the model."""
        wanted = form, batch, graphs
        found = [
            entry["tokens_per_second"] for entry in self.models if (entry["format"], entry["batch"], entry["graphs"]) == wanted
        ]
        return statistics.median(found[0]) if found else None

    def model_roof(self, form: str, batch: int) -> float:
        """Tokens a second if a step took no longer than reading what it must at the speed of copies."""
        entry = next(entry for entry in self.models if (entry["format"], entry["batch"]) == (form, batch))
        return batch * self.copy / gpu_plan.step_bytes(entry["config"], batch, entry["context"], form)

    def batches(self, form: str) -> list[int]:
        """Of the model with such weights."""
        return sorted({entry["batch"] for entry in self.models if entry["format"] == form})


def read(path: Path) -> GpuRecords:
    """The records of a file."""
    records = GpuRecords()
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        kind = entry.pop("record")
        if kind == "machine":
            records.machine = entry
        elif kind == "model":
            records.models.append(entry)
        elif kind == "failed":
            records.failures.append(entry)
        elif kind == "end":
            records.seconds = entry["seconds"]
        else:
            times = next((times for work, times in records.works if work == entry["work"]), None)
            if times is None:
                records.works.append((entry["work"], times := {}))
            times[entry["engine"]] = statistics.median(entry["seconds"])
    return records


def micro(seconds: float | None) -> str:
    """Microseconds; nothing where it was not measured."""
    return "" if seconds is None else f"{seconds * 1e6:,.1f}"


def goal_lines(records: GpuRecords) -> list[str]:
    """What is wanted, and what was reached."""
    rows = []

    def goal(name: str, wanted: str, measured: str, reached: bool) -> None:
        rows.append([name, wanted, measured, "yes" if reached else "**no**"])

    for batch in (batch for batch in gpu_plan.BATCHES if batch >= 32):
        share = records.share(work := {**BASE, "batch": batch}, records.of(work))
        if share is not None:
            goal(f"decode attention, batch {batch}, 4,096 tokens, bf16", "at least 90%", percent(share), share >= 0.9)
    for cache in ("f8e4m3", "int8"):
        share = records.share(work := {**BASE, "cache": cache}, records.of(work))
        if share is not None:
            goal(f"decode attention, batch 32, 4,096 tokens, {cache}", "at least 80%", percent(share), share >= 0.8)
    if small := records.of(SMALL):
        goal("decode attention, batch 1, 512 tokens, bf16, µs", "at most 8", micro(small), small <= 8e-6)
    llama = records.of_model(gpu_plan.LLAMA_8B)
    for form, wanted in MODEL_GOALS.items():
        speeds = [speed for graphs in (False, True) if (speed := llama.speed(form, 1, graphs)) is not None]
        if speeds:
            share = max(speeds) / llama.model_roof(form, 1)
            name = f"Llama-3-8B's shape, {form}, batch 1, share of the roof"
            goal(name, f"at least {percent(wanted)}", percent(share), share >= wanted)
    return ["## Goals", "", *table(["", "wanted", "measured", "reached"], rows)] if rows else []


def attention_lines(records: GpuRecords) -> list[str]:
    """Batches against contexts, then what another shape changes."""
    works = records.kind("attention")
    if not works:
        return []
    grid = [
        (work, times[OWN]) for work, times in works if {**work, "batch": 0, "context": 0} == {**BASE, "batch": 0, "context": 0}
    ]
    batches = sorted({work["batch"] for work, _ in grid})
    header = ["context", *(f"batch {batch}" for batch in batches)]
    rows = []
    for context in sorted({work["context"] for work, _ in grid}):
        found = {work["batch"]: (work, time) for work, time in grid if work["context"] == context}
        cells = [f"{micro(found[b][1])} ({percent(records.share(*found[b]))})" if b in found else "" for b in batches]
        rows.append([f"{context:,}", *cells])
    text = "8 KV heads of 128, 8 query heads each, bf16, blocks of 16: µs of one layer, and the share of the copy's bandwidth."
    out = ["## Decode attention", "", text, "", "![Share of the copy's bandwidth](gpu.png)", "", *table(header, rows)]
    peers = records.peers("attention")
    rows = []
    for work, times in works:
        others = [f"{micro(times.get(peer))}" for peer in peers]
        rows.append([shape(work), micro(times[OWN]), percent(records.share(work, times[OWN])), *others])
    return [*out, *table(["shape", "µs", "share", *(f"{peer}, µs" for peer in peers)], rows)]


def shape(work: Work) -> str:
    """Of attention, in words."""
    words = f"batch {work['batch']}, {work['context']:,} tokens, {work['queries_per_kv']} queries a KV head"
    return f"{words}, heads of {work['head_dim']}, {work['cache']}, blocks of {work['block_size']}"


def linear_lines(records: GpuRecords) -> list[str]:
    """Products: bandwidth for few rows, operations for many."""
    peers = records.peers("linear")
    rows = []
    for work, times in records.kind("linear"):
        own = times[OWN]
        rate = f"{gpu_plan.operations(work) / own / 1e12:,.1f}"
        what = f"{work['name']}, {work['out_features']:,} x {work['in_features']:,}, {work['format']}"
        others = [micro(times.get(peer)) for peer in peers]
        rows.append([what, f"{work['rows']:,}", micro(own), percent(records.share(work, own)), rate, *others])
    header = ["weight", "rows", "µs", "share", "TFLOP/s", *(f"{peer}, µs" for peer in peers)]
    return ["## Products with weights", "", *table(header, rows)] if rows else []


def models_lines(records: GpuRecords) -> list[str]:
    """Tokens a second of each model."""
    return [
        line for name, config in gpu_plan.MODELS.items() for line in model_lines(f"A model of {name}", records.of_model(config))
    ]


def model_lines(title: str, records: GpuRecords) -> list[str]:
    """Tokens a second of the model."""
    rows = []
    for form, batch in [(name, count) for name in gpu_plan.MODEL_FORMATS for count in records.batches(name)]:
        speeds = [records.speed(form, batch, graphs) for graphs in (False, True)]
        roof = records.model_roof(form, batch)
        best = max(speed for speed in speeds if speed is not None)
        cells = ["" if speed is None else whole(speed) for speed in speeds]
        rows.append([form, str(batch), *cells, whole(roof), percent(best / roof)])
    text = (
        "Random weights, short prompts; tokens a second are counted from outside, prompts included. The roof is that of"
        " reading all weights, and the keys and values of half of the answer, at the speed of copies; for large batches"
        " operations are the limit. Of experts those are read that a step's tokens choose, each as likely as others."
    )
    header = ["weights", "requests", "eager, tokens/s", "with graphs, tokens/s", "roof, tokens/s", "share"]
    return [f"## {title}", "", text, "", *table(header, rows)] if rows else []


def failure_lines(records: GpuRecords) -> list[str]:
    """What was not measured."""
    rows = []
    for entry in records.failures:
        work = entry.get("work") or {name: entry[name] for name in ("format", "graphs")}
        what = ", ".join(f"{name} {value}" for name, value in work.items())
        rows.append([what, entry["error"].splitlines()[0]])
    return ["## Not measured", "", *table(["work", "error"], rows)] if rows else []


def plot(records: GpuRecords, path: Path) -> None:
    """Shares of attention against the batch, and tokens a second of the model."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    for context in gpu_plan.CONTEXTS:
        found = {
            work["batch"]: records.share(work, times[OWN])
            for work, times in records.kind("attention")
            if work == {**BASE, "batch": work["batch"], "context": context}
        }
        if found:
            left.plot(list(found), [100 * (share or 0.0) for share in found.values()], marker="o", label=f"{context:,} tokens")
    left.set(title="Decode attention", xlabel="requests", ylabel="% of the bandwidth of a copy", xscale="log", ylim=(0, 100))
    llama = records.of_model(gpu_plan.LLAMA_8B)
    for color, form in enumerate(gpu_plan.MODEL_FORMATS):
        lines: list[tuple[str, str, Callable[[str, int], float | None]]] = [
            (form, "-", partial(llama.speed, graphs=True)),
            (f"{form}, roof of memory", "--", llama.model_roof),
        ]
        for label, style, speed in lines:
            found = {batch: value for batch in llama.batches(form) if (value := speed(form, batch)) is not None}
            if found:
                right.plot(list(found), list(found.values()), style, color=f"C{color}", marker="o", label=label)
    right.set(title="Llama-3-8B's shape", xlabel="requests", ylabel="tokens/s", xscale="log", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write_report(records: GpuRecords, docs: Path) -> None:
    """gpu.md and gpu.png."""
    machine = records.machine
    where = (
        f"Commit {machine['commit']}, {machine['date']}: {machine['gpu']}, {machine['multiprocessors']} multiprocessors;"
        f" {machine['cpu']}, {machine['cpus']} processors, {machine['system']}, Python {machine['python']}."
        f" A copy moves {records.copy / 1e12:.2f} TB/s. All of it took {records.seconds / 60:.1f} minutes."
    )
    parts = [goal_lines, attention_lines, linear_lines, models_lines, failure_lines]
    lines = [INTRODUCTION, where, "", *(line for part in parts for line in part(records))]
    (docs / "gpu.md").write_text("\n".join(lines).rstrip() + "\n")
    plot(records, docs / "gpu.png")
