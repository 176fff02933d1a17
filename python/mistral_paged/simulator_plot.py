"""Pictures of simulations; needs matplotlib."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogFormatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mistral_paged.simulator import SimulationResult

KINDS = {
    "token_states": ("token states", "#2a6f97"),
    "reserved": ("reserved, filled later", "#89c2d9"),
    "internal": ("internal fragmentation", "#f4a261"),
    "external": ("external fragmentation", "#d1495b"),
    "cached": ("free, prefix cached", "#b7c9a8"),
    "free": ("free", "#ececec"),
}
"""Labels and colours, from the bottom of a stack to its top."""

PERCENTILES = np.arange(1, 100)
STYLE: Any = {"font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 140}


def draw(result: SimulationResult, path: str | PathLike[str]) -> None:
    """Memory by kind, requests, and latencies, below each other."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 9.5), layout="constrained")
        memory, requests, latency = figure.subplots(3, 1, height_ratios=[1.3, 0.8, 1])
        _memory(memory, result)
        _requests(requests, result)
        requests.sharex(memory)
        _latency(latency, result)
        figure.savefig(path)


def _steps(result: SimulationResult) -> Any:
    """The edges of the intervals, `[num_intervals + 1]`."""
    timeline = result.timeline
    end = timeline.time[-1] + timeline.seconds[-1] if timeline.time.size else 0.0
    return np.append(timeline.time, end)


def _memory(axes: Axes, result: SimulationResult) -> None:
    timeline = result.timeline
    edges = _steps(result)
    total = sum(timeline.memory.values())
    bottom = np.zeros(len(timeline.time))
    for kind, (label, color) in KINDS.items():
        if not timeline.memory[kind].any():
            continue
        top = bottom + 100 * timeline.memory[kind] / total
        axes.stairs(top, edges, baseline=bottom, fill=True, color=color, label=label, linewidth=0)
        bottom = top
    axes.set(title="KV memory", ylabel="share of the pool, %", ylim=(0, 100), xlabel="time, s")
    axes.margins(x=0)
    _legend(axes, reverse=True)


def _requests(axes: Axes, result: SimulationResult) -> None:
    edges = _steps(result)
    axes.stairs(result.timeline.running, edges, baseline=None, color="#2a6f97", linewidth=1.2, label="running")
    axes.stairs(result.timeline.waiting, edges, baseline=None, color="#d1495b", linewidth=1.2, label="waiting")
    axes.set(title="Requests", ylabel="requests", xlabel="time, s")
    axes.set_ylim(bottom=0)
    _legend(axes)


class _MinorSeconds(LogFormatter):
    """Seconds at the ticks between powers of ten, where these are too few."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return EngFormatter(unit="s")(x) if super().__call__(x, pos) else ""


def _latency(axes: Axes, result: SimulationResult) -> None:
    latencies = {
        "time to first token": (result.time_to_first_token, "#d1495b"),
        "inter-token, worst of a request": (result.inter_token_latency_max, "#f4a261"),
        "inter-token, mean of a request": (result.inter_token_latency_mean, "#2a6f97"),
    }
    for label, (values, color) in latencies.items():
        known = values[~np.isnan(values)]
        if known.size:
            axes.plot(PERCENTILES, np.percentile(known, PERCENTILES), color=color, label=label)
    axes.set(title="Latencies", xlabel="percentile of the requests", yscale="log", xlim=(0, 100))
    axes.yaxis.set_major_formatter(EngFormatter(unit="s"))
    axes.yaxis.set_minor_formatter(_MinorSeconds())
    axes.grid(axis="y", alpha=0.3)
    _legend(axes)


def _legend(axes: Axes, *, reverse: bool = False) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles, labels, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=reverse)
