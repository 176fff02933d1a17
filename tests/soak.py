"""Random operations from many threads over eleven configurations, each answer compared bit by bit with the same request alone.

    python tests/soak.py --minutes 60 --seed 0 --output soak.json

A round gives each configuration a turn: `CLIENTS` threads send, stream, cancel, drop, fork, pause, drain and unload. Then no
block may be left in use, and a plain runner (one request at a time, no prefix cache, one thread) computes every answer again.
A seed repeats the operations of each thread, though not how threads meet. The exit status is 1 if anything differed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import json
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from conftest import text_model, wait_until_idle

from mistral_paged import (
    ChatCompletionRequest,
    CompletionRequest,
    DrainingError,
    InternalError,
    InvalidArgumentError,
    ModelDType,
    PagedCacheType,
    Runner,
    Sequence,
    Which,
)
from mistral_paged.default_model import default_model

CLIENTS = 8
LONGEST_TURN = 300.0
"""Seconds after which a turn counts as hung: the stacks of all threads are printed and the process ends."""
SLACK = 8 << 20
"""Bytes by which anonymous memory may differ between the middle of a run and its end."""

Answer = tuple[tuple[str, bytes], ...]
"""Of each choice why it ended, and its tokens: ids and the bits of their log probabilities."""


@dataclass(frozen=True)
class Configuration:
    name: str
    model: str
    tokens: int
    """Of the pool."""
    cache: PagedCacheType = PagedCacheType.Auto
    options: dict[str, Any] = field(default_factory=dict)
    has_tier: bool = False

    def which(self) -> Which:
        if self.model == "smollm2":
            return Which.GGUF(str(default_model()), dtype=ModelDType.Auto)
        return text_model(self.model)

    def runner(self, tier: Path) -> Runner:
        options = {"num_threads": 2, **self.options}
        if self.has_tier:
            options |= {"kv_tier": tier / self.name, "kv_tier_size": 16}
        return Runner(self.which(), memory_goal=f"{self.tokens}tokens", pa_cache_type=self.cache, **options)

    def plain(self) -> Runner:
        return plain_runner(self.model, self.which, self.cache)


def configurations() -> list[Configuration]:
    cache = PagedCacheType
    return [
        Configuration("as it comes", "llama", 4096),
        Configuration("blocks of 8, a pool that preempts", "llama", 320, options={"pa_blk_size": 8}),
        Configuration("swap tier, a pool that preempts", "llama", 320, options={"pa_blk_size": 8}, has_tier=True),
        Configuration(
            "F8E4M3, optimistic, one thread", "llama", 512, cache.F8E4M3, {"admission": "optimistic", "num_threads": 1}
        ),
        Configuration(
            "Int8, turns of tenants, swap tier", "llama", 448, cache.Int8, {"fairness": "drr", "pa_blk_size": 16}, True
        ),
        Configuration("BF16, reserved, first come", "llama", 512, cache.BF16, {"admission": "reserved", "fairness": "fcfs"}),
        Configuration("windows, the newest loses", "mistral-window", 640, options={"victim": "newest", "pa_blk_size": 8}),
        Configuration("six groups, chunks of 33, swap tier", "gemma3", 640, cache.F16, {"max_num_batched_tokens": 33}, True),
        Configuration(
            "no prefix cache, 4 at once", "qwen2", 640, options={"prefix_cache_n": 0, "max_seqs": 4, "pa_blk_size": 16}
        ),
        Configuration(
            "guessed tokens, a pool that preempts",
            "llama",
            320,
            options={"pa_blk_size": 8, "speculative": "prompt_lookup", "speculative_gamma": 6},
        ),
        Configuration("packed weights of 4 bits", "smollm2", 640, options={"pa_blk_size": 16, "admission": "optimistic"}),
    ]


_plain: dict[tuple[str, str], Runner] = {}


def plain_runner(model: str, which: Callable[[], Which], cache: PagedCacheType) -> Runner:
    key = (model, repr(cache))
    if key not in _plain:
        options: dict[str, Any] = {"prefix_cache_n": 0, "num_threads": 1, "memory_goal": "4096tokens", "pa_cache_type": cache}
        _plain[key] = Runner(which(), **options)
    return _plain[key]


@dataclass(frozen=True)
class Case:
    """What decides an answer."""

    prompt: tuple[int, ...] | str
    options: tuple[tuple[str, Any], ...]

    def request(self, **service: Any) -> Any:
        options: dict[str, Any] = {**dict(self.options), **service}
        if "logit_bias" in options:
            options["logit_bias"] = dict(options["logit_bias"])
        if isinstance(self.prompt, str):
            return ChatCompletionRequest(self.prompt, "default", logprobs=True, **options)
        return CompletionRequest(list(self.prompt), "default", logprobs=0, **options)

    def send(self, runner: Runner, **service: Any) -> Any:
        request = self.request(**service)
        if isinstance(request, ChatCompletionRequest):
            return runner.send_chat_completion_request(request)
        return runner.send_completion_request(request)


def bits(content: list[Any]) -> bytes:
    none = float("nan")
    return b"".join(struct.pack("<Id", each.token_id, none if each.logprob is None else each.logprob) for each in content)


def answer_of(response: Any) -> Answer:
    return tuple((choice.finish_reason, bits(choice.logprobs.content)) for choice in response.choices)


@dataclass
class Got:
    """An answer that must be that of `case`, or its beginning where it was cut short."""

    case: Case
    answer: Answer
    operation: str


class Turn:
    """One configuration under random operations for a while."""

    def __init__(self, configuration: Configuration, runner: Runner, seconds: float, seed: str) -> None:
        self.configuration = configuration
        self.runner = runner
        self.seconds = seconds
        self.seed = seed
        self.got: list[list[Got]] = [[] for _ in range(CLIENTS)]
        self.counts: list[Counter[str]] = [Counter() for _ in range(CLIENTS)]

    def client(self, index: int) -> None:
        end = time.monotonic() + self.seconds
        client = Client(self.configuration, self.runner, random.Random(f"{self.seed}/{index}"))
        self.got[index], self.counts[index] = client.got, client.counts
        while time.monotonic() < end:
            client.operate()


class Client:
    """Sends requests at random, and keeps the answers."""

    def __init__(self, configuration: Configuration, runner: Runner, random_: random.Random) -> None:
        self.runner = runner
        self.random = random_
        self.got: list[Got] = []
        self.counts: Counter[str] = Counter()
        self.block_size = int(configuration.options.get("pa_blk_size", 32))
        self.ranks = configuration.options.get("fairness") != "fcfs"
        self.vocabulary = 49152 if configuration.model == "smollm2" else 512
        # What is alone in the pool has room, of several choices as well.
        self.longest = 96 if configuration.tokens < 1024 else 240
        self.operations: list[tuple[Callable[[], None], int]] = [
            (self.send, 400),
            (self.stream, 200),
            (self.drop, 80),
            (self.cancel, 80),
            (self.fork, 80),
            (self.fork_running, 50),
            (self.deadline, 50),
            (self.too_long, 10),
            (self.pause, 10),
            (self.drain, 5),
            (self.unload, 2),
        ]

    def operate(self) -> None:
        (operation,) = self.random.choices([each for each, _ in self.operations], [weight for _, weight in self.operations])
        try:
            operation()
            self.counts[operation.__name__] += 1
        except DrainingError:
            self.counts["refused in a drain"] += 1
            time.sleep(0.01)
        except (InternalError, InvalidArgumentError) as error:
            text = str(error)
            if not any(word in text for word in ("unloaded", "stopped", "reload_model()")):
                raise
            self.counts["unloaded meanwhile"] += 1

    def near_a_blocks_end(self, low: int, high: int) -> int:
        """Half of the time a multiple of the block size, or one off."""
        if self.random.random() < 0.5:
            blocks = self.random.randint(0, high // self.block_size)
            return min(max(blocks * self.block_size + self.random.randint(-1, 1), low), high)
        return self.random.randint(low, high)

    def prompt(self) -> tuple[int, ...]:
        """One of a few beginnings, cut somewhere, and one of a few ends."""
        length = self.near_a_blocks_end(1, self.longest - 16)
        shared = self.near_a_blocks_end(0, length)
        begin, end = random.Random(self.random.randrange(6)), random.Random(100 + self.random.randrange(40))
        tokens = [begin.randrange(8, self.vocabulary) for _ in range(shared)]
        return tuple(tokens + [end.randrange(8, self.vocabulary) for _ in range(length - shared)])

    def sampling(self) -> dict[str, Any]:
        if self.random.random() < 0.4:
            return {"temperature": 0.0}
        sampling: dict[str, Any] = {"temperature": self.random.choice([0.3, 1.0, 2.0]), "seed": self.random.randrange(50)}
        for name, values in {
            "top_k": [1, 40],
            "top_p": [0.1, 0.9],
            "min_p": [0.05],
            "presence_penalty": [-1.0, 1.5],
            "frequency_penalty": [0.5],
            "repetition_penalty": [1.3],
            "logit_bias": [((9, 5.0), (10, -100.0))],
        }.items():
            if self.random.random() < 0.15:
                sampling[name] = self.random.choice(values)
        return sampling

    def case(self, is_chat: bool = False) -> Case:
        prompt = f"Question {self.random.randrange(40)}?" if is_chat else self.prompt()
        room = self.longest - len(prompt) if not is_chat else 24
        options = {"ignore_eos": self.random.random() < 0.8, **self.sampling()}
        options["max_tokens"] = self.near_a_blocks_end(1, max(room, 1))
        if self.random.random() < 0.2:
            options["n_choices"] = self.random.randint(2, 3)
        elif not is_chat and self.random.random() < 0.1:
            options["echo_prompt"] = True
        return Case(prompt, tuple(sorted(options.items())))

    def service(self) -> dict[str, Any]:
        """What decides when and where a request runs, never what comes of it."""
        service: dict[str, Any] = {}
        if self.ranks and self.random.random() < 0.3:
            service["priority"] = self.random.randint(-2, 2)
        if self.random.random() < 0.3:
            service["tenant"] = self.random.choice("abc")
        if self.random.random() < 0.1:
            service["cache_salt"] = self.random.choice("xy")
        return service

    def keep(self, operation: str, case: Case, answer: Answer) -> None:
        self.got.append(Got(case, answer, operation))

    def send(self) -> None:
        case = self.case(is_chat=self.random.random() < 0.2)
        self.keep("send", case, answer_of(case.send(self.runner, **self.service())))

    def streamed(self, operation: str, chunks: int | None, leave: Callable[[Any], None]) -> None:
        """Reads a stream, all of it or some chunks, and keeps what came."""
        case = self.case(is_chat=True)
        stream = case.send(self.runner, stream=True, **self.service())
        contents: dict[int, list[Any]] = {}
        reasons: dict[int, str] = {}
        for count, chunk in enumerate(stream):
            for choice in chunk.choices:
                contents.setdefault(choice.index, []).extend(choice.logprobs.content if choice.logprobs else [])
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
            if chunks is not None and count + 1 >= chunks:
                break
        leave(stream)
        del stream
        choices = range(dict(case.options).get("n_choices", 1))
        self.keep(operation, case, tuple((reasons.get(each, "left"), bits(contents.get(each, []))) for each in choices))

    def stream(self) -> None:
        self.streamed("stream", None, lambda _: None)

    def drop(self) -> None:
        self.streamed("drop", self.random.randint(1, 12), lambda _: None)

    def cancel(self) -> None:
        if self.random.random() < 0.5:
            self.streamed("cancel", self.random.randint(1, 12), lambda stream: stream.close())
            return
        cases = [self.case() for _ in range(4)]
        seconds = self.random.random() * 0.03

        async def work() -> list[Any]:
            requests = [asyncio.create_task(self.runner.acomplete(case.request())) for case in cases]
            await asyncio.sleep(seconds)
            requests[0].cancel()
            return await asyncio.gather(*requests, return_exceptions=True)

        for case, result in zip(cases, asyncio.run(work()), strict=True):
            if isinstance(result, asyncio.CancelledError):
                continue
            if isinstance(result, BaseException):
                raise result
            self.keep("cancel", case, answer_of(result))

    def go_on(self, operation: str, sequence: Sequence) -> None:
        """Generates from a sequence: as from a prompt of its tokens."""
        sampling = {"max_tokens": self.random.randint(1, 16), "ignore_eos": True, **self.sampling()}
        case = Case(tuple(sequence.tokens), tuple(sorted(sampling.items())))
        if "logit_bias" in sampling:
            sampling["logit_bias"] = dict(sampling["logit_bias"])
        self.keep(operation, case, answer_of(sequence.generate(logprobs=0, **sampling)))

    def fork(self) -> None:
        case = self.case()
        if "echo_prompt" in dict(case.options):
            return
        response = case.send(self.runner, keep=True, **self.service())
        self.keep("fork", case, answer_of(response))
        root = response.choices[0].sequence
        for branch in root.fork(self.random.randint(1, 3)):
            self.go_on("fork", branch)
            if self.random.random() < 0.5:
                self.go_on("fork", branch)
            if self.random.random() < 0.5:
                branch.release()

    def fork_running(self) -> None:
        stream = self.case(is_chat=True).send(self.runner, stream=True)
        for _ in range(self.random.randint(1, 4)):
            next(stream, None)
        try:
            sequence = stream.sequence()
        except InvalidArgumentError as error:
            if "is complete" in str(error) or "does not run" in str(error):
                self.counts["ended before its fork"] += 1
                return
            raise
        with sequence:
            self.go_on("fork_running", sequence)

    def deadline(self) -> None:
        case = self.case()
        response = case.send(self.runner, deadline=10 ** self.random.uniform(-4, -1), **self.service())
        self.keep("deadline", case, answer_of(response))

    def too_long(self) -> None:
        limit = self.runner.max_sequence_length()
        try:
            self.runner.send_completion_request(CompletionRequest([9] * (limit + 1), "default", max_tokens=1))
        except InvalidArgumentError as error:
            if str(limit) not in str(error):
                raise
        else:
            raise AssertionError(f"a prompt of {limit + 1} tokens was taken, where {limit} fit")

    def pause(self) -> None:
        self.runner.pause()
        time.sleep(self.random.random() * 0.02)
        self.runner.resume()

    def drain(self) -> None:
        self.runner.drain(timeout=self.random.choice([0, 0.01, 0.1]))
        self.runner.resume()

    def unload(self) -> None:
        """With the model goes its prefix cache."""
        self.runner.unload_model()
        self.runner.reload_model()


@lru_cache(4096)
def alone(configuration_key: tuple[str, str], case: Case) -> Answer:
    return answer_of(case.send(_plain[configuration_key]))


CUT_BY = ("left", "timeout", "canceled")


def difference(got: Got, expected: Answer, pool_is_small: bool) -> str | None:
    """What is wrong with an answer."""
    if len(got.answer) != len(expected):
        return f"{len(got.answer)} choices, not {len(expected)}"
    for index, ((reason, tokens), (whole_reason, whole)) in enumerate(zip(got.answer, expected, strict=True)):
        # A request that is alone in a pool it has outgrown ends with the text it has.
        is_cut = reason in CUT_BY or (reason == "length" and pool_is_small and len(tokens) < len(whole))
        if tokens != (whole[: len(tokens)] if is_cut else whole):
            equal = next((at for at in range(0, len(whole), 12) if tokens[at : at + 12] != whole[at : at + 12]), len(whole)) // 12
            lengths = f"{len(tokens) // 12} tokens ({reason}) and {len(whole) // 12} alone ({whole_reason})"
            return f"choice {index}: {lengths} differ at {equal}"
        if not is_cut and reason != whole_reason:
            return f"choice {index} ended with {reason}, alone with {whole_reason}"
    return None


def anonymous_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


FIGURES = ("preemptions", "prefix_hit_tokens", "tier_swapped_out_blocks", "tier_swapped_in_blocks")


@dataclass
class Report:
    """What a run came to."""

    rounds: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    figures: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def growth(self) -> int | None:
        """Anonymous bytes at the end beyond those in the middle; nothing before caches and pools are full, in ten rounds."""
        rounds = len(self.memory)
        return self.memory[-1] - self.memory[rounds // 2] if rounds >= 10 else None


@contextlib.contextmanager
def watched(seconds: float) -> Iterator[None]:
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def take_turn(turn: Turn, report: Report, clients: ThreadPoolExecutor) -> None:
    """Runs a turn, waits for its end, and checks what it left and what it answered."""
    configuration, runner = turn.configuration, turn.runner
    for failed in [clients.submit(turn.client, index) for index in range(CLIENTS)]:
        if (error := failed.exception()) is not None:
            report.failures.append(f"{turn.seed}: {type(error).__name__}: {error}")
    if runner.list_unloaded_models():
        runner.reload_model()
    runner.resume()
    gc.collect()
    try:
        stats = wait_until_idle(runner, 30)
        if stats["requests_kept"] or stats["blocks_kept"]:
            report.failures.append(f"{turn.seed}: sequences at rest are left: {stats}")
        for name in FIGURES:
            # Since the model was last loaded.
            report.figures[name] += stats[name]
    except AssertionError as error:
        report.failures.append(f"{turn.seed}: {error}")
    for counts in turn.counts:
        report.operations.update(counts)
    configuration.plain()
    for got in [got for client in turn.got for got in client]:
        expected = alone((configuration.model, repr(configuration.cache)), got.case)
        wrong = difference(got, expected, configuration.tokens < 1024)
        if wrong is not None:
            report.failures.append(f"{turn.seed}, {got.operation}: {wrong}: {got.case}")
        report.answers.update(reason for reason, _ in got.answer)
        report.tokens += sum(len(tokens) // 12 for _, tokens in got.answer)


def soak(minutes: float, seed: int, turn_seconds: float = 3.0, log: Callable[[str], None] = lambda _: None) -> Report:
    """Rounds over all configurations until the time is up, one at least."""
    report = Report()
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as tier, ThreadPoolExecutor(CLIENTS) as clients:
        runners = [(each, each.runner(Path(tier))) for each in configurations()]
        while report.rounds == 0 or (time.monotonic() < end and not report.failures):
            for configuration, runner in runners:
                turn = Turn(configuration, runner, turn_seconds, f"{seed}/{report.rounds}/{configuration.name}")
                with watched(LONGEST_TURN):
                    take_turn(turn, report, clients)
            report.rounds += 1
            report.memory.append(anonymous_bytes())
            log(
                f"round {report.rounds}: {sum(report.operations.values())} operations, {sum(report.answers.values())} answers, "
                f"{report.memory[-1] >> 20} MiB, {len(report.failures)} failures"
            )
        for _, runner in runners:
            runner.close()
    growth = report.growth()
    if growth is not None and growth > SLACK:
        report.failures.append(f"memory grew by {growth} bytes in the second half: {report.memory}")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a JSON file with all figures")
    arguments = parser.parse_args()
    report = soak(arguments.minutes, arguments.seed, log=lambda line: print(line, flush=True))
    figures = json.dumps(vars(report), indent=1)
    if arguments.output:
        arguments.output.write_text(figures + "\n")
    print(figures)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
