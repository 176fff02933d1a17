"""The production scheduler and block pool in virtual time, against a cost model of a device.

>>> from mistral_paged import simulate
>>> result = simulate([(0.0, 512, 128), (0.1, 512, 128)], blocks=1024, device="llama-8b-h200")
>>> result.time_to_first_token, result.throughput, result.saturated

A trace replays the arrivals of requests; which of them run, wait, are preempted or find a cached prefix is decided by the very
code that serves a model. There is no randomness: the same trace gives the same result, bit for bit.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from mistral_paged import _core
from mistral_paged.exceptions import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    _FloatArray: TypeAlias = NDArray[np.float64]
    _IntArray: TypeAlias = NDArray[np.int64]

__all__ = ["DEVICES", "Device", "Means", "SimulationResult", "Timeline", "plot", "poisson_trace", "simulate"]

COLUMNS = ("arrival", "prompt_tokens", "output_tokens", "prefix_id", "prefix_tokens", "tenant", "priority", "deadline")
NEEDED = COLUMNS[:3]
NAMES = ("prefix_id", "tenant")
"""Columns whose values only tell requests apart: any number or text."""

Trace: TypeAlias = str | PathLike[str] | Mapping[str, Any] | Iterable[Sequence[Any] | Mapping[str, Any]]


class Device(NamedTuple):
    """A device and a model on it, as the time that a step takes.

    A step lasts `step_seconds + weights_seconds + token_seconds * tokens in it + kv_token_seconds * KV tokens read`; a request
    reads the KV of all its tokens in each of its steps. Nothing is said to overlap.
    """

    step_seconds: float
    """Whatever is in the step: launches, sampling, the scheduler. At least 1e-6."""
    weights_seconds: float
    """To read all weights once."""
    token_seconds: float
    """To compute one token, attention apart."""
    kv_token_seconds: float
    """To read the KV of one token in all layers."""


DEVICES: dict[str, Device] = {name: Device(*times) for name, times, _ in _core.simulator_devices()}
"""The devices that can be named. `SOURCES` tells where their figures come from."""
SOURCES: dict[str, str] = {name: source for name, _, source in _core.simulator_devices()}
"""Where the figures of `DEVICES` come from."""


@dataclass(frozen=True)
class Means:
    """Means over a stretch of time."""

    seconds: float
    """How long it was."""
    running: float
    """Requests in the batch."""
    waiting: float
    """Requests that wait."""
    memory: dict[str, float]
    """Slots of the pool by what they are taken by, see `Timeline.memory`."""


@dataclass(frozen=True)
class Timeline:
    """What happened over time. All arrays are `[num_intervals]`, with as many intervals as was asked for at most."""

    time: _FloatArray
    """When the interval begins, in seconds."""
    seconds: _FloatArray
    """How long it is."""
    running: _FloatArray
    """Requests in the batch, a mean over the interval; so are the others."""
    waiting: _FloatArray
    """Requests that wait."""
    memory: dict[str, _FloatArray]
    """Slots by kind, whose sum is the pool. A slot is the place of one token's KV in the layers of one KV group.

    - `token_states`: hold the KV of a token of a live request; one that several requests share counts once
    - `internal`: held by a request that will never fill them
    - `reserved`: held by a request that will fill them later
    - `external`: of no use to anybody: what a buddy allocator rounds up, and pieces too small for the request that waits
    - `cached`: free, but a prefix in them can still be found
    - `free`
    """


@dataclass(frozen=True)
class SimulationResult:
    """What became of each request (arrays `[num_requests]`, in the order of the trace), and of the whole."""

    time_to_first_token: _FloatArray
    """Seconds from arrival to the first token; NaN if none came."""
    inter_token_latency_mean: _FloatArray
    """Seconds between two tokens; NaN with fewer than two."""
    inter_token_latency_max: _FloatArray
    """The longest of them."""
    end_time: _FloatArray
    """When it ended, in seconds of the trace."""
    output_tokens: _IntArray
    """Tokens generated."""
    preemptions: _IntArray
    """Times its blocks were taken."""
    cached_tokens: _IntArray
    """Prompt tokens from the prefix cache when it first ran."""
    finish_reason: NDArray[np.str_]
    """`stop`: with all its tokens; `length`: with fewer, for the context or the whole pool was full; `deadline`: it
    had passed; `rejected`: see there."""
    rejected: dict[int, str]
    """Requests that could never be served, by row, and why."""

    timeline: Timeline
    """What happened over time."""
    overall: Means | None
    """Means over all time; None if there was none."""
    saturated: Means | None
    """Means over the steps in which a request had to wait; None if none ever did, and of several replicas together."""

    steps: int
    """Steps of the device, or of all devices."""
    seconds: float
    """From the first arrival to the last end."""
    throughput: float
    """Generated tokens a second, over all of `seconds`."""
    normalized_latency: float
    """Mean over the requests of seconds from arrival to end for each token generated; NaN if there are none."""
    hit_rate: float
    """Share of the prompt tokens, each request's looked up once, that the prefix cache had; NaN if none was looked up."""
    computed_tokens: int
    """Tokens computed, prompts and outputs, those that were computed again included."""
    recomputed_tokens: int
    """Of those, how many had been computed before and were lost by a preemption."""

    replica: _IntArray
    """Which replica each request went to."""
    replicas: tuple[SimulationResult, ...]
    """What became of each replica, with the requests that it had, by arrival; empty unless there are several. Times are those of
    the whole."""


