"""Many threads, one runner: requests that run together share each step. Prints what the KV pool saw of it."""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor

from mistral_paged import ChatCompletionRequest, Runner, Which
from mistral_paged.default_model import default_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--requests", type=int, default=32)
options = parser.parse_args()

runner = Runner(which=Which.GGUF(str(default_model())), pa_gpu_mem=512)
SYSTEM = "You answer in one short sentence, without explaining yourself, and you never ask anything back."


def ask(number: int) -> tuple[str, int]:
    """Answer and generated tokens of one request; all share the beginning of their prompt, and so its blocks."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"What is {number} plus {number}?"}]
    response = runner.send_chat_completion_request(ChatCompletionRequest(messages, "default", max_tokens=32, temperature=0.0))
    return response.choices[0].message.content or "", response.usage.completion_tokens


start = time.perf_counter()
with ThreadPoolExecutor(options.requests) as threads:
    answers = list(threads.map(ask, range(options.requests)))
seconds = time.perf_counter() - start
for number, (answer, _) in enumerate(answers[:4]):
    print(f"{number}: {answer}")
generated = sum(count for _, count in answers)
print(f"{options.requests} requests, {generated} tokens in {seconds:.2f} s: {generated / seconds:.1f} tokens a second")
stats = runner.kv_cache_stats()
print(
    f"{stats['blocks_total']} blocks of {stats['block_size']} tokens, {stats['blocks_cached']} of them findable by their prefix"
)
print(f"{stats['prefix_hit_tokens']} of {stats['prefix_queried_tokens']} prompt tokens came from the prefix cache")
