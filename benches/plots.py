"""The pictures of docs/benchmarks.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from records import OWN, Records, Run

COLORS = {
    OWN: "#1f77b4",
    "llamacpp-native": "#d1495b",
    "llamacpp": "#f4a261",
    "openvino": "#6a994e",
    "mistralrs": "#8d6a9f",
}


def curve(axes: Axes, samples: dict[int, list[float]], label: str, color: str) -> None:
    """Medians with their spread as a band."""
    if samples:
        at = list(samples)
        (line,) = axes.plot(at, [statistics.median(values) for values in samples.values()], marker="o", label=label, color=color)
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


def draw_batches(axes: Axes, run: Run) -> None:
    """Tokens a second against the number of streams."""
    curve(axes, run.of("batch"), f"{OWN}, decode", color=COLORS[OWN])
    ticks = [count for count in run.of("batch") if count & (count - 1) == 0]
    finish(axes, f"{run.model['name']}: streams together", "streams", ticks)


def draw_contexts(axes: Axes, run: Run, streams: int) -> None:
    """Tokens a second of so many streams against the context, and where the roof is."""
    speeds = run.of(f"context_of_{streams}")
    curve(axes, speeds, f"{OWN}, decode", color=COLORS[OWN])
    if roof_share := run.share(1.0, "contexts"):
        roof = [streams / (run.bytes_read(length, streams) * roof_share) for length in speeds]
        axes.plot(list(speeds), roof, linestyle="--", color="grey", label="all that memory can be read")
    finish(axes, f"{run.model['name']}: context, streams: {streams}", "context of each stream, tokens", list(speeds))


def draw_race(axes: Axes, run: Run) -> None:
    """Tokens a second of every engine against the number of streams."""
    for engine in run.versions:
        samples = {**run.of("answer", engine), **run.of("streams", engine)}
        curve(axes, samples, engine, color=COLORS.get(engine, "black"))
    counts = sorted({at for engine in run.versions for at in [1, *run.of("streams", engine)]})
    finish(axes, f"{run.model['name']}: engines, streams together", "streams, short prompts included", counts)


def plot(records: Records, path: Path) -> None:
    """Axes for each model that was measured with many streams or long contexts, and for each race; two in a row."""
    drawings: list[Callable[[Axes], None]] = []
    for run in records.own:
        if len(run.of("batch")) > 2:
            drawings.append(partial(draw_batches, run=run))
        drawings += [partial(draw_contexts, run=run, streams=streams) for streams in (1, 8) if run.of(f"context_of_{streams}")]
    drawings += [partial(draw_race, run=run) for run in records.races if run.versions]
    rows = max(1, -(-len(drawings) // 2))
    figure, axes = plt.subplots(rows, 2, figsize=(12, 4.8 * rows), squeeze=False, layout="constrained")
    for place in axes.flat[len(drawings) :]:
        place.set_axis_off()
    for draw, place in zip(drawings, axes.flat, strict=False):
        draw(place)
    figure.savefig(path, dpi=120)
    plt.close(figure)