def simulate(
    trace: Trace,
    *,
    blocks: int,
    block_size: int = 16,
    device: str | Device | tuple[float, float, float, float] = "llama-8b-h200",
    policy: str | Sequence[str] = (),
    allocator: str = "paged",
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    max_step_latency: float | None = None,
    max_model_len: int | None = None,
    prefix_caching: bool = True,
    windows: Sequence[int | None] = (),
    num_intervals: int = 1024,
    strict: bool = False,
    replicas: int = 1,
    router: str = "round_robin",
) -> SimulationResult:
    """Run the production scheduler and pool in virtual time.

    :param trace: the requests, in any order: a list of tuples or dicts, a mapping of columns, or the path of a CSV file with a
        header. The columns, in this order in a tuple: `arrival` in seconds, `prompt_tokens`, `output_tokens`, and, if wanted,
        `prefix_id` with `prefix_tokens` (requests with the same id share so many leading tokens, prompt or output, so that the
        turns of a conversation find each other), `tenant`, `priority` (lower goes first), `deadline` (a time in seconds, as
        `arrival`).
    :param blocks: usable blocks of the pool.
    :param block_size: tokens a block.
    :param device: one of `DEVICES` by name, or a `Device`.
    :param policy: names of the scheduler's policies, at most one of a kind: admission `watermark` (default), `reserved` or
        `optimistic`; victim of a preemption `least_cost` (default) or `newest`; fairness `priority` (default), `fcfs` or `drr`.
    :param allocator: `paged`, or one of those that the PagedAttention paper (arXiv 2309.06180, section 6.1) compares with:
        contiguous memory from a buddy allocator over `blocks * block_size` tokens, first come, first served, reserved for
        `max_model_len` (`max`), for the prompt and the output rounded up to a power of two (`pow2`), or for just what will be
        needed (`oracle`). These have no prefix cache, and refuse requests with a priority or a deadline.
    :param max_num_seqs: most requests in a step.
    :param max_num_batched_tokens: most tokens in a step.
    :param max_step_latency: about how many seconds a step may take, as `Runner`'s argument of this name (0.25 there unless
        given); None for as long as its tokens do. Only with the allocator `paged`.
    :param max_model_len: most tokens of a request; by default as many as the longest of the trace has.
    :param prefix_caching: whether prefixes are looked up and kept.
    :param windows: attention window of each layer, None for full attention; by default full attention throughout.
    :param num_intervals: most intervals of the timeline.
    :param strict: raise when a request can never be served, rather than let it end as `rejected`.
    :param replicas: engines, each with `blocks` of its own, at most 4096.
    :param router: which replica a request is sent to when it comes: the next (`round_robin`), the one with the fewest requests
        (`least_loaded`), or the one that was sent the longest beginning of the prompt (`prefix`), unless that is less than a
        tenth of it or the replica has 16 requests more than the idlest one.
    :raises InvalidArgumentError: naming the argument, or the row (from 0) and the column of the trace.
    """
    settings = {
        "policy": [policy] if isinstance(policy, str) else policy,
        "allocator": allocator,
        "blocks": blocks,
        "block_size": block_size,
        "device": device,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_step_latency": max_step_latency,
        "max_model_len": max_model_len,
        "prefix_caching": prefix_caching,
        "windows": windows,
        "num_intervals": num_intervals,
        "replicas": replicas,
        "router": router,
    }
    columns = _columns(trace)
    found = _core.simulate(columns, settings)
    rejected = dict(row for one in found for row in one["rejected"].items())
    if strict and rejected:
        row, reason = min(rejected.items())
        raise InvalidArgumentError(f"trace row {row} can never be served: {reason}")
    return _whole(found, columns["arrival"], rejected, num_intervals)


