"""From the JSON lines of a benchmark run to docs/benchmarks.md and docs/benchmarks.png. Every figure in them was measured."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

OWN = "mistral_paged"
MIB = 1 << 20


@dataclass
class Run:
    """One run of throughput.py or peers.py: samples by engine, measure and number of streams or tokens."""

    machine: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    use: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    samples: dict[tuple[str, str], dict[int, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    contexts: list[int] = field(default_factory=list)

    def of(self, measure: str, engine: str = OWN) -> dict[int, list[float]]:
        """Samples of a measure, by where they were taken, in order."""
        return dict(sorted(self.samples.get((engine, measure), {}).items()))

    def at(self, measure: str, where: int | None = None, engine: str = OWN) -> float | None:
        """Median at a number of streams or tokens, or of all that there is; None when it was not measured."""
        found = self.of(measure, engine)
        values = [value for at, some in found.items() if where in (None, at) for value in some]
        return statistics.median(values) if values else None


def read(paths: list[Path]) -> tuple[list[Run], list[dict[str, Any]]]:
    """The runs of some files, and the measurements of the memory."""
    runs: list[Run] = []
    roofs = []
    for path in paths:
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            kind = entry.pop("record", "roof")
            if kind == "roof":
                roofs.append(entry)
            elif kind == "machine":
                runs.append(Run(entry))
            elif kind == "model":
                runs[-1].model = entry
            elif kind == "machine_use":
                runs[-1].use = entry
            elif kind == "engine":
                runs[-1].versions[entry["engine"]] = entry["version"]
            elif kind == "dropped":
                runs[-1].dropped[entry["engine"]] = entry["reason"]
            else:
                runs[-1].samples[entry["engine"], entry["measure"]][entry["at"]].append(entry["value"])
                runs[-1].contexts += [entry["context"]] if "context" in entry else []
    return runs, roofs


class Roofs:
    """Read bandwidths: of memory that no cache holds, and of a buffer of a model's size."""

    def __init__(self, measured: list[dict[str, Any]]) -> None:
        self.by_size: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for entry in measured:
            self.by_size[entry["buffer_bytes"]].append(entry)

    def bandwidth(self, size: int) -> float:
        """Bytes a second of a buffer, of the best pass: another program can slow a pass down, none can speed it up."""
        return 1e9 * max(float(entry["best_gb_per_s"]) for entry in self.by_size[size])

    def sizes(self, model: dict[str, Any]) -> list[int]:
        """Sizes of interest: the largest buffer, then the one of the model's weights."""
        if not self.by_size:
            return []
        return list(dict.fromkeys([max(self.by_size), *(size for size in self.by_size if size == model["weight_bytes"])]))


