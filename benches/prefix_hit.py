"""Time to the first token of a long prompt, cold and when its beginning is cached, and the ratio of the two."""

from __future__ import annotations

import argparse
import statistics
import time

from mistral_paged import CompletionRequest, Runner, Which
from mistral_paged.default_model import default_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default=None, help="a GGUF file; the default model unless given")
parser.add_argument("--shared", type=int, default=4096, help="tokens that the prompts have in common")
parser.add_argument("--own", type=int, default=16, help="tokens behind those")
parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind")
parser.add_argument("--vocabulary", type=int, default=20_000, help="the prompts' token ids lie below 100 more than this")
options = parser.parse_args()

runner = Runner(which=Which.GGUF(options.model or str(default_model())), pa_gpu_mem=1024)


def prompt(shared: int, own: int) -> list[int]:
    """Token ids that two numbers decide: the beginning and the end."""
    beginning = [(shared * 7919 + position * 31) % options.vocabulary + 100 for position in range(options.shared)]
    return beginning + [(own * 104_729 + position * 37) % options.vocabulary + 100 for position in range(options.own)]


def first_token(ids: list[int], salt: str | None = None) -> tuple[float, int, str]:
    """Seconds to the first token, tokens of the prompt that were not computed, and the answer's text."""
    start = time.perf_counter()
    request = CompletionRequest(ids, "default", max_tokens=1, temperature=0.0, cache_salt=salt)
    response = runner.send_completion_request(request)
    seconds = time.perf_counter() - start
    assert response.usage.prompt_tokens_details is not None
    return seconds, response.usage.prompt_tokens_details.cached_tokens, response.choices[0].text


cold, warm = [], []
for number in range(options.rounds):
    first_token(prompt(number, 0))
    # The same prompt twice, once under a salt that nobody has used: computed, and found.
    cold_seconds, missed, cold_text = first_token(prompt(number, 1), salt=f"cold {number}")
    warm_seconds, cached, warm_text = first_token(prompt(number, 1))
    assert (missed, cold_text) == (0, warm_text), "a warm reply is not the cold one"
    assert cached >= options.shared // 32 * 32, f"only {cached} tokens were cached"
    cold.append(cold_seconds)
    warm.append(warm_seconds)
print(f"first token of {options.shared + options.own} tokens: cold {statistics.median(cold) * 1e3:.1f} ms")
print(f"with {options.shared} of them cached: {statistics.median(warm) * 1e3:.1f} ms")
print(f"{statistics.median(cold) / statistics.median(warm):.1f} times faster")