def poisson_trace(
    lengths: str | PathLike[str] | Iterable[tuple[int, int]], *, rate: float, count: int, seed: int = 0
) -> list[tuple[float, int, int]]:
    """Draw `count` requests with replacement, arriving at `rate` a second on average, independently of each other.

    :param lengths: prompt and output tokens of the requests to draw from, or a CSV file with columns of these names.
    :param seed: of the random numbers; the same seed gives the same trace.
    """
    if isinstance(lengths, (str, PathLike)):
        _, rows = _csv_rows(lengths)
        try:
            pairs = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in rows]
        except KeyError as error:
            raise InvalidArgumentError(f"{lengths} has no column {error}") from None
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"{lengths}: {error}") from None
    else:
        pairs = list(lengths)
    if not pairs:
        raise InvalidArgumentError("`lengths` is empty: there is nothing to draw from")
    if not (math.isfinite(rate) and rate > 0):
        raise InvalidArgumentError(f"`rate` must be finite and above 0, got {rate}")
    if count < 0:
        raise InvalidArgumentError(f"`count` must be at least 0, got {count}")
    draw = random.Random(seed)
    now = 0.0
    trace = []
    for _ in range(count):
        now += draw.expovariate(rate)
        prompt_tokens, output_tokens = pairs[draw.randrange(len(pairs))]
        trace.append((now, prompt_tokens, output_tokens))
    return trace


def plot(result: SimulationResult, path: str | PathLike[str]) -> None:
    """Draw memory by kind, requests, and the percentiles of the latencies. Needs `pip install mistral-paged[plot]`.

    :param path: where to write the picture; its suffix is the format (`.png`, `.svg`, `.pdf`).
    """
    try:
        from mistral_paged.simulator_plot import draw
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'mistral-paged[plot]'", name=error.name) from None
    draw(result, path)


