"""Reads the JSON lines of benchmark runs, and what follows from them."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

OWN = "mistral_paged"
LONG = 8
"""Times the shortest context: where attention takes enough of a step to be told from the rest."""


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
    """Tokens that were seen in the middle of decoding one stream."""

    @property
    def is_race(self) -> bool:
        """Of several engines."""
        return bool(self.versions or self.dropped)

    def of(self, measure: str, engine: str = OWN) -> dict[int, list[float]]:
        """Samples of a measure, by where they were taken, in order."""
        return dict(sorted(self.samples.get((engine, measure), {}).items()))

    def at(self, measure: str, where: int | None = None, engine: str = OWN) -> float | None:
        """Median at a number of streams or tokens, or of all that there is; None when it was not measured."""
        found = self.of(measure, engine)
        values = [value for at, some in found.items() if where in (None, at) for value in some]
        return statistics.median(values) if values else None

    def share(self, bytes_per_second: float | None, part: str = "single") -> float | None:
        """Of the roof that was measured in the same rounds."""
        roof = self.at(f"roof_{part}")
        return None if roof is None or bytes_per_second is None else bytes_per_second / (1e9 * roof)

    def bytes_read(self, seen: float, streams: int = 1) -> float:
        """Bytes that a step of so many streams reads: the weights, and keys and values of the tokens that each sees.

        Of experts, those that are met at random by some token.
        """
        missed = (1 - self.model["expert_share"]) ** streams
        weights = self.model["weight_bytes"] - missed * self.model["expert_bytes"]
        return float(weights + streams * seen * self.model["kv_bytes_per_token"])

    def decode_bytes_per_second(self) -> float | None:
        """What decoding one stream reads."""
        speed = self.at("decode")
        return None if speed is None else speed * self.bytes_read(statistics.mean(self.contexts))

    def prefill_flop_per_second(self) -> float | None:
        """Twice the parameters of the layers' matrices for each token, and attention to the tokens before it."""
        for tokens in self.of("prefill"):
            pairs = tokens * (tokens + 1) / 2
            work = float(2 * tokens * self.model["layer_parameters"] + pairs * self.model["attention_flop_per_pair"])
            return work * (self.at("prefill") or 0.0) / tokens
        return None

    def falls(self) -> list[tuple[float, int, int]]:
        """By which part the medians of `batch` fall from one number of streams to the next one measured."""
        medians = [(count, statistics.median(values)) for count, values in self.of("batch").items()]
        pairs = pairwise(medians)
        return [(1 - after / before, fewer, more) for (fewer, before), (more, after) in pairs]

    def kv_bytes_per_second(self, length: int, streams: int) -> float | None:
        """Keys and values that attention reads, by what a step takes longer than at a context a fraction as long."""
        speeds = self.of(f"context_of_{streams}")
        shortest = min(speeds, default=length)
        if length not in speeds or length < LONG * shortest:
            return None
        steps = [streams / statistics.median(speeds[at]) for at in (shortest, length)]
        return streams * (length - shortest) * float(self.model["kv_bytes_per_token"]) / (steps[1] - steps[0])

    def ratio(self, measure: str, where: int | None = None) -> float | None:
        """Our median over that of the best peer."""
        peers = [value for engine in self.versions if engine != OWN and (value := self.at(measure, where, engine)) is not None]
        own = self.at(measure, where)
        return None if own is None or not peers else own / max(peers)


@dataclass
class Records:
    """Everything that was measured."""

    runs: list[Run] = field(default_factory=list)

    @property
    def own(self) -> list[Run]:
        """The runs of throughput.py."""
        return [run for run in self.runs if not run.is_race]

    @property
    def races(self) -> list[Run]:
        """The runs of peers.py."""
        return [run for run in self.runs if run.is_race]

    def model(self, name: str, race: bool = False) -> Run | None:
        """The run of a model, by how its name begins."""
        runs = self.races if race else self.own
        return next((run for run in runs if str(run.model["name"]).startswith(name)), None)


def read(paths: list[Path]) -> Records:
    """The records of some files."""
    records = Records()
    for path in paths:
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            kind = entry.pop("record")
            if kind == "machine":
                records.runs.append(Run(entry))
            else:
                add(records.runs[-1], kind, entry)
    return records


def add(run: Run, kind: str, entry: dict[str, Any]) -> None:
    """One record of a run."""
    if kind == "model":
        run.model = entry
    elif kind == "machine_use":
        run.use = entry
    elif kind == "engine":
        run.versions[entry["engine"]] = entry["version"]
    elif kind == "dropped":
        run.dropped[entry["engine"]] = entry["reason"]
    else:
        run.samples[entry["engine"], entry["measure"]][entry["at"]].append(entry["value"])
        run.contexts += [entry["context"]] if "context" in entry else []
