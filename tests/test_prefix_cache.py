"""The prefix cache on the default model: what is found, what is not and why, and that replies do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import complete, generate, in_threads, wait_until_idle

from mistral_paged import ChatCompletionRequest, ModelDType, Runner, Which

SYSTEM = {"role": "system", "content": "You are a librarian. " * 20}


def details(response: Any) -> tuple[int, str | None]:
    found = response.usage.prompt_tokens_details
    return found.cached_tokens, found.miss_reason


def ask(runner: Runner, *messages: dict[str, str], **options: Any) -> Any:
    options = {"temperature": 0.0, "max_tokens": 8, **options}
    return runner.send_chat_completion_request(ChatCompletionRequest([SYSTEM, *messages], "default", **options))


@pytest.fixture(scope="module", params=["F32", "Auto"])
def runner(request: pytest.FixtureRequest, smollm2_path: Path) -> Runner:
    return Runner(which=Which.GGUF(str(smollm2_path), dtype=getattr(ModelDType, request.param)), pa_gpu_mem=256)


def ids(seed: int, count: int) -> list[int]:
    return [(seed * 7919 + position * 31) % 20_000 + 100 for position in range(count)]


def test_a_second_turn_reuses_the_first(runner: Runner) -> None:
    question = {"role": "user", "content": "Where do you keep the books about trains?"}
    first = ask(runner, question)
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    second = ask(runner, question, answer, {"role": "user", "content": "And those about ships?"})
    cached, reason = details(second)
    # All that the first turn computed: its prompt, and its answer but for the last token, if that is told the same way again.
    assert first.usage.prompt_tokens <= cached < second.usage.prompt_tokens
    assert reason in ("cold", "partial_tail")


def test_a_full_hit_computes_one_token_and_the_reply_is_the_same(runner: Runner) -> None:
    prompt = ids(1, 100)
    cold = generate(runner, prompt, 12)
    warm = complete(runner, prompt, max_tokens=12)
    assert details(warm) == (99, None)
    assert generate(runner, prompt, 12) == cold, "tokens and the bits of their log probabilities"


def test_equal_requests_at_once_compute_their_prompt_once(runner: Runner) -> None:
    before = runner.kv_cache_stats()
    answers = in_threads(lambda _: complete(runner, ids(2, 320), max_tokens=4), 8)
    after = wait_until_idle(runner)
    assert len({answer.choices[0].text for answer in answers}) == 1
    assert after["prefix_queried_tokens"] - before["prefix_queried_tokens"] == 8 * 320
    # One computes it all; each of the others only the token whose logits are wanted.
    assert sum(320 - details(answer)[0] for answer in answers) == 320 + 7


def test_salts_part_and_a_public_prefix_is_shared(runner: Runner) -> None:
    prompt = ids(3, 128)
    assert details(complete(runner, prompt, max_tokens=1)) == (0, "cold")
    assert details(complete(runner, prompt, max_tokens=1, cache_salt="a")) == (0, "salt")
    assert details(complete(runner, prompt, max_tokens=1, cache_salt="a")) == (127, None)
    assert details(complete(runner, prompt, max_tokens=1, cache_salt="b")) == (0, "salt")
    assert details(complete(runner, prompt, max_tokens=1, cache_salt="c", public_prefix_len=64)) == (64, "salt")
    question = {"role": "user", "content": "Who wrote Emma?"}
    common = len(runner.tokenize_text([SYSTEM])) // 32 * 32
    ask(runner, question, max_tokens=1)
    assert details(ask(runner, question, cache_salt="d"))[0] == 0
    cached, reason = details(ask(runner, question, cache_salt="e", public_messages=1))
    assert 0 < cached <= common
    assert reason == "salt"


def test_misses_say_why(runner: Runner, smollm2_path: Path) -> None:
    prompt = ids(4, 96)
    complete(runner, prompt, max_tokens=1)
    scored = complete(runner, prompt, max_tokens=1, echo_prompt=True, logprobs=0)
    assert details(scored) == (0, "skipped")
    other = complete(runner, [*prompt[:90], *ids(5, 20)], max_tokens=1)
    assert details(other) == (90, "cold")
    off = Runner(which=Which.GGUF(str(smollm2_path)), pa_gpu_mem=64, prefix_cache_n=0)
    for _ in range(2):
        assert details(complete(off, prompt, max_tokens=1)) == (0, "disabled")
    assert off.kv_cache_stats()["prefix_missed_tokens"]["disabled"] == 2 * 96
    tiny = Runner(which=Which.GGUF(str(smollm2_path)), memory_goal="512tokens")
    complete(tiny, ids(6, 100), max_tokens=1)
    # As large as the pool.
    complete(tiny, ids(7, 500), max_tokens=1)
    assert details(complete(tiny, ids(6, 100), max_tokens=1)) == (0, "evicted")
    missed = tiny.kv_cache_stats()["prefix_missed_tokens"]
    assert (missed["evicted"], missed["cold"]) == (100, 600)
