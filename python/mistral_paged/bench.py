"""The `bench` command: tokens a second of prompts and of decoding, one request at a time, in the table of llama-bench."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mistral_paged import CompletionRequest, Runner, _core
from mistral_paged.exceptions import MistralPagedError
from mistral_paged.flags import Usage
from mistral_paged.memory import conversations
from mistral_paged.serve import short_id

MIB = 1 << 20


@dataclass(frozen=True)
class Test:
    """What is measured: a prompt of `prompt_len` tokens, or `gen_len` tokens generated behind a context of `depth` tokens."""

    name: str
    prompt_len: int
    gen_len: int
    depth: int


@dataclass(frozen=True)
class Row:
    """A test and the tokens a second of each of its iterations."""

    test: Test
    tokens_per_second: list[float]

    @property
    def mean(self) -> float:
        """Tokens a second."""
        return statistics.fmean(self.tokens_per_second)

    @property
    def deviation(self) -> float:
        """The sample's standard deviation; 0 of one iteration."""
        return statistics.stdev(self.tokens_per_second) if len(self.tokens_per_second) > 1 else 0.0


def tests(options: argparse.Namespace) -> list[Test]:
    """What the flags ask for; `Usage` where that is nothing, or cannot be."""
    least = {"--prompt-len": options.prompt_len, "--gen-len": [options.gen_len], "--warmup": [options.warmup]}
    for name, values in least.items():
        if min(values) < 0:
            raise Usage(f"{name} is {min(values)}; it must be 0 or more")
    if min(options.depth) < 1 or options.iterations < 1:
        raise Usage(f"--depth is {min(options.depth)} and --iterations {options.iterations}; they must be 1 or more")
    found = [Test(f"pp{length}", length, 0, 0) for length in options.prompt_len if length > 0]
    found += [
        Test(f"tg{options.gen_len} @ d{depth}", 0, options.gen_len, depth) for depth in options.depth if options.gen_len > 0
    ]
    if not found:
        raise Usage("there is nothing to measure; give --prompt-len or --gen-len")
    return found


def measure(runner: Runner, test: Test, text: list[int], adapter: str | None = None) -> float:
    """Tokens a second of one request. The time is the engine's, from the submission to the first token or from there to the end.

    The first token of an answer comes with the prompt, so one more is generated than is counted. `MistralPagedError` where the
    model's context or the KV pool is too short.
    """
    length = test.prompt_len or test.depth
    ids = (text * (length // len(text) + 1))[:length]
    request = CompletionRequest(ids, "default", max_tokens=test.gen_len + 1, temperature=0.0, ignore_eos=True, adapter=adapter)
    usage = runner.send_completion_request(request).usage
    if usage.completion_tokens != test.gen_len + 1:
        raise MistralPagedError(
            f"{test.name} ended after {usage.completion_tokens} of {test.gen_len + 1} tokens: the model's context, or the pool, "
            f"is shorter than {length + test.gen_len + 1} tokens"
        )
    return test.gen_len / usage.total_completion_time_sec if test.gen_len else length / usage.total_prompt_time_sec


def rows(runner: Runner, options: argparse.Namespace) -> Iterator[Row]:
    """Measures each test, after requests that are not counted."""
    text = runner.tokenize_text("\n".join(each.prompt for each in conversations(8)), add_special_tokens=True)
    for test in tests(options):
        found = [measure(runner, test, text, options.adapter) for _ in range(options.warmup + options.iterations)]
        yield Row(test, found[options.warmup :])


def facts(runner: Runner, options: argparse.Namespace) -> dict[str, Any]:
    """What the rows have in common."""
    survey = _core.survey()
    usable = [gpu["name"] for gpu in survey["gpus"] if not gpu["problem"]]
    on_gpu = options.device.startswith("cuda") or (options.device == "auto" and usable)
    return {
        "model": short_id(runner.list_models()[0]),
        "weights_bytes": runner.memory_ledger().weights_bytes,
        "backend": "CUDA" if on_gpu else "CPU",
        "threads": options.num_threads or survey["cores"],
    }


def run(runner: Runner, options: argparse.Namespace) -> None:
    """Measures and prints, a row as soon as it is there."""
    about = facts(runner, options)
    if options.json:
        found = [asdict(row) | {"mean": row.mean, "deviation": row.deviation} for row in rows(runner, options)]
        print(json.dumps(about | {"rows": found}))
        return
    print("| model | size | backend | threads | test | t/s |")
    print("| --- | ---: | --- | ---: | ---: | ---: |")
    start = f"| {about['model']} | {about['weights_bytes'] / MIB:.2f} MiB | {about['backend']} | {about['threads']} |"
    for row in rows(runner, options):
        print(f"{start} {row.test.name} | {row.mean:.2f} ± {row.deviation:.2f} |", flush=True)
