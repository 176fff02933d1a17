"""Speculative decoding against none: tokens a second, interleaved in one run.

    python benches/speculation.py [--model FILE.gguf] [--draft-model FILE.gguf] [--device cuda:0] [--rounds N] [--tokens N]
        [--part NAME]

Ten prompts that ask for parts of themselves (copying.json), one stream, greedy; and the packaged conversations at 1, 8 and 32
streams. Each round runs each prompt, or each batch of streams, with and without, in turns the one and the other first; medians of
the rounds' ratios are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mistral_paged import ChatCompletionRequest, ChatCompletionResponse, Runner, Which
from mistral_paged.default_model import default_model
from mistral_paged.memory import conversations

STREAMS = (1, 8, 32)


def chat(runner: Runner, prompt: str, tokens: int) -> ChatCompletionResponse:
    """A greedy answer."""
    messages = [{"role": "user", "content": prompt}]
    response = runner.send_chat_completion_request(
        ChatCompletionRequest(messages=messages, model="default", max_tokens=tokens, temperature=0)
    )
    assert isinstance(response, ChatCompletionResponse)
    return response


def turn(runners: dict[str, Runner], number: int) -> list[tuple[str, Runner]]:
    """The runners in the order of a round."""
    order = list(runners.items())
    return order[::-1] if number % 2 else order


def copying(runners: dict[str, Runner], rounds: int, tokens: int) -> None:
    """Prints a line for each prompt, and one for all."""
    print("| prompt | tokens | tokens/s without | with | ratio | guessed | right |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    prompts = json.loads(Path(__file__).with_name("copying.json").read_text())
    seconds: dict[str, list[float]] = {name: [0.0] * rounds for name in runners}
    for task in prompts:
        rates: dict[str, list[float]] = {name: [] for name in runners}
        answers: dict[str, ChatCompletionResponse] = {}
        for number in range(rounds + 1):
            for name, runner in turn(runners, number):
                answers[name] = chat(runner, task["prompt"], tokens)
                usage = answers[name].usage
                if number > 0:
                    rates[name].append(usage.avg_compl_tok_per_sec)
                    seconds[name][number - 1] += usage.total_completion_time_sec
        usage = answers["with"].usage
        same = answers["with"].choices[0].message.content == answers["without"].choices[0].message.content
        ratio = statistics.median(a / b for a, b in zip(rates["with"], rates["without"], strict=True))
        print(
            f"| {task['name']}{'' if same else ' (another answer)'} | {usage.completion_tokens} "
            f"| {statistics.median(rates['without']):.1f} | {statistics.median(rates['with']):.1f} | {ratio:.2f} "
            f"| {usage.draft_tokens} | {usage.accepted_draft_tokens} |"
        )
    ratio = statistics.median(a / b for a, b in zip(seconds["without"], seconds["with"], strict=True))
    print(f"| all ten | | | | {ratio:.2f} | | |\n")


def talking(runners: dict[str, Runner], rounds: int, tokens: int) -> None:
    """Prints a line for each number of streams."""
    print("| streams | tokens/s without | with | ratio | guessed | right |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    prompts = [each.prompt for each in conversations(99) if len(each.prompt) < 2000]
    for streams in STREAMS:
        rates: dict[str, list[float]] = {name: [] for name in runners}
        drafts = [0, 0]
        for number in range(rounds + 1):
            at = number * streams % (len(prompts) - streams)
            chosen = prompts[at : at + streams] if streams > 1 else prompts[at : at + 4]
            for name, runner in turn(runners, number):
                with ThreadPoolExecutor(streams) as threads:
                    began = time.perf_counter()
                    answers = list(threads.map(lambda prompt, runner=runner: chat(runner, prompt, tokens), chosen))
                    took = time.perf_counter() - began
                if number > 0:
                    rates[name].append(sum(answer.usage.completion_tokens for answer in answers) / took)
                    drafts[0] += sum(answer.usage.draft_tokens for answer in answers)
                    drafts[1] += sum(answer.usage.accepted_draft_tokens for answer in answers)
        ratio = statistics.median(a / b for a, b in zip(rates["with"], rates["without"], strict=True))
        print(
            f"| {streams} | {statistics.median(rates['without']):.1f} | {statistics.median(rates['with']):.1f} "
            f"| {ratio:.3f} | {drafts[0]} | {drafts[1]} |"
        )


def main() -> None:
    """Prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=default_model())
    parser.add_argument("--draft-model", type=Path, help="guesses beside prompt lookup: a smaller model of the same vocabulary")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--part", choices=("copying", "conversations"))
    options = parser.parse_args()
    which = Which.GGUF(str(options.model))
    draft = Which.GGUF(str(options.draft_model)) if options.draft_model else None
    with (
        Runner(which=which, device=options.device, pa_gpu_mem=512, prefix_cache_n=0) as without,
        Runner(
            which=which, device=options.device, pa_gpu_mem=512, prefix_cache_n=0, speculative="auto", which_draft=draft
        ) as other,
    ):
        runners = {"without": without, "with": other}
        print(f"{options.model.name}, {options.tokens} tokens at most, medians of {options.rounds} rounds\n")
        if options.part != "conversations":
            copying(runners, options.rounds, options.tokens)
        if options.part != "copying":
            talking(runners, options.rounds, options.tokens)


if __name__ == "__main__":
    main()
