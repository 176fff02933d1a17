"""Naive against paged: how many requests one KV budget runs at once, and how much of the memory they hold has nothing in it.

The workload is real conversations: the first human turn is the prompt, and as many tokens are generated as the recorded reply
has. Naive reserves the model's whole context for each request; paged gives out blocks as tokens need them. Both run in the same
engine, over the same pool.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from mistral_paged._core import ChatCompletionRequest, Runner, Which

MODES = ("naive", "paged")
DEFAULT_KV_MB = 1024
DEFAULT_BLOCK_SIZE = 16
MIB = 1 << 20
GB = 10**9


@dataclass(frozen=True)
class Conversation:
    """What a person asked and what was replied."""

    prompt: str
    reply: str


def conversations(count: int) -> list[Conversation]:
    """The first `count` conversations; a `ValueError` if there are not so many."""
    packed = (resources.files("mistral_paged") / "data" / "conversations.jsonl.gz").read_bytes()
    lines = gzip.decompress(packed).decode().rstrip("\n").split("\n")
    if not 1 <= count <= len(lines):
        raise ValueError(f"{count} requests were asked for and there are {len(lines)} conversations: ask for 1 to {len(lines)}")
    return [Conversation(**json.loads(line)) for line in lines[:count]]


@dataclass(frozen=True)
class Sample:
    """Means over the steps since the sample before, the last of which is `step`."""

    step: int
    running: int
    held_bytes: float
    live_bytes: float


@dataclass(frozen=True)
class Report:
    """What a run showed. Means are over all steps of the run, each sampled before any of its requests ended."""

    mode: str
    requests: int
    """Requests that were to run at once."""
    batch_size: int
    """Most requests that ran in one step before the first preemption, or before one more was refused."""
    requests_that_fit: int | None
    """In naive mode, contexts that the budget holds."""
    context_len: int
    """Tokens of the model's context."""
    block_size: int
    block_bytes: int
    token_bytes: int
    """Bytes of a token's keys and values in all layers."""
    budget_bytes: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    steps: int
    peak_held_bytes: int
    """Most bytes that requests held in a step."""
    held_bytes: float
    """Mean of the bytes that requests held."""
    live_bytes: float
    """Of those, the mean of the bytes with the keys and values of a token."""
    timeline: list[Sample]

    @property
    def out_of_memory(self) -> bool:
        """Whether not all requests could run at once, because naive had no memory for one more."""
        return self.requests_that_fit is not None and self.batch_size < self.requests

    @property
    def fragmented_bytes(self) -> float:
        """Mean of the bytes that were held for nothing, or for nothing yet."""
        return self.held_bytes - self.live_bytes

    @property
    def fragmented_share_of_held(self) -> float:
        """The same as a fraction of what requests held."""
        return self.fragmented_bytes / self.held_bytes

    @property
    def fragmented_share_of_budget(self) -> float:
        """The same as a fraction of the whole KV budget."""
        return self.fragmented_bytes / self.budget_bytes


def describe_command(command: argparse.ArgumentParser) -> None:
    """What the help of `memory` says besides its flags."""
    command.description = (
        "Runs N real conversations at once over a fixed KV budget. Naive reserves the model's whole context for each and stops "
        "where one more does not fit; paged gives out blocks as tokens need them."
    )
    command.add_argument("mode", choices=MODES)
    command.add_argument("requests", type=int, metavar="N", help="requests to run at once")


