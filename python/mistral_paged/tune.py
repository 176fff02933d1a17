"""The `tune` command: which type to quantise a model to, by speed, memory and perplexity that are measured here."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mistral_paged import CompletionRequest, Runner
from mistral_paged.bench import MIB, Test, measure
from mistral_paged.exceptions import InvalidArgumentError
from mistral_paged.flags import Usage
from mistral_paged.loading import load, select
from mistral_paged.memory import conversations

PROFILES = {"quality": 0.5, "balanced": 2.0, "fast": 10.0}
"""Percent that perplexity may rise."""
TEXT_TOKENS = 512
"""Of a conversation at most."""
PROMPT = Test("pp256", 256, 0, 0)
DECODE = Test("tg64 @ d64", 0, 64, 64)
ROUNDS = 3


@dataclass(frozen=True)
class Row:
    """What a type comes to. `isq` is None for the weights as they are stored."""

    isq: str | None
    weights_mb: float
    perplexity: float
    loss: float
    """Percent by which the perplexity is above that of the weights as they are stored."""
    prompt_tokens_per_second: float
    decode_tokens_per_second: float


def texts(runner: Runner, num_tokens: int) -> list[list[int]]:
    """So many tokens of the packaged conversations, each by itself."""
    found: list[list[int]] = []
    left = num_tokens
    # A token of an answer comes behind each.
    longest = min(TEXT_TOKENS, runner.max_sequence_length() - 1)
    for one in conversations(99):
        ids = runner.tokenize_text(f"{one.prompt}\n{one.reply}", True)[: min(longest, left)]
        if len(ids) < 2:
            break
        found.append(ids)
        left -= len(ids)
    return found


def nll(runner: Runner, ids: list[int]) -> list[float]:
    """Negative log probabilities of the tokens after the first of a text."""
    request = CompletionRequest(ids, "default", max_tokens=1, temperature=0, echo_prompt=True, logprobs=0)
    scored = runner.send_completion_request(request).choices[0].logprobs
    assert scored is not None
    return [-(token.logprob or 0.0) for token in scored.content[1 : len(ids)]]


def perplexity(runner: Runner, num_tokens: int) -> float:
    """Of the packaged conversations, the first token of each aside."""
    return math.exp(statistics.fmean([value for ids in texts(runner, num_tokens) for value in nll(runner, ids)]))


def row(options: argparse.Namespace, isq: str | None, stored: float | None) -> Row:
    """Loads the model with a type and measures it; `stored` is the perplexity of the weights as they are stored."""
    options.isq = isq
    with load(options) as runner:
        found = perplexity(runner, options.text_tokens)
        text = runner.tokenize_text("\n".join(each.prompt for each in conversations(8)), add_special_tokens=True)
        speeds = [[measure(runner, test, text) for _ in range(ROUNDS + 1)][1:] for test in (PROMPT, DECODE)]
        prompt, decode = (statistics.median(values) for values in speeds)
        loss = 0.0 if stored is None else 100.0 * (found / stored - 1.0)
        return Row(isq, runner.memory_ledger().weights_bytes / MIB, found, loss, prompt, decode)


def choose(rows: Sequence[Row], max_loss: float) -> Row:
    """The fastest at decoding whose loss is within the bound; the weights as they are stored have none."""
    return max((row for row in rows if row.loss <= max_loss), key=lambda row: row.decode_tokens_per_second)


def words(options: argparse.Namespace, chosen: Row) -> list[str]:
    """The command line that serves the model so."""
    model = [] if options.model_id is None else ["-m", options.model_id]
    file = [] if options.quantized_file is None else ["-f", options.quantized_file]
    return ["mistral-paged", "serve", *model, *file, *([] if chosen.isq is None else ["--isq", chosen.isq])]


def config(options: argparse.Namespace, chosen: Row) -> str:
    """The same as a configuration file."""
    lines = ['command = "serve"', "", "[model]"]
    for key, value in (("model_id", options.model_id), ("quantized_file", options.quantized_file), ("isq", chosen.isq)):
        if value is not None:
            lines.append(f"{key} = {json.dumps(value)}")
    return "\n".join([*lines, ""])


def line(row: Row) -> str:
    """A row of the table."""
    return (
        f"| {row.isq or 'as stored'} | {row.weights_mb:,.0f} | {row.perplexity:.3f} | {row.loss:+.2f} % "
        f"| {row.prompt_tokens_per_second:,.0f} | {row.decode_tokens_per_second:,.1f} |"
    )


def check(options: argparse.Namespace) -> float:
    """The bound on the loss; `Usage` for what cannot be honoured."""
    if options.isq is not None:
        raise Usage("--isq is what tune finds: leave it out, or name types with --types")
    if options.text_tokens < TEXT_TOKENS:
        raise Usage(f"--text-tokens is {options.text_tokens}; it must be {TEXT_TOKENS} or more")
    if not options.types or len(set(options.types)) < len(options.types):
        raise Usage("--types must name types, each once")
    bound = PROFILES[options.profile] if options.max_loss is None else options.max_loss
    if not 0 <= bound < math.inf:
        raise Usage(f"--max-loss is {bound}; it must be 0 or more")
    if options.emit_config is not None and Path(options.emit_config).exists():
        raise Usage(f"--emit-config: {options.emit_config} is there already")
    return float(bound)


def run(options: argparse.Namespace) -> None:
    """Measures each type, prints a row as soon as it is there, and the command to use the one that is chosen."""
    bound = check(options)
    options.prefix_cache_n, options.state_snapshot_mb = 0, None
    for isq in options.types:
        try:
            Runner.memory_plan(select(options), token_source=options.token_source, in_situ_quant=isq)
        except InvalidArgumentError as error:
            if "quantized already" in str(error):
                raise InvalidArgumentError(f"there is nothing to choose: {error}") from error
            raise
    rows: list[Row] = []
    for isq in (None, *options.types):
        rows.append(row(options, isq, rows[0].perplexity if rows else None))
        if options.json:
            continue
        if isq is None:
            print("| weights | MB | perplexity | change | prompt tokens/s | decode tokens/s |")
            print("| --- | ---: | ---: | ---: | ---: | ---: |")
        print(line(rows[-1]), flush=True)
    chosen = choose(rows, bound)
    if options.emit_config is not None:
        Path(options.emit_config).write_text(config(options, chosen))
    command = shlex.join(words(options, chosen))
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "chosen": chosen.isq, "max_loss": bound, "command": command}))
        return
    print(f"\nThe fastest with a perplexity at most {bound:g} % higher: {chosen.isq or 'as stored'}\n\n    {command}")
