"""What mistral_paged does with a model: load time, memory, decode, prefill, many streams, long contexts. Writes JSON lines.

Each round takes every measurement once, so that a slow spell of the machine falls on all of them. The prefix cache is off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from model_bytes import model_bytes
from work import SENTENCES, Log, busy, lines, load, long_prompt, machine, story

from mistral_paged import ChatCompletionRequest, CompletionRequest, Runner, Usage, Which
from mistral_paged.default_model import default_model

ENGINE = "mistral_paged"
STREAMS = [1, 2, 4, 8, 16, 32, 64]
CONTEXTS = [128, 256, 512, 1024, 2048, 4096, 8192]


def which(model: Path) -> Which:
    """A folder of safetensors, or a GGUF file."""
    return Which.Plain(str(model)) if model.is_dir() else Which.GGUF(str(model))


def memory() -> tuple[int, int]:
    """Resident bytes of this process: now, and at most so far. Zeros where the system does not tell."""
    fields = dict(line.split(":", 1) for line in lines("/proc/self/status"))
    resident, peak = (int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return resident, peak


def load_once(model: Path) -> None:
    """In a process of its own: the time to load, and what memory grows by."""
    before, _ = memory()
    start = time.perf_counter()
    runner = Runner(which=which(model), prefix_cache_n=0)
    seconds = time.perf_counter() - start
    resident, peak = memory()
    runner.send_chat_completion_request(
        ChatCompletionRequest(story(0), "default", max_tokens=8, temperature=0.0, ignore_eos=True)
    )
    used, _ = memory()
    found = {"load": seconds, "load_resident": resident - before, "load_peak": peak - before, "used_resident": used - before}
    print(json.dumps(found))


class Bench:
    """A loaded model and where its figures go."""

    def __init__(self, model: Path, log: Log, new: int, num_threads: int | None) -> None:
        self.runner = Runner(which=which(model), max_seqs=max(STREAMS), prefix_cache_n=0, num_threads=num_threads)
        self.log = log
        self.new = new

    def chat(self, text: str, max_tokens: int) -> Usage:
        """Usage of a greedy answer that goes on to `max_tokens`."""
        request = ChatCompletionRequest(text, "default", max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        usage: Usage = self.runner.send_chat_completion_request(request).usage
        return usage

    def sample(self, measure: str, at: int, value: float, **more: Any) -> None:
        """Write one measurement down."""
        self.log.sample(ENGINE, measure, at, value, load=load(), **more)

    def decode(self, number: int) -> None:
        """One stream: the pace between its tokens, and over all of the time with its short prompt."""
        start = time.perf_counter()
        usage = self.chat(story(number), self.new)
        seconds = time.perf_counter() - start
        self.sample("decode", 1, pace(usage), context=usage.prompt_tokens + usage.completion_tokens // 2)
        self.sample("answer", 1, usage.completion_tokens / seconds)

    def prefill(self, number: int, sentences: int) -> None:
        """A long prompt and one token."""
        start = time.perf_counter()
        usage = self.chat(long_prompt(number, sentences), 1)
        self.sample("prefill", usage.prompt_tokens, usage.prompt_tokens / (time.perf_counter() - start))

    def streams(self, count: int) -> None:
        """Streams together, their short prompts included."""
        with ThreadPoolExecutor(count) as threads:
            start = time.perf_counter()
            generated = sum(
                usage.completion_tokens for usage in threads.map(lambda n: self.chat(story(n), self.new), range(count))
            )
            self.sample("streams", count, generated / (time.perf_counter() - start))

    def context(self, length: int, ids: list[int]) -> None:
        """One stream whose last token sees `length` tokens."""
        new = min(self.new, 64, length // 2)
        prompt = (ids * (length // len(ids) + 1))[: length - new]
        request = CompletionRequest(prompt, "default", max_tokens=new, temperature=0.0, ignore_eos=True)
        usage = self.runner.send_completion_request(request).usage
        self.sample("context", length, pace(usage))
        self.sample("prefill_context", length, usage.prompt_tokens / usage.total_prompt_time_sec)


def pace(usage: Usage) -> float:
    """Tokens a second after the first one."""
    return (usage.completion_tokens - 1) / usage.total_completion_time_sec


def main() -> None:
    """Measure as told by the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", type=Path, default=None, help="a GGUF file or a folder; left out, the default model")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file that the JSON lines are appended to")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured; the report takes medians")
    parser.add_argument("--new", type=int, default=128, help="generated tokens a stream")
    parser.add_argument("--threads", type=int, default=None, help="threads of the runner; left out, one a physical core")
    parser.add_argument("--quick", action="store_true", help="a few tokens of everything, to see that it works")
    parser.add_argument("--load-once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    model = (options.model or default_model()).resolve()
    if options.load_once:
        load_once(model)
        return
    if options.quick:
        options.rounds, options.new = 1, 8
    with options.output.open("a") as out:
        log = Log(out)
        log.write(record="machine", **machine())
        log.write(record="model", name=model.name, **vars(model_bytes(model)))
        before, start = busy(), time.perf_counter()
        command = [sys.executable, __file__, "--load-once", "--output", str(options.output), "--model", str(model)]
        for number in range(options.rounds):
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            for measure, value in json.loads(done.stdout).items():
                log.sample(ENGINE, measure, number, value)
        bench = Bench(model, log, options.new, options.threads)
        longest = bench.runner.max_sequence_length()
        ids = bench.runner.tokenize_text(long_prompt(0))
        prompt_sentences = min(SENTENCES, longest // 32) if not options.quick else 3
        contexts = [length for length in CONTEXTS if length <= longest][: 2 if options.quick else None]
        streams = STREAMS[:3] if options.quick else STREAMS
        bench.chat(story(0), options.new)
        for number in range(options.rounds):
            bench.decode(number)
            bench.prefill(number, prompt_sentences)
            for count in streams:
                bench.streams(count)
            for length in contexts:
                bench.context(length, ids)
        used, stolen = (after - earlier for after, earlier in zip(busy(), before, strict=True))
        log.write(
            record="machine_use", seconds=time.perf_counter() - start, busy=used, stolen=stolen, own=own_seconds(), load=load()
        )


def own_seconds() -> float:
    """Processor seconds of this process and of the children it waited for."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    main()
