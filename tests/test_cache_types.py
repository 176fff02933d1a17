"""Types of the KV cache: what they cost in quality and save in memory, and that results do not depend on company."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import complete, generate, golden, in_threads, score, text_model, tokens, wait_until_idle

from mistral_paged import DeviceError, ModelDType, PagedCacheType, Runner, Which
from mistral_paged.memory import conversations

TYPES = {
    "F32": PagedCacheType.F32,
    "F16": PagedCacheType.F16,
    "BF16": PagedCacheType.BF16,
    "Int8": PagedCacheType.Int8,
    "F8E4M3": PagedCacheType.F8E4M3,
}
# Bytes of a head of 64 elements.
BYTES = {"F32": 256, "F16": 128, "BF16": 128, "Int8": 66, "F8E4M3": 66}


def perplexity(path: Path, texts: list[str] | list[list[int]], cache_type: PagedCacheType, dtype: ModelDType) -> float:
    """With the kernels of AVX-512, as in docs/kv-cache.md; at most 512 tokens of each text."""
    options: dict[str, Any] = {"pa_gpu_mem": 256, "prefix_cache_n": 0, "cpu_tier": "avx512", "pa_cache_type": cache_type}
    try:
        runner = Runner(which=Which.GGUF(str(path), dtype=dtype), **options)
    except DeviceError as error:
        pytest.skip(str(error))
    prompts = [text if isinstance(text, list) else runner.tokenize_text(text, True)[:512] for text in texts]
    scored = [token.logprob for prompt in prompts for token in score(runner, prompt)[1:]]
    return math.exp(-sum(scored) / len(scored))


@cache
def perplexity_of_conversations(path: Path, cache_type: PagedCacheType) -> float:
    texts = [f"{one.prompt}\n{one.reply}" for one in conversations(48)]
    return perplexity(path, texts, cache_type, ModelDType.Auto)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_perplexity_of_16_bit_floats(name: str, request: pytest.FixtureRequest) -> None:
    """In float arithmetic, where nothing but the cache rounds."""
    path, ids = request.getfixturevalue(f"{name}_path"), golden(f"real/{name}")["perplexity"]["ids"]
    exact = perplexity(path, [ids], PagedCacheType.F32, ModelDType.F32)
    assert perplexity(path, [ids], PagedCacheType.F16, ModelDType.F32) == pytest.approx(exact, rel=0.0005)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "cache_type", "limit"),
    [
        ("smollm2", PagedCacheType.Int8, 0.003),
        pytest.param("gemma3", PagedCacheType.Int8, 0.003, marks=pytest.mark.long),
        ("smollm2", PagedCacheType.F8E4M3, 0.02),
        pytest.param("gemma3", PagedCacheType.F8E4M3, 0.02, marks=pytest.mark.long),
    ],
)
def test_perplexity_of_one_byte_types(
    name: str, cache_type: PagedCacheType, limit: float, request: pytest.FixtureRequest
) -> None:
    """Over 20,000 tokens: over the 768 of the goldens, other roundings of the kernels change as much."""
    path = request.getfixturevalue(f"{name}_path")
    exact = perplexity_of_conversations(path, PagedCacheType.F32)
    assert perplexity_of_conversations(path, cache_type) == pytest.approx(exact, rel=limit)


@pytest.mark.parametrize("name", TYPES)
def test_a_pool_holds_as_many_tokens_as_the_type_allows(name: str, smollm2_path: Path) -> None:
    runner = Runner(which=Which.GGUF(str(smollm2_path)), pa_gpu_mem=64, pa_cache_type=TYPES[name])
    # 30 layers with keys and values of 3 heads each, in blocks of 32 tokens.
    assert runner.kv_cache_stats()["blocks_total"] == 64 * 2**20 // (30 * 2 * 3 * 32 * BYTES[name])


def results(runner: Runner, prompts: list[list[int]]) -> list[list[tuple[int, float]]]:
    return in_threads(lambda index: generate(runner, prompts[index], 12), len(prompts))


@pytest.mark.parametrize("name", TYPES)
def test_exact_with_every_type(name: str) -> None:
    """Alone, together, chunked, from the prefix cache: the same tokens and log probabilities."""

    def runner(**options: Any) -> Runner:
        return Runner(which=text_model("gemma3"), pa_cache_type=TYPES[name], pa_ctxt_len=8192, num_threads=2, **options)

    prompts = [[10 + (7 * i + 31 * j) % 400 for j in range(5 + 20 * i)] for i in range(6)]
    alone = runner(prefix_cache_n=0)
    expected = [generate(alone, prompt, 12) for prompt in prompts]
    assert results(alone, prompts) == expected
    assert results(runner(max_num_batched_tokens=33), prompts) == expected
    cached = runner(pa_blk_size=8)
    assert [results(cached, prompts) for _ in range(2)] == [expected, expected]
    assert wait_until_idle(cached)["prefix_hit_tokens"] > 0


def bits(runner: Runner, prompt: list[int]) -> list[Any]:
    """Tokens and the log probabilities of the twenty likeliest of each."""
    response = complete(runner, prompt, max_tokens=8, logprobs=20)
    return [(t.token_id, t.logprob, [(top.token_id, top.logprob) for top in t.top_logprobs]) for t in tokens(response)]


LONG = pytest.mark.long
REAL = [pytest.param("smollm2", name, marks=[] if name == "Int8" else LONG) for name in ["F16", "BF16", "Int8"]]


@pytest.mark.parametrize(("model", "name"), [*REAL, ("llama", "F16"), ("llama", "BF16"), ("llama", "Int8")])
def test_deterministic(model: str, name: str, smollm2_path: Path) -> None:
    """Quantized and bfloat16 weights: the same bits cold, warm, together, chunked, preempted, on more threads."""
    which = Which.GGUF(str(smollm2_path)) if model == "smollm2" else text_model(model, ModelDType.Auto)

    def runner(**options: Any) -> Runner:
        sized = {} if "memory_goal" in options else {"pa_gpu_mem": 128}
        options = {"num_threads": 1, **sized, **options}
        return Runner(which=which, pa_cache_type=TYPES[name], deterministic=True, **options)

    ids = [token % 500 for token in golden("real/smollm2")["perplexity"]["ids"]]
    prompts = [ids[start : start + 20 + start] for start in range(0, 60, 10)]
    alone = runner(prefix_cache_n=0)
    expected = [bits(alone, prompt) for prompt in prompts]

    def together(other: Runner) -> list[list[Any]]:
        return in_threads(lambda index: bits(other, prompts[index]), len(prompts))

    cached = runner(num_threads=2, pa_blk_size=8)
    assert [together(cached) for _ in range(2)] == [expected, expected]
    assert wait_until_idle(cached)["prefix_hit_tokens"] > 0
    assert together(runner(max_num_batched_tokens=33, num_threads=3)) == expected
    tiny = runner(memory_goal="128tokens", pa_blk_size=8, num_threads=2)
    # Whether requests meet depends on when their threads start.
    for _ in range(20):
        assert together(tiny) == expected
        if wait_until_idle(tiny)["preemptions"] > 0:
            return
    pytest.fail("no request was ever preempted")


@pytest.mark.parametrize("name", [pytest.param("F16", marks=LONG), "BF16", pytest.param("Int8", marks=LONG)])
def test_deterministic_choices(name: str, smollm2_path: Path) -> None:
    """Choices that copy blocks of one prompt on write: the same bits as one after another, and as their scores."""
    # Its last block is not full: every choice but one has to copy it.
    prompt = [(index * 31) % 20_000 + 100 for index in range(75)]
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": 11, "logprobs": 0}

    def runner(**limits: Any) -> Runner:
        which = Which.GGUF(str(smollm2_path))
        return Runner(which=which, pa_gpu_mem=64, pa_cache_type=TYPES[name], deterministic=True, **limits)

    def choices(other: Runner, count: int) -> list[list[tuple[int, float]]]:
        response = complete(other, prompt, n_choices=count, **options)
        return [[(token.token_id, token.logprob) for token in tokens(response, choice)] for choice in range(count)]

    forked = choices(runner(num_threads=2), 4)
    assert len({tuple(choice) for choice in forked}) == 4
    alone = runner(max_seqs=1, prefix_cache_n=0, num_threads=1)
    assert choices(alone, 4) == forked
    assert choices(alone, 1) == forked[:1]
    for choice in forked:
        ids = prompt + [token for token, _ in choice]
        scored = score(alone, ids)[len(prompt) :]
        assert [(token.token_id, token.logprob) for token in scored] == choice


def test_deterministic_requests_without_a_seed_are_alike() -> None:
    """Sampled answers do not depend on how many requests came before."""
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12, "logprobs": 0}
    prompt = [11, 12, 13]

    def sampled(runner: Runner) -> list[int]:
        return [token.token_id for token in tokens(complete(runner, prompt, **options))]

    first = Runner(which=text_model("llama"), pa_ctxt_len=256, deterministic=True)
    answers = [sampled(first) for _ in range(3)]
    assert answers == [answers[0]] * 3
    other = Runner(which=text_model("llama"), pa_ctxt_len=256, deterministic=True, seed=7)
    assert sampled(other) != answers[0]
