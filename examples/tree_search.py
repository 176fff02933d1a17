"""A small tree search: of several continuations the likeliest go on, over blocks that they share.

Each round forks every sequence that is left, lets each fork go on with a seed of its own, and keeps those with the best mean log
probability. Prints the best text, and the KV memory that sharing saved when most sequences were held at once.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor

from mistral_paged import ChatCompletionRequest, Runner, Sequence, Which
from mistral_paged.default_model import default_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rounds", type=int, default=4)
parser.add_argument("--width", type=int, default=4, help="forks of a sequence")
parser.add_argument("--beams", type=int, default=2, help="sequences that go on")
parser.add_argument("--tokens", type=int, default=12, help="tokens a round")
options = parser.parse_args()

runner = Runner(which=Which.GGUF(str(default_model())), pa_gpu_mem=512, pa_blk_size=16)
messages = [
    {"role": "system", "content": "You write one clear sentence at a time. " * 24},
    {"role": "user", "content": "Tell me how a library keeps track of the books that it lends."},
]
request = ChatCompletionRequest(messages, "default", max_tokens=1, temperature=0.0, keep=True)
root = runner.send_chat_completion_request(request).choices[0].sequence
assert root is not None  # because of keep=True

print(f"prompt of {root.num_prompt_tokens} tokens")
saved, held = 0, 0
beams: list[tuple[float, Sequence]] = [(0.0, root)]
with ThreadPoolExecutor(options.beams * options.width) as threads:
    for round_number in range(options.rounds):
        branches = [(score, branch) for score, beam in beams for branch in beam.fork(options.width)]

        def go_on(
            index: int, start: int = round_number * len(branches), branches: list[tuple[float, Sequence]] = branches
        ) -> float:
            """Sum of the log probabilities of a branch that went on."""
            score, branch = branches[index]
            answer = branch.generate(max_tokens=options.tokens, temperature=1.0, seed=start + index, logprobs=0, ignore_eos=True)
            assert answer.choices[0].logprobs is not None
            return score + sum(token.logprob or 0.0 for token in answer.choices[0].logprobs.content)

        scores = list(threads.map(go_on, range(len(branches))))
        stats = runner.kv_cache_stats()
        if stats["blocks_saved"] > saved:
            saved, held = stats["blocks_saved"], stats["blocks_used"]
        ranked = sorted(zip(scores, (branch for _, branch in branches), strict=True), key=lambda pair: pair[0], reverse=True)
        for _, loser in ranked[options.beams :]:
            loser.release()
        beams = ranked[: options.beams]

score, best = beams[0]
print(best.text)
print(f"mean log probability {score / (options.rounds * options.tokens):.3f}")
print(f"blocks held at most: {held} of {stats['block_size']} tokens; without sharing: {held + saved}")
print(f"saved by sharing: {saved * stats['block_bytes'] / 2**20:.1f} MB ({saved / (held + saved):.0%})")
