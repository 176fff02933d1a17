"""The tables of docs/benchmarks.md."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

from records import OWN, Records, Run

MIB = 1 << 20


def whole(value: float) -> str:
    """Rounded, with enough digits for small figures."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def spread(values: list[float]) -> str:
    """Median, and what it lies between."""
    return f"{whole(statistics.median(values))} ({whole(min(values))} to {whole(max(values))})"


def percent(share: float | None) -> str:
    """Nothing where it was not measured."""
    return "" if share is None else f"{share:.0%}"


def giga(value: float | None) -> str:
    """In units of 1e9."""
    return "" if value is None else f"{value / 1e9:.1f}"


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
        text += f" While it ran, other programs used {others:.0%} of the processors and a hypervisor took away {stolen:.0%}."
        if others > 0.1:
            text += (
                " **The machine was shared: speeds and roofs are those of what was left of it, and that changed from one"
                " measurement to the next. A share of the roof, or a ratio of two figures, says little here.**"
            )
    return [text, ""]


def stream_lines(records: Records) -> list[str]:
    """One stream and one prompt of every model."""
    rows = []
    for run in records.own:
        for values in run.of("decode").values():
            reads = run.decode_bytes_per_second()
            roof = run.at("roof_single")
            speeds = [spread(values), giga(reads), "" if roof is None else f"{roof:.1f}", percent(run.share(reads))]
            cells = [str(run.model["name"]), *speeds]
            prefill = run.of("prefill")
            flop, tiles = run.prefill_flop_per_second(), run.at("tiles")
            share = None if flop is None or tiles is None else flop / 1e12 / tiles
            for tokens, found in prefill.items():
                cells += [f"{tokens:,}", spread(found), "" if flop is None else f"{flop / 1e12:.2f}", percent(share)]
            rows.append(cells + [""] * (0 if prefill else 4))
    header = [
        "",
        "decode, tokens/s",
        "reads, GB/s",
        "roof, GB/s",
        "share",
        "prompt",
        "prefill, tokens/s",
        "TFLOP/s",
        "of the tiles",
    ]
    if not any(run.at("tiles") for run in records.own):
        header, rows = header[:-1], [row[:-1] for row in rows]
    return ["## One stream", "", *table(header, rows)] if rows else []


def batch_lines(run: Run) -> list[str]:
    """Streams together."""
    batch = run.of("batch")
    if not batch:
        return []
    one = run.at("batch", 1)
    falls = {more: fall for fall, _, more in run.falls()}
    rows = [
        [
            str(count),
            spread(values),
            f"{statistics.median(values) / one:.2f}" if one else "",
            f"{-falls[count]:+.1%}" if count in falls else "",
        ]
        for count, values in batch.items()
    ]
    rounds = max(map(len, batch.values()))
    fall, fewer, more = max(run.falls(), default=(0.0, 0, 0))
    told = f"The largest fall is {fall:.1%}, from {fewer} to {more}." if fall > 0 else "It falls nowhere."
    text = f"Prompts of 8 tokens, medians of {rounds} rounds that took all numbers in turn. {told}"
    title = f"## {run.model['name']}: streams together"
    return [title, "", text, "", *table(["streams", "tokens/s", "times one", "change"], rows)]


def context_lines(run: Run) -> list[str]:
    """Long contexts."""
    out = []
    for streams, name in ((1, "one sequence"), (8, "eight sequences")):
        rows = []
        for length, values in run.of(f"context_of_{streams}").items():
            reads = run.bytes_read(length, streams) * statistics.median(values) / streams
            kv = run.kv_bytes_per_second(length, streams)
            prefill = run.of("prefill_context").get(length, []) if streams == 1 else []
            shares = [giga(reads), percent(run.share(reads, "contexts")), giga(kv), percent(run.share(kv, "contexts"))]
            rows.append([f"{length:,}", spread(values), *shares, spread(prefill) if prefill else ""])
        header = [
            f"context of {name}",
            "decode, tokens/s",
            "reads, GB/s",
            "of the roof",
            "KV, GB/s",
            "of the roof",
            "prefill, tokens/s",
        ]
        if rows:
            cut = None if streams == 1 else -1
            out += table(header[:cut], [row[:cut] for row in rows])
    if not out:
        return []
    text = "KV is what attention reads, over the time that a step takes longer than at the shortest context."
    roof = run.at("roof_contexts")
    text += "" if roof is None else f" The roof was {roof:.1f} GB/s meanwhile."
    return [f"## {run.model['name']}: long contexts", "", text, "", *out]