def run(
    mode: str, count: int, which: Which, *, kv_mb: int = DEFAULT_KV_MB, block_size: int = DEFAULT_BLOCK_SIZE, **options: Any
) -> Report:
    """Runs `count` conversations at once over a KV budget of `kv_mb` MiB, in blocks of `block_size` tokens.

    Naive does not queue: it ends with the requests that fit at once, of which the report tells. A prompt that leaves no room
    for the reply in the model's context loses its beginning. `options` go to `Runner`. A `ValueError` tells which budget would
    do if a single request does not fit.
    """
    if mode not in MODES:
        raise ValueError(f"the mode is {mode!r}: it must be one of {', '.join(MODES)}")
    workload = conversations(count)
    options = {"max_seqs": count, "prefix_cache_n": 0, "pa_blk_size": block_size, **options}
    pool_options: dict[str, Any] = {"pa_gpu_mem": kv_mb, "no_paged_attn": mode == "naive"}
    runner = Runner(which=which, **pool_options, **options)
    if not has_template(runner):
        # A base model, or one whose files have none: each prompt is its text.
        runner.close()
        with resources.as_file(resources.files("mistral_paged") / "data" / "plain.jinja") as template:
            options["chat_template"] = str(template)
            runner = Runner(which=which, **pool_options, **options)
    pool = Pool(runner, kv_mb * MIB)
    if mode == "paged":
        pool.check_longest(workload)
        fitting = None
    else:
        pool.check_context(which, options)
        fitting = pool.stats["blocks_total"] // pool.blocks(pool.context_len)
        # One more than fit shows that it has to wait.
        workload = workload[: fitting + 1]
    return measure(mode, count, pool, workload, fitting)


def has_template(runner: Runner) -> bool:
    """Whether the model says how a chat becomes a prompt."""
    try:
        runner.tokenize_text([{"role": "user", "content": "Hello"}])
    except ValueError as error:
        if "no chat template" in str(error):
            return False
        raise
    return True


def measure(mode: str, count: int, pool: Pool, workload: Sequence[Conversation], fitting: int | None) -> Report:
    """Submits the workload, watches the pool step by step until it is done, and sums up."""
    # All are there before the first begins.
    pool.runner.pause()
    streams = [pool.submit(conversation) for conversation in workload]
    pool.runner.resume()
    timeline: list[Sample] = []
    stats = pool.runner.kv_cache_stats()
    before = dict.fromkeys(stats, 0)
    while stats["requests_running"] + stats["requests_waiting"] > 0:
        if fitting is not None and stats["requests_running"] == fitting and stats["requests_waiting"] > 0:
            streams.pop().close()
        # The answer comes after the step that is being computed.
        stats = pool.runner.kv_cache_stats()
        steps = stats["steps"] - before["steps"]
        if steps > 0:
            held, live = ((stats[name] - before[name]) / steps * pool.slot_bytes for name in ("slots_held_sum", "slots_live_sum"))
            timeline.append(Sample(stats["steps"], stats["requests_running"], held, live))
            before = stats
    usages = [list(stream)[-1].usage for stream in streams]
    return Report(
        mode=mode,
        requests=count,
        batch_size=stats["peak_running_before_preemption"],
        requests_that_fit=fitting,
        context_len=pool.context_len,
        block_size=stats["block_size"],
        block_bytes=stats["block_bytes"],
        token_bytes=round(pool.slot_bytes * pool.num_groups),
        budget_bytes=pool.budget_bytes,
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        generated_tokens=sum(usage.completion_tokens for usage in usages),
        preemptions=stats["preemptions"],
        steps=stats["steps"],
        peak_held_bytes=stats["peak_blocks_used"] * stats["block_bytes"],
        held_bytes=stats["slots_held_sum"] / stats["steps"] * pool.slot_bytes,
        live_bytes=stats["slots_live_sum"] / stats["steps"] * pool.slot_bytes,
        timeline=timeline,
    )


