"""Perplexity of the default model, or of others, with each type of the KV cache; a Markdown table.

    python benches/cache_quality.py [--model MODEL.gguf]

The text is that of the package's recorded conversations, at most 512 tokens of each. A type is compared with `F32`, with the same
kernels; what they round differently tells types apart only beyond the standard error, which is given too.
"""

from __future__ import annotations

import argparse
import math
import statistics

from mistral_paged import PagedCacheType, Runner, Which
from mistral_paged.default_model import default_model
from mistral_paged.memory import conversations
from mistral_paged.tune import nll

TYPES = {
    "F32": PagedCacheType.F32,
    "F16": PagedCacheType.F16,
    "BF16": PagedCacheType.BF16,
    "Int8": PagedCacheType.Int8,
    "F8E4M3": PagedCacheType.F8E4M3,
}


def nll_of_all(model: str, cache_type: PagedCacheType, cpu_tier: str | None) -> list[float]:
    """Negative log probabilities of the tokens after the first of each text."""
    runner = Runner(which=Which.GGUF(model), pa_gpu_mem=256, pa_cache_type=cache_type, prefix_cache_n=0, cpu_tier=cpu_tier)
    found = []
    for one in conversations(99):
        ids = runner.tokenize_text(f"{one.prompt}\n{one.reply}", True)[:512]
        found += nll(runner, ids)
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Perplexity with each type of the KV cache.")
    parser.add_argument("--model", help="GGUF file, the default model unless given")
    parser.add_argument("--cpu-tier", help="kernels, such as avx2")
    options = parser.parse_args()
    model = options.model or str(default_model())
    print("| KV cache | perplexity | change | standard error |\n| --- | --- | --- | --- |")
    exact: list[float] = []
    for name, cache_type in TYPES.items():
        found = nll_of_all(model, cache_type, options.cpu_tier)
        exact = exact or found
        rises = [value - before for value, before in zip(found, exact, strict=True)]
        change, error = math.expm1(statistics.fmean(rises)), statistics.pstdev(rises) / math.sqrt(len(rises))
        print(f"| {name} | {math.exp(statistics.fmean(found)):.3f} | {change:+.2%} | {error:.2%} |", flush=True)


if __name__ == "__main__":
    main()
