"""The same tokens come out however a request is batched, chunked, cached or preempted."""

from __future__ import annotations

import random
from typing import Any

import pytest
from conftest import begun_together, complete, generate, golden, in_threads, score, text_model, tokens, wait_until_idle

from mistral_paged import CompletionRequest, Runner, Which

NEW = 24
MODELS = ["llama", "mistral-window", "gemma3"]
# What these keep of the past is not, or not only, keys and values by head: tried in fewer ways.
OTHERS = ["deepseek-v3-yarn", "gpt-oss-mxfp4", "llama4-text"]
RECURRENT = ["granitemoehybrid", "lfm2", "qwen3-next"]


def prompts(count: int, longest: int = 90) -> list[list[int]]:
    """Prompts of every length from 1 on; every other one shares a beginning with its neighbour."""
    generator = random.Random(7)
    shared = [generator.randrange(8, 512) for _ in range(longest)]
    made = []
    for index in range(count):
        length = 1 + (longest - 1) * index // max(count - 1, 1)
        fresh = [generator.randrange(8, 512) for _ in range(length)]
        made.append(shared[: length // 2] + fresh[length // 2 :] if index % 2 else fresh)
    return made


def runner(name: str, **options: Any) -> Runner:
    if "memory_goal" not in options:
        options["pa_ctxt_len"] = 8192
    return Runner(which=text_model(name), num_threads=2, **options)


_reference: dict[str, list[list[tuple[int, float]]]] = {}


def reference(name: str) -> list[list[tuple[int, float]]]:
    """Each prompt alone, without prefix cache: tokens and their log probabilities."""
    if name not in _reference:
        alone = runner(name, prefix_cache_n=0)
        _reference[name] = [generate(alone, prompt, NEW) for prompt in prompts(32)]
    return _reference[name]


@pytest.mark.parametrize("name", MODELS + OTHERS + RECURRENT)
def test_batch_of_32(name: str) -> None:
    batch = runner(name, prefix_cache_n=0, max_step_latency=3600)
    assert begun_together(batch, lambda index: generate(batch, prompts(32)[index], NEW), 32) == reference(name)
    assert wait_until_idle(batch)["peak_running"] == 32


@pytest.mark.parametrize("name", MODELS)
def test_prefix_cache(name: str) -> None:
    cached = runner(name, pa_blk_size=8)
    for _ in range(2):
        assert [generate(cached, prompt, NEW) for prompt in prompts(32)] == reference(name)
    stats = wait_until_idle(cached)
    assert stats["prefix_hit_tokens"] > 0
    assert stats["blocks_cached"] > 0
    usage = complete(cached, prompts(32)[-1], max_tokens=1).usage
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens >= 8


@pytest.mark.parametrize("name", OTHERS)
def test_prefix_cache_of_other_layers(name: str) -> None:
    cached = runner(name, pa_blk_size=8)
    some = range(0, 32, 4)
    for _ in range(2):
        assert [generate(cached, prompts(32)[index], NEW) for index in some] == [reference(name)[index] for index in some]
    assert wait_until_idle(cached)["prefix_hit_tokens"] > 0


@pytest.mark.parametrize("name", RECURRENT)
def test_prefix_cache_of_states(name: str) -> None:
    cached = runner(name, pa_blk_size=8)
    for _ in range(2):
        assert [generate(cached, prompt, NEW) for prompt in prompts(32)] == reference(name)
    assert wait_until_idle(cached)["state_snapshots_used"] > 0

    def found(prompt: list[int]) -> tuple[int, str | None]:
        details = complete(cached, prompt, max_tokens=1).usage.prompt_tokens_details
        return details.cached_tokens, details.miss_reason

    prompt = prompts(32)[-1]
    assert found(prompt)[0] == (len(prompt) - 1) // 8 * 8
    # Where two prompts part is known from the first that misses; there the third begins.
    system = [300 + token % 200 for token in range(80)]
    assert [found([*system, *[9 + way] * 20]) for way in range(3)][:2] == [(0, "cold"), (0, "no_snapshot")]
    assert found([*system, *[50] * 20])[0] == 80
    answer = generate(cached, system, NEW)
    turn = [*system, *(token for token, _ in answer), 7, 7, 7]
    assert found(turn)[0] == len(system) + NEW - 1


@pytest.mark.parametrize("name", RECURRENT)
def test_states_are_shared_by_choices(name: str) -> None:
    cached = runner(name, pa_blk_size=8, state_snapshot_mb=0)
    prompt = prompts(32)[-1]
    for _ in range(2):
        details = complete(cached, prompt, max_tokens=1).usage.prompt_tokens_details
        assert (details.cached_tokens, details.miss_reason) == (0, "disabled")
    apart = [generate(cached, prompt, NEW, temperature=1.0, seed=seed) for seed in (5, 6)]
    request = CompletionRequest(
        prompt, "default", max_tokens=NEW, temperature=1.0, seed=5, n_choices=4, ignore_eos=True, logprobs=0
    )
    choices = cached.send_completion_request(request)
    assert [(token.token_id, token.logprob) for token in tokens(choices)] == apart[0]
    assert len({tuple(token.token_id for token in tokens(choices, choice)) for choice in range(4)}) > 1


def test_prefix_cache_turned_off(llama: Runner) -> None:
    off = runner("llama", prefix_cache_n=0)
    for _ in range(2):
        details = complete(off, prompts(32)[-1], max_tokens=1).usage.prompt_tokens_details
        assert (details.cached_tokens, details.miss_reason) == (0, "disabled")
    stats = wait_until_idle(off)
    assert stats["prefix_hit_tokens"] == 0
    assert stats["blocks_cached"] == 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [1, 33, 4096])
def test_chunks(name: str, chunk: int) -> None:
    chunked = runner(name, prefix_cache_n=0, max_num_batched_tokens=chunk)
    some = range(0, 32, 8) if chunk == 1 else range(32)
    assert in_threads(lambda at: generate(chunked, prompts(32)[some[at]], NEW), len(some)) == [reference(name)[i] for i in some]


@pytest.mark.parametrize("name", MODELS + OTHERS + RECURRENT)
def test_preemption_in_a_tiny_pool(name: str) -> None:
    tiny = runner(name, memory_goal="128tokens", pa_blk_size=8)
    # Whether requests outgrow the pool depends on the order in which their threads sent them; in a few rounds some do.
    for _ in range(20):
        assert begun_together(tiny, lambda index: generate(tiny, prompts(32)[index], NEW), 32) == reference(name)
        if wait_until_idle(tiny)["preemptions"] > 0:
            return
    pytest.fail("no request was ever preempted")


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_without_kv_cache(name: str) -> None:
    slow = runner(name, no_kv_cache=True)
    some = range(0, 32, 8)
    assert [generate(slow, prompts(32)[index], NEW) for index in some] == [reference(name)[index] for index in some]
    wait_until_idle(slow)


def test_whole_contexts_up_front() -> None:
    naive = runner("llama", no_paged_attn=True)
    some = range(0, 32, 8)
    got = in_threads(lambda at: generate(naive, prompts(32)[some[at]], NEW), len(some))
    assert got == [reference("llama")[index] for index in some]
    wait_until_idle(naive)


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_block_sizes(block_size: int) -> None:
    sized = runner("llama", pa_blk_size=block_size)
    some = range(0, 32, 8)
    assert [generate(sized, prompts(32)[index], NEW) for index in some] == [reference("llama")[index] for index in some]
    assert sized.kv_cache_stats()["block_size"] == block_size


def test_scalar_tier_agrees() -> None:
    scalar = runner("llama", cpu_tier="scalar")
    for index in range(0, 32, 8):
        expected = reference("llama")[index]
        got = score(scalar, prompts(32)[index] + [token for token, _ in expected])[-NEW:]
        assert [token.logprob for token in got] == pytest.approx([logprob for _, logprob in expected], abs=2e-3)


def test_quantized_log_probabilities_stay_close(smollm2_path: Any) -> None:
    """The same tokens, scored while each is generated alone, and again in every other way to compute them."""
    ids = golden("real/smollm2")["perplexity"]["ids"]
    some = [ids[start : start + 40 + start // 2] for start in range(0, 80, 10)]
    which = Which.GGUF(str(smollm2_path))
    alone = Runner(which=which, pa_gpu_mem=128, prefix_cache_n=0)
    expected = {tuple(prompt): generate(alone, prompt, 12) for prompt in some}

    def check(other: Runner, prompts: list[list[int]]) -> None:
        generated = begun_together(other, lambda i: generate(other, prompts[i], 12), len(prompts))
        for prompt, got in zip(prompts, generated, strict=True):
            want = expected[tuple(prompt)]
            # Where a near tie went the other way, what follows is another text: score the expected one.
            if [token for token, _ in got] != [token for token, _ in want]:
                scored = score(other, prompt + [token for token, _ in want])[-len(want) :]
                got = [(token.token_id, token.logprob) for token in scored]
            assert [logprob for _, logprob in got] == pytest.approx([logprob for _, logprob in want], abs=0.05)

    check(alone, some)
    check(Runner(which=which, pa_gpu_mem=128, prefix_cache_n=0, max_num_batched_tokens=1), some[:2])
    check(Runner(which=which, pa_gpu_mem=128, prefix_cache_n=0, max_num_batched_tokens=33), some)
    # Four prompts of 5 blocks are let in where 24 are, in whatever order they come, and grow to 7 each.
    tiny = Runner(which=which, prefix_cache_n=0, memory_goal="192tokens", pa_blk_size=8, admission="optimistic")
    check(tiny, [some[0]] * 8)
    assert wait_until_idle(tiny)["preemptions"] > 0


def test_quantized_prefix_cache_stays_close(smollm2_path: Any) -> None:
    ids = golden("real/smollm2")["perplexity"]["ids"][:160]
    cached = Runner(which=Which.GGUF(str(smollm2_path)), pa_gpu_mem=128)
    first, second = (complete(cached, ids, max_tokens=1, logprobs=20) for _ in range(2))
    assert second.usage.prompt_tokens_details is not None
    cold = {entry.token_id: entry.logprob for entry in tokens(first)[0].top_logprobs}
    warm = {entry.token_id: entry.logprob for entry in tokens(second)[0].top_logprobs}
    both = cold.keys() & warm.keys()
    assert len(both) >= 18
    assert [warm[token] for token in both] == pytest.approx([cold[token] for token in both], abs=0.05)
