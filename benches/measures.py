"""The measurements of throughput.py: one stream, many streams, long contexts, a prompt beside streams."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from threading import Barrier, Event
from typing import Any

from work import Log, lines, load, long_prompt, story

from mistral_paged import ChatCompletionRequest, CompletionRequest, Runner, Usage, Which

ENGINE = "mistral_paged"
VOCABULARY = 20_000
"""Ids of made-up prompts lie below it; every model of the benchmarks has more tokens."""


def which(model: Path) -> Which:
    """A folder of safetensors, or a GGUF file."""
    return Which.Plain(str(model)) if model.is_dir() else Which.GGUF(str(model))


def memory() -> tuple[int, int]:
    """Resident bytes of this process: now, and at most so far. Zeros where the system does not tell."""
    fields = dict(line.split(":", 1) for line in lines("/proc/self/status"))
    resident, peak = (int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return resident, peak


def load_once(model: Path) -> dict[str, float]:
    """Seconds to load, and bytes that memory grows by, over the imported package and the tokenizer; for a fresh process."""
    before, _ = memory()
    start = time.perf_counter()
    runner = Runner(which=which(model), prefix_cache_n=0)
    seconds = time.perf_counter() - start
    resident, peak = memory()
    usage = runner.send_chat_completion_request(
        ChatCompletionRequest(story(0), "default", max_tokens=8, temperature=0.0, ignore_eos=True)
    ).usage
    used, _ = memory()
    ledger = runner.memory_ledger()
    without = before + ledger.tokenizer_bytes
    touched = -(-usage.total_tokens // ledger.block_size) * ledger.bytes_per_block * len(ledger.groups)
    grown = {"load_resident": resident - without, "load_peak": peak - without, "used_resident": used - without}
    return {"load": seconds, **grown, "kv_touched": touched, "tokenizer": ledger.tokenizer_bytes}


class Bench:
    """A loaded model and where its figures go."""

    def __init__(self, runner: Runner, log: Log, new: int, vocabulary: int = VOCABULARY) -> None:
        self.runner = runner
        self.log = log
        self.new = new
        self.vocabulary = vocabulary

    def chat(self, text: str, max_tokens: int) -> Usage:
        """Usage of a greedy answer that goes on to `max_tokens`."""
        request = ChatCompletionRequest(text, "default", max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        usage: Usage = self.runner.send_chat_completion_request(request).usage
        return usage

    def complete(self, prompt: list[int], max_tokens: int, salt: str | None = None) -> Usage:
        """Usage of what a prompt of token ids goes on to."""
        request = CompletionRequest(prompt, "default", max_tokens=max_tokens, temperature=0.0, ignore_eos=True, cache_salt=salt)
        return self.runner.send_completion_request(request).usage

    def prompt(self, number: int, length: int) -> list[int]:
        """Token ids, others for each number from the first on."""
        return [3 + (number * 7919 + position * 31) % (self.vocabulary - 3) for position in range(length)]

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

    def together(self, prompts: list[list[int]], new: int) -> tuple[float, list[Usage]]:
        """Seconds of many completions that begin at the same time, and the usage of each."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            start = time.perf_counter()
            usages = list(threads.map(lambda prompt: self.complete(prompt, new), prompts))
            return time.perf_counter() - start, usages

    def batch(self, count: int) -> None:
        """Streams together. Their prompts have 8 tokens, so that the time is that of decoding."""
        new = self.new // 2
        seconds, _ = self.together([self.prompt(number, 8) for number in range(count)], new)
        self.sample("batch", count, count * new / seconds)

    def context(self, length: int, count: int, number: int) -> None:
        """Streams whose last tokens see `length` tokens each: computed, then found in the prefix cache and gone on from."""
        new = min(self.new // 2, length // 2)
        prompts = [self.prompt(number, length - new) for number in range(count)]
        if count == 1:
            usage = self.complete(prompts[0], 1, salt=f"{length} tokens, round {number}")  # of which nothing is cached
            assert usage.prompt_tokens_details is None or usage.prompt_tokens_details.cached_tokens == 0
            self.sample("prefill_context", length, usage.prompt_tokens / usage.total_prompt_time_sec)
        else:
            self.together(prompts, 1)
        _, usages = self.together(prompts, new)
        self.sample(f"context_of_{count}", length, sum(map(pace, usages)), seen=length - new // 2)

    def mixed(self, latency: float, length: int, others: int) -> None:
        """A prompt of `length` tokens beside `others` that decode: their longest pause, and the chunks it is computed in."""
        began, done = Barrier(others + 1), Event()
        observers = [Observer() for _ in range(others)]

        def watch(observer: Observer, number: int) -> None:
            request = ChatCompletionRequest(story(number), "default", temperature=0.0, ignore_eos=True, stream=True)
            stream = self.runner.send_chat_completion_request(request)
            observer.watch(stream, began.wait, done)
            stream.close()

        with ThreadPoolExecutor(others) as threads:
            watching = [threads.submit(watch, observer, number) for number, observer in enumerate(observers)]
            began.wait()
            time.sleep(0.5)
            start, steps = time.perf_counter(), self.runner.kv_cache_stats()["steps"]
            usage = self.complete(self.prompt(others, length), 1)
            end, steps = time.perf_counter(), self.runner.kv_cache_stats()["steps"] - steps
            time.sleep(0.2)
            done.set()
            for one in watching:
                one.result()
        at = round(latency * 1000)
        alone = [gap for observer in observers for gap in observer.gaps(0.0, start)]
        beside = [gap for observer in observers for gap in observer.gaps(start, end)]
        self.sample("mixed_alone_ms", at, 1000 * statistics.median(alone))
        self.sample("mixed_pause_ms", at, 1000 * max(beside, default=0.0))
        self.sample("mixed_chunk", at, usage.prompt_tokens / max(1, steps))
        self.sample("mixed_prompt_s", at, end - start)


class Observer:
    """When the tokens of a stream came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def watch(self, stream: Iterable[object], began: Callable[[], object], done: Event) -> None:
        """Look on until told that it is enough; tell when the first tokens have come."""
        for _ in stream:
            self.times.append(time.perf_counter())
            if len(self.times) == 4:
                began()
            if done.is_set():
                return

    def gaps(self, start: float, end: float) -> list[float]:
        """Seconds between tokens, of those gaps that overlap a time."""
        pairs = pairwise(self.times)
        return [later - earlier for earlier, later in pairs if later > start and earlier < end]


def pace(usage: Usage) -> float:
    """Tokens a second after the first one."""
    return (usage.completion_tokens - 1) / usage.total_completion_time_sec
