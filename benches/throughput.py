"""What mistral_paged does with a model. Writes JSON lines, and what it is at on standard output.

Each round takes every measurement once, so that a slow spell of the machine falls on all of them. The prefix cache is off, but
for contexts, where it saves computing the same prompts again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from measures import ENGINE, VOCABULARY, Bench, load_once, which
from model_bytes import model_bytes
from work import SENTENCES, Log, busy, load, machine, story

from mistral_paged import Runner
from mistral_paged.default_model import default_model

BATCHES = [1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 32, 33, 48, 64]
CONTEXTS = [128, 256, 512, 1024, 2048, 4096, 8192]
CONTEXTS_OF_8 = [128, 1024, 8192]
LATENCIES = [0.05, 0.25]
MIXED_PROMPT, MIXED_STREAMS = 4096, 7


class Plan:
    """What is measured of a model, as the command line says."""

    def __init__(self, model: Path, log: Log, options: argparse.Namespace) -> None:
        self.model = model
        self.log = log
        self.options = options

    def bench(self, max_seqs: int, prefix_cache_n: int = 0, max_step_latency: float = 0.25) -> Bench:
        """The model, loaded and warm."""
        runner = Runner(
            which=which(self.model),
            max_seqs=max_seqs,
            prefix_cache_n=prefix_cache_n,
            num_threads=self.options.threads,
            max_step_latency=max_step_latency,
        )
        bench = Bench(runner, self.log, self.options.new, self.options.vocabulary)
        bench.chat(story(0), self.options.new)
        return bench

    def rounds(self, count: int, what: str, measure: Callable[[int], None]) -> None:
        """Measure so many times."""
        for number in range(count):
            start = time.perf_counter()
            measure(number)
            print(f"{self.model.name}: {what}, round {number + 1} of {count}, {time.perf_counter() - start:.1f} s", flush=True)

    def roof(self, part: str) -> None:
        """What memory gives at this moment: other guests of the same host take their part of it."""
        if self.options.roofline:
            command = [str(self.options.roofline), str(self.options.threads or 0)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found = json.loads(done.stdout)
            self.log.sample(ENGINE, f"roof_{part}", found["buffer_bytes"], found["best_gb_per_s"])
            if found.get("tile_tflop_per_s"):
                self.log.sample(ENGINE, "tiles", found["threads"], found["tile_tflop_per_s"])

    def load(self) -> None:
        """Time to load and memory, in processes of their own."""
        command = [sys.executable, __file__, "--load-once", "--output", os.devnull, "--model", str(self.model)]

        def measure(number: int) -> None:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            for name, value in json.loads(done.stdout).items():
                self.log.sample(ENGINE, name, number, value)

        self.rounds(self.options.rounds, "load", measure)

    def single(self) -> None:
        """One stream, and a long prompt."""
        bench = self.bench(1)
        sentences = min(self.options.sentences, bench.runner.max_sequence_length() // 32)

        def measure(number: int) -> None:
            self.roof("single")
            bench.decode(number)
            self.roof("single")
            bench.prefill(number, sentences)

        self.rounds(self.options.rounds, "one stream", measure)

    def batches(self) -> None:
        """Many streams."""
        bench = self.bench(max(self.options.batches))

        def measure(_: int) -> None:
            for count in self.options.batches:
                bench.batch(count)

        self.rounds(self.options.batch_rounds, "streams", measure)

    def contexts(self) -> None:
        """Long contexts, of one sequence and of eight."""
        bench = self.bench(8, prefix_cache_n=16)
        longest = bench.runner.max_sequence_length()

        def measure(number: int) -> None:
            self.roof("contexts")
            for length in self.options.contexts:
                if length <= longest:
                    bench.context(length, 1, number)
            for length in self.options.contexts_of_8:
                if length <= longest:
                    bench.context(length, 8, number)

        self.rounds(self.options.rounds, "contexts", measure)

    def mixed(self) -> None:
        """A long prompt beside streams, under each latency."""
        for latency in self.options.latencies:
            bench = self.bench(MIXED_STREAMS + 1, max_step_latency=latency)
            length = min(self.options.mixed_prompt, bench.runner.max_sequence_length() // 2)
            what = f"a prompt beside streams, latency {latency} s"

            def measure(_: int, bench: Bench = bench, length: int = length, latency: float = latency) -> None:
                bench.mixed(latency, length, MIXED_STREAMS)

            self.rounds(self.options.rounds, what, measure)


PARTS: dict[str, Callable[[Plan], None]] = {
    "load": Plan.load,
    "single": Plan.single,
    "batches": Plan.batches,
    "contexts": Plan.contexts,
    "mixed": Plan.mixed,
}


def numbers(text: str) -> list[int]:
    """Numbers between commas."""
    return [int(number) for number in text.split(",")]


def main() -> None:
    """Measure as told by the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", type=Path, default=None, help="a GGUF file or a folder; left out, the default model")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file that the JSON lines are appended to")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}; all unless given")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured; the report takes medians")
    parser.add_argument("--batch-rounds", type=int, default=5, help="the same for many streams")
    parser.add_argument("--batches", type=numbers, default=BATCHES, help="numbers of streams")
    parser.add_argument("--new", type=int, default=128, help="generated tokens a stream")
    parser.add_argument("--threads", type=int, default=None, help="threads of the runner; left out, one a physical core")
    parser.add_argument("--roofline", type=Path, default=None, help="the program that measures the roof, in every round")
    parser.add_argument("--quick", action="store_true", help="a few tokens of everything, to see that it works")
    parser.add_argument("--load-once", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(
        sentences=SENTENCES, contexts=CONTEXTS, contexts_of_8=CONTEXTS_OF_8, latencies=LATENCIES, mixed_prompt=MIXED_PROMPT
    )
    parser.set_defaults(vocabulary=VOCABULARY)
    options = parser.parse_args()
    model = (options.model or default_model()).resolve()
    if options.load_once:
        print(json.dumps(load_once(model)))
        return
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.quick:
        options.rounds, options.batch_rounds, options.new, options.sentences, options.vocabulary = 1, 1, 8, 3, 400
        options.batches, options.contexts, options.contexts_of_8 = [1, 2, 4], [128, 256], [128]
        options.latencies, options.mixed_prompt = [0.05], 64
    with options.output.open("a") as out:
        log = Log(out)
        log.write(record="machine", **machine())
        log.write(record="model", name=model.name, **vars(model_bytes(model)))
        before, start = busy(), time.perf_counter()
        plan = Plan(model, log, options)
        for part in parts:
            PARTS[part](plan)
        used, stolen = (after - earlier for after, earlier in zip(busy(), before, strict=True))
        log.write(
            record="machine_use", seconds=time.perf_counter() - start, busy=used, stolen=stolen, own=own_seconds(), load=load()
        )


def own_seconds() -> float:
    """Processor seconds of this process and of the children it waited for."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    main()