def whole(value: float) -> str:
    """Rounded, with enough digits for small figures."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def spread(values: list[float]) -> str:
    """Median, and what it lies between."""
    return f"{whole(statistics.median(values))} ({whole(min(values))} to {whole(max(values))})"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """A table in markdown, the first column left-aligned."""
    body = [f"| {' | '.join(row)} |" for row in [header, *rows]]
    return [body[0], "|" + " --- |" + " ---: |" * (len(header) - 1), *body[1:], ""]


def machine_lines(run: Run) -> list[str]:
    """Where, when and what."""
    machine = run.machine
    parts = [
        f"Commit {machine['commit']}, {machine['date']}: {machine['cpu']}",
        f"{machine['cpus']} processors ({', '.join(machine['extensions'])})",
        f"{machine['cache_kib'] // 1024} MiB last-level cache",
        f"{machine['memory_bytes'] / 2**30:.0f} GiB memory",
        machine["system"],
        f"Python {machine['python']}.",
    ]
    text = ", ".join(parts)
    if run.use:
        seconds = run.use["seconds"] * machine["cpus"]
        others, stolen = max(0.0, run.use["busy"] - run.use["own"]) / seconds, run.use["stolen"] / seconds
        text += (
            f" While it ran, other programs used {others:.0%} of the processors and a hypervisor took away {stolen:.0%}; the load"
        )
        text += f" average was {machine['load']:.1f} when it began and {run.use['load']:.1f} when it ended."
        if others > 0.1:
            text += (
                " **The machine was shared: the speeds and the roofs are those of what was left of it, and that changed from one"
            )
            text += " measurement to the next. A share of the roof, or a ratio of two figures, says little here.**"
    return [text, ""]


def memory_lines(roofs: Roofs) -> list[str]:
    """The read bandwidths."""
    rows = []
    for size, measured in sorted(roofs.by_size.items(), reverse=True):
        medians = [entry["gb_per_s"] for entry in measured]
        best = max(entry["best_gb_per_s"] for entry in measured)
        rows.append([f"{size / 1e6:,.0f} MB", str(measured[0]["threads"]), ", ".join(f"{m:.1f}" for m in medians), f"{best:.1f}"])
    return ["## Memory", "", *table(["buffer", "threads", "GB/s, median of each run", "best pass"], rows)]


def roof_cells(run: Run, roofs: Roofs, speed: float, context: int) -> list[str]:
    """GB/s that a speed at a context reads, and its share of each roof."""
    a_token = run.model["weight_bytes"] + context * run.model["kv_bytes_per_token"]
    shares = [f"{speed * a_token / roofs.bandwidth(size):.0%}" for size in roofs.sizes(run.model)]
    return [f"{speed * a_token / 1e9:.1f}", *shares]


def own_lines(run: Run, roofs: Roofs) -> list[str]:
    """The tables of a run of throughput.py."""
    model = run.model
    roof_names = [f"of {size / 1e6:,.0f} MB" for size in roofs.sizes(model)]
    roof_header = ["reads, GB/s", *(f"share of the roof {name}" for name in roof_names)]
    rounds = len(run.of("decode").get(1, []))
    out = [f"## {model['name']}", "", f"Rounds: {rounds}. Medians, lowest and highest in brackets. Prefix cache off.", ""]
    context = round(statistics.mean(run.contexts)) if run.contexts else 0
    rows = [
        [
            f"decode of one stream, {context} tokens of context",
            spread(values),
            *roof_cells(run, roofs, statistics.median(values), context),
        ]
        for values in run.of("decode").values()
    ]
    blank = [""] * len(roof_header)
    rows += [["one stream, prompt included", spread(values), *blank] for values in run.of("answer").values()]
    rows += [[f"prefill of {tokens:,} tokens", spread(values), *blank] for tokens, values in run.of("prefill").items()]
    out += table(["", "tokens/s", *roof_header], rows)

    single = run.at("streams", 1)
    rows = [
        [str(count), spread(values), f"{statistics.median(values) / single:.2f}" if single else ""]
        for count, values in run.of("streams").items()
    ]
    out += table(["streams, short prompts included", "tokens/s together", "times one"], rows)

    rows = []
    for length, values in run.of("context").items():
        prefill = run.of("prefill_context").get(length, [])
        cells = roof_cells(run, roofs, statistics.median(values), length)
        rows.append([f"{length:,}", spread(values), *cells, spread(prefill) if prefill else ""])
    out += table(["context, tokens", "decode, tokens/s", *roof_header, "prefill, tokens/s"], rows)

    loads = [value for values in run.of("load").values() for value in values]
    if loads:
        rows = [["load, first", f"{loads[0]:.2f} s", ""], ["load, best", f"{min(loads):.2f} s", ""]]
        names = {
            "load_resident": "memory after loading",
            "load_peak": "peak while loading",
            "used_resident": "memory after a first answer",
        }
        for measure, name in names.items():
            grown = run.at(measure)
            if grown:
                rows.append([name, f"{grown / MIB:.0f} MiB", f"{grown / model['weight_bytes']:.2f}"])
        out += table(["in a fresh process, over the imported package", "", "times the weights"], rows)
    return out


def peer_lines(run: Run) -> list[str]:
    """The table of a run of peers.py; the ratio is to the fastest peer of the line."""
    engines = list(run.versions)
    others = [engine for engine in engines if engine != OWN]
    work = [("answer", "one stream"), ("prefill", "prefill"), ("streams", "streams")]
    rows = []
    for measure, name in work:
        wheres: list[int | None] = [None]
        if measure != "prefill":
            wheres = [*sorted({at for engine in engines for at in run.of(measure, engine)})]
        for where in wheres:
            if measure == "streams" and where == 1:
                continue
            figures = {engine: run.at(measure, where, engine) for engine in engines}
            peers = [value for engine in others if (value := figures[engine]) is not None]
            own = figures.get(OWN)
            ratio = f"{own / max(peers):.2f}" if own is not None and peers else ""
            label = f"{where} {name}" if measure == "streams" else name
            if measure == "prefill":
                lengths = sorted({at for engine in engines for at in run.of(measure, engine)})
                label += f" of {' or '.join(f'{length:,}' for length in lengths)} tokens"
            rows.append([label, *("" if value is None else whole(value) for value in figures.values()), ratio])
    rounds = max((len(run.of("answer", engine).get(1, [])) for engine in engines), default=0)
    header = ["tokens/s", *(f"{engine} {version}" for engine, version in run.versions.items()), "times the best peer"]
    when = f"{run.machine['date']}, commit {run.machine['commit']}, load average {run.machine['load']:.1f} at its beginning"
    text = f"Engines take turns in each round; medians of {rounds}; {when}. Prompts are included."
    out = [f"## {run.model['name']}: peers", "", text, "", *table(header, rows)]
    out += [f"- {engine} drops out: {reason}" for engine, reason in run.dropped.items()]
    return [*out, ""] if run.dropped else out


def book_lines(criterion: Path) -> list[str]:
    """What the benchmarks of the KV books and of a scheduler step left in criterion's folder."""
    rows = []
    for path in sorted(criterion.glob("**/new/estimates.json")):
        benchmark = json.loads((path.parent / "benchmark.json").read_text())
        median = json.loads(path.read_text())["median"]
        interval = median["confidence_interval"]
        figures = [median["point_estimate"], interval["lower_bound"], interval["upper_bound"]]
        elements = (benchmark["throughput"] or {}).get("Elements", 1)
        rows.append([benchmark["full_id"], *(duration(figure) for figure in figures), duration(figures[0] / elements)])
    if not rows:
        return []
    header = ["", "median", "from", "to", "a block or step"]
    return [
        "## KV books and scheduler",
        "",
        "Medians and their 95 % intervals, by `make bench-scheduler`.",
        "",
        *table(header, rows),
    ]