def _columns(trace: Trace) -> dict[str, _FloatArray]:
    """The columns of a trace, with NaN where there is nothing."""
    import numpy as np

    raw = _raw_columns(trace)
    unknown = [name for name in raw if name not in COLUMNS]
    if unknown:
        raise InvalidArgumentError(f"the trace has an unknown column {unknown[0]!r}; known columns are {', '.join(COLUMNS)}")
    missing = [name for name in NEEDED if name not in raw]
    if missing:
        raise InvalidArgumentError(f"the trace has no column `{missing[0]}`; it has {', '.join(raw) or 'none'}")
    columns = {}
    for name, values in raw.items():
        if name in NAMES:
            values = _codes(values)
        try:
            column = np.array(values, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            column = np.array([_number(name, row, value) for row, value in enumerate(values)], dtype=np.float64)
        if column.ndim != 1:
            raise InvalidArgumentError(f"the trace's `{name}` must have one dimension, not {column.ndim}")
        columns[name] = column
    return columns


def _raw_columns(trace: Trace) -> Mapping[str, Any]:
    """Columns by name, whatever form the trace has."""
    if isinstance(trace, (str, PathLike)):
        names, rows = _csv_rows(trace)
        for row, cells in enumerate(rows):
            if None in cells or None in cells.values():
                raise InvalidArgumentError(
                    f"{trace}: trace row {row} has not as many cells as the header, which has {len(names)}"
                )
        return {name: [cells[name] for cells in rows] for name in names}
    if isinstance(trace, Mapping):
        return trace
    names = getattr(getattr(trace, "dtype", None), "names", None) or []
    if names:
        records: Any = trace
        return {name: records[name] for name in names}
    return _columns_of_rows(list(trace))


def _csv_rows(path: str | PathLike[str]) -> tuple[list[str], list[dict[str, Any]]]:
    """Header and rows of a CSV file, which may begin with the byte order mark of a spreadsheet."""
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows: list[dict[str, Any]] = list(reader)
            names = list(reader.fieldnames or [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidArgumentError(f"{path} is not a CSV file in UTF-8: {error}") from None
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise InvalidArgumentError(f"{path} has two columns {twice[0]!r}")
    return names, rows


def _columns_of_rows(rows: list[Any]) -> dict[str, list[Any]]:
    """Columns of tuples, in the order of `COLUMNS`, or of dicts."""
    if not rows:
        return {name: [] for name in NEEDED}
    given: list[Mapping[str, Any]] = []
    for row, request in enumerate(rows):
        if isinstance(request, Mapping):
            cells = dict(request)
        else:
            values = list(request)
            if len(values) > len(COLUMNS):
                raise InvalidArgumentError(
                    f"trace row {row} has {len(values)} values; at most {len(COLUMNS)}: {', '.join(COLUMNS)}"
                )
            cells = dict(zip(COLUMNS, values, strict=False))
        missing = [name for name in NEEDED if name not in cells]
        if missing:
            raise InvalidArgumentError(f"trace row {row} has no `{missing[0]}`")
        given.append(cells)
    names = dict.fromkeys(name for cells in given for name in cells)
    return {name: [cells.get(name) for cells in given] for name in names}


def _is_none(value: Any) -> bool:
    return value is None or value == "" or value != value


def _codes(values: Iterable[Hashable]) -> list[float]:
    """Numbers that tell the values apart, from 1; NaN for none."""
    codes: dict[Hashable, float] = {}
    return [math.nan if _is_none(value) else codes.setdefault(value, len(codes) + 1.0) for value in values]


def _number(name: str, row: int, value: Any) -> float:
    if _is_none(value):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"trace row {row}: `{name}` is {value!r}: a number is needed") from None


def _whole(found: list[dict[str, Any]], arrival: _FloatArray, rejected: dict[int, str], num_intervals: int) -> SimulationResult:
    """What all replicas come to, in the order of the trace."""
    import numpy as np

    replica: _IntArray = np.zeros(len(arrival), dtype=np.int64)
    requests = {name: np.empty(len(arrival), dtype=column.dtype) for name, column in found[0]["requests"].items()}
    for number, one in enumerate(found):
        replica[one["rows"]] = number
        for name, column in one["requests"].items():
            requests[name][one["rows"]] = column
    if len(found) == 1:
        return _result({**found[0], "requests": requests}, rejected, replica)
    replicas = tuple(_of_replica(one, number) for number, one in enumerate(found))
    sums = [name for name, value in found[0]["totals"].items() if isinstance(value, int)]
    totals = {name: sum(one["totals"][name] for one in found) for name in sums}
    seconds = max(one["totals"]["seconds"] for one in found)
    served = requests["output_tokens"] > 0
    each = (requests["end_time"] - arrival)[served] / requests["output_tokens"][served]
    timeline = _together(replicas, seconds, num_intervals)
    lasts = timeline.pop("seconds")
    means = [float(np.average(series, weights=lasts)) if seconds else math.nan for series in timeline.values()]
    totals |= {"seconds": seconds, "normalized_latency": float(each.mean()) if len(each) else math.nan, "saturated": None}
    totals["overall"] = (seconds, means[1], means[2], means[3:]) if seconds else None
    whole = {**found[0], "requests": requests, "totals": totals, "timeline": {**timeline, "seconds": lasts}}
    return _result(whole, rejected, replica, replicas)


def _of_replica(found: dict[str, Any], number: int) -> SimulationResult:
    """What became of one replica of several."""
    import numpy as np

    rows: list[int] = found["rows"].tolist()
    rejected = {place: found["rejected"][row] for place, row in enumerate(rows) if row in found["rejected"]}
    return _result(found, rejected, np.full(len(rows), number, dtype=np.int64))


def _together(replicas: Sequence[SimulationResult], seconds: float, num_intervals: int) -> dict[str, _FloatArray]:
    """The sums of several timelines, over intervals of equal length. A replica that has ended stays as it was, but idle."""
    import numpy as np

    kinds = list(replicas[0].timeline.memory)
    number = min(num_intervals, max(len(one.timeline.time) for one in replicas))
    start = min((float(one.timeline.time[0]) for one in replicas if len(one.timeline.time)), default=0.0)
    edges = start + seconds * np.arange(number + 1) / max(number, 1)
    names = ["running", "waiting", *kinds]
    sums = {name: np.zeros(number) for name in names}
    pool = next((sum(series[0] for series in one.timeline.memory.values()) for one in replicas if len(one.timeline.time)), 0.0)
    for one in replicas:
        timeline = one.timeline
        if not len(timeline.time):
            sums["free"] += pool
            continue
        last = {kind: series[-1:] for kind, series in timeline.memory.items()}
        columns = {"running": timeline.running, "waiting": timeline.waiting, **timeline.memory}
        times = np.concatenate([timeline.time[:1], timeline.time[:1] + np.cumsum(timeline.seconds), edges[-1:]])
        for name in names:
            values = np.concatenate([columns[name], last.get(name, [0.0])])
            integral = np.concatenate([[0.0], np.cumsum(values * np.diff(times))])
            sums[name] += np.diff(np.interp(edges, times, integral)) * number / seconds
    return {"time": edges[:-1], **sums, "seconds": np.diff(edges)}


def _result(
    found: dict[str, Any], rejected: dict[int, str], replica: _IntArray, replicas: tuple[SimulationResult, ...] = ()
) -> SimulationResult:
    import numpy as np

    kinds: list[str] = found["memory_kinds"]
    requests, totals = dict(found["requests"]), found["totals"]
    ending = np.array(found["endings"])[requests.pop("ending")]
    timeline = dict(found["timeline"])
    memory = {kind: timeline.pop(kind) for kind in kinds}

    def means(values: Any) -> Means | None:
        if values is None:
            return None
        seconds, running, waiting, slots = values
        return Means(seconds, running, waiting, dict(zip(kinds, slots, strict=True)))

    return SimulationResult(
        **requests,
        finish_reason=ending,
        rejected=rejected,
        timeline=Timeline(**timeline, memory=memory),
        overall=means(totals["overall"]),
        saturated=means(totals["saturated"]),
        steps=totals["steps"],
        seconds=totals["seconds"],
        throughput=_ratio(totals["output_tokens"], totals["seconds"]),
        normalized_latency=totals["normalized_latency"],
        hit_rate=_ratio(totals["prefix_hit_tokens"], totals["prefix_queried_tokens"]),
        computed_tokens=totals["computed_tokens"],
        recomputed_tokens=totals["recomputed_tokens"],
        replica=replica,
        replicas=replicas,
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