def mixed_lines(run: Run) -> list[str]:
    """A long prompt beside streams."""
    measures = ["mixed_alone_ms", "mixed_pause_ms", "mixed_chunk", "mixed_prompt_s"]
    rows = [
        [f"{latency} ms", *(spread(run.of(measure)[latency]) for measure in measures)] for latency in run.of("mixed_pause_ms")
    ]
    if not rows:
        return []
    header = ["`max_step_latency`", "step before, ms", "longest pause, ms", "tokens a chunk, mean", "prompt, s"]
    text = "Seven streams decode while a prompt of 4,096 tokens is computed; the longest pause between two tokens of any stream."
    return [f"## {run.model['name']}: a prompt beside streams", "", text, "", *table(header, rows)]


def load_lines(run: Run) -> list[str]:
    """Time to load, and memory."""
    loads = [value for values in run.of("load").values() for value in values]
    if not loads:
        return []
    rows = [["load, first", f"{loads[0]:.2f} s", ""], ["load, best", f"{min(loads):.2f} s", ""]]
    names = {
        "load_resident": "memory after loading",
        "load_peak": "peak while loading",
        "used_resident": "memory after a first answer",
    }
    for measure, name in names.items():
        grown = run.at(measure)
        if grown:
            rows.append([name, f"{grown / MIB:.0f} MiB", f"{memory_ratio(run, measure):.2f}"])
    header = ["in a fresh process, over package and tokenizer", "", "times weights and touched KV"]
    return [f"## {run.model['name']}: load", "", *table(header, rows)]


def memory_ratio(run: Run, measure: str) -> float | None:
    """Growth of memory over the bytes of the weights, and of the KV that an answer touches."""
    grown = run.at(measure)
    touched = (run.at("kv_touched") or 0.0) if measure == "used_resident" else 0.0
    return None if grown is None else grown / (run.model["weight_bytes"] + touched)


def peer_lines(run: Run) -> list[str]:
    """The table of a run of peers.py; the ratio is to the fastest peer of the line."""
    engines = list(run.versions)
    counts = sorted({at for engine in engines for at in run.of("streams", engine)})
    lengths = sorted({at for engine in engines for at in run.of("prefill", engine)})
    prompt = f"prefill of {' or '.join(f'{length:,}' for length in lengths)} tokens"
    work = [("answer", None, "one stream"), ("prefill", None, prompt)]
    rows = []
    for measure, where, name in [*work, *(("streams", count, f"{count} streams") for count in counts)]:
        cells = [engine_cell(run, measure, where, engine) for engine in engines]
        ratio = run.ratio(measure, where)
        rows.append([name, *cells, "" if ratio is None else f"{ratio:.2f}"])
    rounds = max((len(run.of("answer", engine).get(1, [])) for engine in engines), default=0)
    header = ["tokens/s", *(f"{engine} {version}" for engine, version in run.versions.items()), "times the best peer"]
    text = (
        f"Engines take turns at each piece of work, all with {run.machine['cpus']} threads and without prefix caches; prompts are"
        f" included. Medians of {rounds} rounds; a figure in brackets is of one round, since it was far behind."
    )
    out = [f"## {run.model['name']}: peers", "", text, "", *table(header, rows)]
    # Of paths in a message, only the file is of interest.
    out += [f"- {engine} drops out: {re.sub(r'/[^ ]*/', '', ' '.join(text.split()))}" for engine, text in run.dropped.items()]
    return [*out, ""] if run.dropped else out


def engine_cell(run: Run, measure: str, where: int | None, engine: str) -> str:
    """A figure; in brackets when the engine was too slow to be measured again."""
    value = run.at(measure, where, engine)
    if value is None:
        return ""

    def samples(name: str) -> int:
        return sum(len(values) for at, values in run.of(measure, name).items() if where in (None, at))

    return whole(value) if samples(engine) >= samples(OWN) else f"({whole(value)})"


def criterion_figures(folder: Path) -> dict[str, tuple[list[float], int]]:
    """Of each benchmark in criterion's folder: nanoseconds (median, ends of its interval) and elements."""
    found = {}
    for path in sorted(folder.glob("**/new/estimates.json")):
        benchmark = json.loads((path.parent / "benchmark.json").read_text())
        median = json.loads(path.read_text())["median"]
        interval = median["confidence_interval"]
        elements = (benchmark["throughput"] or {}).get("Elements", 1)
        found[benchmark["full_id"]] = ([median["point_estimate"], interval["lower_bound"], interval["upper_bound"]], elements)
    return found


def criterion_lines(folder: Path) -> list[str]:
    """What the books, a step and sampling cost."""
    rows = [
        [name, *(duration(figure) for figure in figures), duration(figures[0] / elements)]
        for name, (figures, elements) in criterion_figures(folder).items()
    ]
    if not rows:
        return []
    text = "Medians and their 95 % intervals, by `make bench-scheduler`."
    return ["## A step without the model", "", text, "", *table(["", "median", "from", "to", "each"], rows)]


def duration(nanoseconds: float) -> str:
    """With the unit that suits it."""
    for unit, size in (("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds:.3g} ns"