def duration(nanoseconds: float) -> str:
    """With the unit that suits it."""
    for unit, size in (("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds:.3g} ns"


def curve(axes: Axes, samples: dict[int, list[float]], label: str) -> None:
    """Medians with their spread as a band."""
    if samples:
        at = list(samples)
        (line,) = axes.plot(at, [statistics.median(values) for values in samples.values()], marker="o", label=label)
        low, high = [min(values) for values in samples.values()], [max(values) for values in samples.values()]
        axes.fill_between(at, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def finish(axes: Axes, title: str, across: str, ticks: list[int]) -> None:
    """Titles, units and a legend."""
    axes.set(title=title, xlabel=across, ylabel="tokens/s", xscale="log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, axes.get_ylim()[1] * 1.25)  # room for the legend
    axes.grid(alpha=0.3)
    axes.legend()


def plot(runs: list[Run], roofs: Roofs, path: Path) -> None:
    """A row of axes for each model: tokens a second against the number of streams, and against the context."""
    own = [run for run in runs if not run.versions]
    figure, rows = plt.subplots(len(own), 2, figsize=(12, 4.8 * len(own)), squeeze=False, layout="constrained")
    for run, (left, right) in zip(own, rows, strict=True):
        curve(left, run.of("streams"), OWN)
        for other in runs:
            if other.versions and other.model["name"] == run.model["name"]:
                for engine in other.versions:
                    if engine != OWN:
                        curve(left, other.of("streams", engine), engine)
        finish(left, f"{run.model['name']}: streams together", "streams", list(run.of("streams")))
        contexts = run.of("context")
        curve(right, contexts, f"{OWN}, decode of one stream")
        for size in roofs.sizes(run.model):
            speeds = [
                roofs.bandwidth(size) / (run.model["weight_bytes"] + at * run.model["kv_bytes_per_token"]) for at in contexts
            ]
            label = f"roof: {roofs.bandwidth(size) / 1e9:.0f} GB/s, read from {size / 1e6:,.0f} MB"
            right.plot(list(contexts), speeds, linestyle="--", label=label)
        finish(right, f"{run.model['name']}: long contexts", "context, tokens", list(contexts))
    figure.savefig(path, dpi=120)
    plt.close(figure)


INTRODUCTION = """# Benchmarks

Written by `make bench`; `PEERS=1 make bench` measures the peers too (to install and to run them takes a while), and
`MODEL_PATH=...` takes another model. The raw figures are in `build/bench/`.

Throughput is counted from outside, generated tokens over the time that their answers took; decode is the pace between the first
and the last token of an answer. The roof of decoding is the bandwidth at which the best pass of
`rust/device/examples/roofline.rs` reads memory with as many threads, in the same run, over the bytes a token reads: all weights,
and the keys and values of its context.
"""


def main() -> None:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="+", help="files of JSON lines")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs"), help="folder of benchmarks.md and benchmarks.png")
    parser.add_argument("--criterion", type=Path, default=Path("target/criterion"), help="folder of the scheduler's benchmarks")
    options = parser.parse_args()
    runs, measured = read(options.records)
    own = [run for run in runs if not run.versions]
    if not own:
        parser.error("no run of throughput.py among the records")
    roofs = Roofs(measured)
    out = [INTRODUCTION, *machine_lines(own[-1])]
    out += ["![Tokens a second against the number of streams, and against the context](benchmarks.png)", ""]
    if measured:
        out += memory_lines(roofs)
    for run in runs:
        out += peer_lines(run) if run.versions else own_lines(run, roofs)
    out += book_lines(options.criterion)
    (options.output / "benchmarks.md").write_text("\n".join(out).rstrip() + "\n")
    plot(runs, roofs, options.output / "benchmarks.png")


if __name__ == "__main__":
    main()
