"""Perplexity of the default model, or of others, with each type of the KV cache; a Markdown table.

    python benches/cache_quality.py [--golden real/smollm2] [--model MODEL.gguf]

The tokens are those of a golden's `perplexity` (tests/data/golden). A type is compared with `F32`, with the same kernels.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from mistral_paged import CompletionRequest, PagedCacheType, Runner, Which
from mistral_paged.default_model import default_model

GOLDEN = Path(__file__).parent.parent / "tests" / "data" / "golden"
TYPES = {
    "F32": PagedCacheType.F32,
    "F16": PagedCacheType.F16,
    "BF16": PagedCacheType.BF16,
    "Int8": PagedCacheType.Int8,
    "F8E4M3": PagedCacheType.F8E4M3,
}


def mean_nll(model: str, cache_type: PagedCacheType, ids: list[int], cpu_tier: str | None) -> float:
    """Mean negative log probability of the tokens after the first."""
    runner = Runner(which=Which.GGUF(model), pa_gpu_mem=256, pa_cache_type=cache_type, prefix_cache_n=0, cpu_tier=cpu_tier)
    request = CompletionRequest(ids, "default", max_tokens=1, temperature=0, echo_prompt=True, logprobs=0)
    logprobs = runner.send_completion_request(request).choices[0].logprobs
    if logprobs is None:
        raise RuntimeError("the prompt was not scored")
    return -sum(token.logprob or 0.0 for token in logprobs.content[1 : len(ids)]) / (len(ids) - 1)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Perplexity with each type of the KV cache.")
    parser.add_argument("--golden", default="real/smollm2", help="whose tokens are scored")
    parser.add_argument("--model", help="GGUF file, the default model unless given")
    parser.add_argument("--cpu-tier", help="kernels, such as avx2")
    options = parser.parse_args()
    ids = json.loads((GOLDEN / options.golden / "golden.json").read_text())["perplexity"]["ids"]
    model = options.model or str(default_model())
    print("| KV cache | perplexity | change |\n| --- | --- | --- |")
    exact = None
    for name, cache_type in TYPES.items():
        nll = mean_nll(model, cache_type, ids, options.cpu_tier)
        exact = nll if exact is None else exact
        print(f"| {name} | {math.exp(nll):.3f} | {100 * math.expm1(nll - exact):+.2f} % |", flush=True)


if __name__ == "__main__":
    main()
