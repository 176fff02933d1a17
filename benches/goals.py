"""What is wanted, beside what was measured."""

from __future__ import annotations

from pathlib import Path

from records import Records, Run
from tables import criterion_figures, memory_ratio, table

SMOLLM2, GEMMA = "SmolLM2-135M-Instruct.Q4_1", "gemma-3-270m"
FOLDER, FORMATS = "SmolLM2-135M-Instruct-bf16", "random-llama"
RATIOS = {
    SMOLLM2: {"answer": 3.0, "prefill": 2.5, "streams 8": 3.0, "streams 32": 3.5},
    GEMMA: {"answer": 2.2, "prefill": 5.0, "streams 8": 3.0, "streams 32": 3.5},
}
"""Times the best peer."""
NAMES = {"answer": "one stream", "prefill": "prefill", "streams 8": "8 streams", "streams 32": "32 streams"}
ROOF = 0.8
FALL = 0.03
BF16_FLOP, BF16_BATCH = 1.5e12, 3.0
LOAD_SECONDS, LOAD_BYTES = 0.7, 100e6
MEMORY = 1.35
MICROSECONDS = {"step without kernels/1": 60.0, "step without kernels/256": 300.0, "sample a row of 49152/": 50.0}
"""Of a benchmark, or of all whose name begins so."""


class Goals:
    """Rows of what is wanted, what was measured, and whether that is enough."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []

    def at_least(self, what: str, wanted: float, measured: float | None, form: str = "{:.2f}") -> None:
        """Add a row if it was measured."""
        if measured is not None:
            reached = "yes" if measured >= wanted else "**no**"
            self.rows.append([what, "at least " + form.format(wanted), form.format(measured), reached])

    def at_most(self, what: str, wanted: float, measured: float | None, form: str = "{:.2f}") -> None:
        """Add a row if it was measured."""
        if measured is not None:
            reached = "yes" if measured <= wanted else "**no**"
            self.rows.append([what, "at most " + form.format(wanted), form.format(measured), reached])

    def peers(self, records: Records) -> None:
        """Ratios to the best peer."""
        for model, wanted in RATIOS.items():
            run = records.model(model, race=True)
            for work, ratio in wanted.items() if run else ():
                measure, *count = work.split()
                measured = run.ratio(measure, int(count[0]) if count else None) if run else None
                self.at_least(f"{model}: {NAMES[work]}, times the best peer", ratio, measured)

    def roof(self, records: Records) -> None:
        """Decoding at the speed of memory."""
        for run in records.own:
            name = str(run.model["name"])
            if name.startswith((SMOLLM2, FOLDER, FORMATS)):
                share = run.share(run.decode_bytes_per_second())
                self.at_least(f"{name}: decode, share of the roof", ROOF, share, "{:.1%}")
            longest = max(run.of("context_of_1"), default=0)
            for streams, sequences in ((1, "one sequence"), (8, "eight sequences")):
                share = run.share(run.kv_bytes_per_second(longest, streams), "contexts")
                self.at_least(f"{name}: attention at {longest:,} tokens, {sequences}, share of the roof", ROOF, share, "{:.1%}")

    def model(self, run: Run) -> None:
        """What one model is held to."""
        name = str(run.model["name"])
        if name.startswith(FOLDER):
            flop = run.prefill_flop_per_second()
            self.at_least(f"{name}: prefill, TFLOP/s", BF16_FLOP / 1e12, None if flop is None else flop / 1e12)
            one, eight = run.at("batch", 1), run.at("batch", 8)
            self.at_least(f"{name}: 8 streams, times one", BF16_BATCH, eight / one if one and eight else None)
        if run.falls():
            self.at_most(f"{name}: largest fall when streams are added", FALL, max(0.0, max(run.falls())[0]), "{:.1%}")
        for latency in run.of("mixed_pause_ms"):
            pause = run.at("mixed_pause_ms", latency)
            self.at_most(f"{name}: longest pause beside a prompt, ms", latency, pause, "{:.0f}")
        if run.model["file_bytes"] <= LOAD_BYTES:
            self.at_most(f"{name}: load, s", LOAD_SECONDS, run.at("load"))
        self.at_most(f"{name}: memory, times weights and touched KV", MEMORY, memory_ratio(run, "used_resident"))

    def criterion(self, folder: Path) -> None:
        """A step without the model, and sampling."""
        for name, (figures, elements) in criterion_figures(folder).items():
            for what, wanted in MICROSECONDS.items():
                if name == what or (what.endswith("/") and name.startswith(what)):
                    self.at_most(f"{name}, µs", wanted, figures[0] / elements / 1000, "{:.1f}")


def goal_lines(records: Records, criterion: Path) -> list[str]:
    """The table of goals."""
    goals = Goals()
    goals.peers(records)
    goals.roof(records)
    for run in records.own:
        goals.model(run)
    goals.criterion(criterion)
    return ["## Goals", "", *table(["", "wanted", "measured", "reached"], goals.rows)] if goals.rows else []