class Pool:
    """A runner, and the sizes of its KV pool."""

    def __init__(self, runner: Runner, budget_bytes: int) -> None:
        self.runner = runner
        self.budget_bytes = budget_bytes
        self.context_len = runner.context_length()
        self.stats: dict[str, int] = runner.kv_cache_stats()
        # Of one KV group; a token has a slot in each.
        self.slot_bytes = self.stats["block_bytes"] / self.stats["block_size"]
        self.num_groups = self.stats["blocks_total"] // (self.stats["tokens_total"] // self.stats["block_size"])

    def blocks(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.stats["block_size"]) * self.num_groups

    def budget_mb(self, num_tokens: int) -> int:
        """The least budget in MiB that holds so many tokens."""
        return -(-self.blocks(num_tokens) * self.stats["block_bytes"] // MIB)

    def submit(self, conversation: Conversation) -> Any:
        """Sends a request and returns its stream."""
        messages = [{"role": "user", "content": conversation.prompt}]
        length = self.reply_len(conversation)
        return self.runner.send_chat_completion_request(
            ChatCompletionRequest(
                messages, "default", max_tokens=length, temperature=0.0, ignore_eos=True, truncate_sequence=True, stream=True
            )
        )

    def reply_len(self, conversation: Conversation) -> int:
        """Tokens to generate: those of the recorded reply, at most what the context leaves beside one token of the prompt."""
        recorded = len(self.runner.tokenize_text(conversation.reply, add_special_tokens=False))
        return max(1, min(recorded, self.context_len - 1))

    def check_longest(self, workload: Sequence[Conversation]) -> None:
        """Whether the pool can serve each request alone."""
        longest = 0
        for conversation in workload:
            prompt = self.runner.tokenize_text([{"role": "user", "content": conversation.prompt}])
            longest = max(longest, min(len(prompt) + self.reply_len(conversation), self.context_len))
        if longest > self.stats["tokens_total"]:
            raise ValueError(
                f"the longest request has {longest} tokens and the KV budget holds {self.stats['tokens_total']}: "
                f"give it at least {self.budget_mb(longest)} MB"
            )

    def check_context(self, which: Which, options: dict[str, Any]) -> None:
        """Whether the pool holds the model's whole context once. A naive runner shortens the context to what the pool holds."""
        if self.context_len < self.stats["tokens_total"]:
            return
        whole = Runner(which=which, pa_ctxt_len=self.stats["block_size"], **options).context_length()
        if whole > self.context_len:
            raise ValueError(
                f"naive reserves the model's context of {whole} tokens for each request and the KV budget holds "
                f"{self.stats['tokens_total']}: give it at least {self.budget_mb(whole)} MB"
            )


def describe(report: Report) -> str:
    """The report as text."""
    held, budget = report.fragmented_share_of_held, report.fragmented_share_of_budget
    budget_mb = report.budget_bytes // MIB
    fragmented = f"Fragmented Memory: {report.fragmented_bytes / GB:.3f} GB"
    return "\n".join(
        [
            f"KV budget: {budget_mb} MB, blocks of {report.block_size} tokens, {report.token_bytes} bytes a token",
            f"Workload: {report.prompt_tokens} prompt tokens, {report.generated_tokens} generated in {report.steps} steps",
            f"Preemptions: {report.preemptions}",
            f"Batch size reached: {report.batch_size}",
            "-" * 50,
            f"{fragmented} ({held:.2%}) of the KV memory that requests held",
            f"{fragmented} ({budget:.2%}) of the KV budget",
        ]
    )


def describe_shortage(report: Report) -> str:
    """Why naive could not run all requests at once."""
    context = report.context_len * report.token_bytes / MIB
    return (
        f"out of memory: {report.requests} requests reserve {report.requests * context:.1f} MB, {context:.1f} MB each for a "
        f"context of {report.context_len} tokens, and the KV budget is {report.budget_bytes // MIB} MB: {report.batch_size} fit, "
        f"{report.batch_size + 1} do not"
    )


def as_json(report: Report) -> dict[str, Any]:
    """The report for programs."""
    derived = {
        name: getattr(report, name)
        for name in ("out_of_memory", "fragmented_bytes", "fragmented_share_of_held", "fragmented_share_of_budget")
    }
    return {**{name: value for name, value in vars(report).items() if name != "timeline"}, **derived} | {
        "timeline": [vars(sample) for sample in report.timeline]
    }
