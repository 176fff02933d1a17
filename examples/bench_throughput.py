"""Tokens a second: one stream, a long prompt, eight streams together. The prefix cache is off, so that nothing comes for free."""

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from mistral_paged import ChatCompletionRequest, Runner, Usage, Which
from mistral_paged.default_model import default_model

STREAMS = 8

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-m", "--model", default=None, help="a GGUF file; left out, the default model")
parser.add_argument("--new", type=int, default=128, help="generated tokens a stream")
parser.add_argument("--sentences", type=int, default=100, help="length of the long prompt")
parser.add_argument("--repeat", type=int, default=3, help="the median of so many runs is printed")
options = parser.parse_args()

start = time.perf_counter()
runner = Runner(which=Which.GGUF(options.model or str(default_model())), prefix_cache_n=0)
print(f"load: {time.perf_counter() - start:.2f} s")


def chat(text: str, max_tokens: int) -> Usage:
    """Usage of a greedy answer that goes on to `max_tokens`."""
    request = ChatCompletionRequest(text, "default", max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    usage: Usage = runner.send_chat_completion_request(request).usage
    return usage


def story(number: int) -> Usage:
    """Usage of a story, another one for each number."""
    return chat(f"Tell me a story, number {number}, about a crab who wrote a type system.", options.new)


def together(streams: int) -> float:
    """Generated tokens a second of so many streams at once, from the first request to the last answer."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(streams) as threads:
        generated = sum(usage.completion_tokens for usage in threads.map(story, range(streams)))
    return generated / (time.perf_counter() - begin)


story(0)
decode = statistics.median((options.new - 1) / story(number).total_completion_time_sec for number in range(options.repeat))
print(f"decode, one stream: {decode:.1f} tokens a second after the first")

sentences = " ".join(f"The quick brown fox number {number} jumps over the lazy dog." for number in range(options.sentences))
prefill = statistics.median(chat(f"{number} {sentences}", 1).avg_prompt_tok_per_sec for number in range(options.repeat))
print(f"prefill: {prefill:.1f} tokens a second")

rounds = [(together(1), together(STREAMS)) for _ in range(options.repeat)]
one, batch = (statistics.median(figures) for figures in zip(*rounds, strict=True))
print(f"with their prompts, one stream: {one:.1f} tokens a second")
print(f"with their prompts, {STREAMS} streams together: {batch:.1f} tokens a second, {batch / one:.2f} times one")
