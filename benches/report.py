"""From the JSON lines of a benchmark run to docs/benchmarks.md and docs/benchmarks.png. Every figure in them was measured."""

from __future__ import annotations

import argparse
from pathlib import Path

from goals import goal_lines
from plots import plot
from records import read
from tables import (
    batch_lines,
    context_lines,
    criterion_lines,
    load_lines,
    machine_lines,
    mixed_lines,
    peer_lines,
    stream_lines,
)

INTRODUCTION = """# Benchmarks

Written by `make bench` from `build/bench/records.jsonl`; only the notes at the end are written by hand. With `PEERS=1` it takes
in the other engines, and a llama of random weights in five formats; for both it compiles llama.cpp. `MODEL_PATH=...` takes
another model, `ROUNDS=5` more rounds. What it runs also runs alone, such as `benches/throughput.py --parts mixed`, or
`benches/peers.py --engines ...`.

Medians, lowest and highest in brackets. Throughput is counted from outside, generated tokens over the time that their answers
took; decode is the pace between the first and the last token of an answer. The roof is the bandwidth of the best pass of
`rust/device/examples/roofline.rs`, with as many threads over 1 GB or twice the last-level cache, a median of the rounds: it is
measured in each, right before and after decoding, since what a virtual machine is given changes. What a token reads is all
weights, as large as in the model's file, and the keys and values of its context. The rate that prompts are compared with where
there is AMX is that of products by tiles alone, of the same program.
"""
NOTES = "## Notes\n"
"""Where the part begins that is written by hand; it is kept."""


def notes(path: Path) -> str:
    """The notes of the report that is there."""
    text = path.read_text() if path.exists() else ""
    return NOTES + text.split(NOTES, 1)[1] if NOTES in text else ""


def main() -> None:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="+", help="files of JSON lines")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs"), help="folder of benchmarks.md and benchmarks.png")
    parser.add_argument("--criterion", type=Path, default=Path("target/criterion"), help="folder of criterion's figures")
    options = parser.parse_args()
    records = read(options.records)
    if not records.own:
        parser.error("no run of throughput.py among the records")
    out = [INTRODUCTION, *machine_lines(records.own[0]), *goal_lines(records, options.criterion)]
    out += ["![Tokens a second against the number of streams, and against the context](benchmarks.png)", ""]
    out += stream_lines(records)
    for run in records.own:
        out += batch_lines(run) + context_lines(run) + mixed_lines(run) + load_lines(run)
    for race in records.races:
        out += peer_lines(race)
    out += criterion_lines(options.criterion)
    path = options.output / "benchmarks.md"
    path.write_text("\n".join([*out, notes(path)]).rstrip() + "\n")
    plot(records, options.output / "benchmarks.png")


if __name__ == "__main__":
    main()
