"""Priorities, deadlines, tenants, policies, pauses and drains."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from conftest import begun_together, complete, text_model, wait_until_idle

from mistral_paged import ChatCompletionRequest, CompletionRequest, DrainingError, InvalidArgumentError, Runner

PROMPT = [(index * 31) % 400 + 10 for index in range(40)]


@pytest.fixture(scope="module")
def one_at_a_time() -> Runner:
    return Runner(which=text_model("llama"), pa_ctxt_len=4096, max_seqs=1, num_threads=1)


def in_line(runner: Runner, requests: dict[str, dict[str, Any]]) -> list[str]:
    """Names of requests that were submitted one after the other in a pause, in the order in which the engine ended them."""
    ended: dict[str, float] = {}
    runner.pause()
    threads = []
    for count, (name, options) in enumerate(requests.items(), 1):

        def work(name: str = name, options: dict[str, Any] = options) -> None:
            submitted = time.monotonic()
            # Not when this thread hears of it: another one may wake up before.
            ended[name] = submitted + complete(runner, PROMPT, max_tokens=100, **options).usage.total_time_sec

        threads.append(threading.Thread(target=work))
        threads[-1].start()
        while runner.kv_cache_stats()["requests_waiting"] < count:
            pass
    runner.resume()
    for thread in threads:
        thread.join()
    return sorted(ended, key=ended.__getitem__)


def test_a_lower_priority_number_goes_first(one_at_a_time: Runner) -> None:
    requests = {"last": {"priority": 5}, "second": {}, "third": {"deadline": 600.0, "priority": 1}, "first": {"priority": -1}}
    assert in_line(one_at_a_time, requests) == ["first", "second", "third", "last"]


def test_a_deadline_ends_a_request_with_its_text(one_at_a_time: Runner) -> None:
    one_at_a_time.pause()
    late = complete(one_at_a_time, PROMPT, max_tokens=4, deadline=0.05, echo_prompt=True)
    one_at_a_time.resume()
    assert late.choices[0].finish_reason == "timeout"
    assert late.choices[0].text == one_at_a_time.detokenize_text(PROMPT)
    assert late.usage.completion_tokens == 0
    assert one_at_a_time.kv_cache_stats()["deadlines_missed"] >= 1
    assert complete(one_at_a_time, PROMPT, max_tokens=2, deadline=600).choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"priority": 2**31}, "priority"),
        ({"deadline": 0}, "deadline"),
        ({"deadline": float("nan")}, "deadline"),
        ({"deadline": float("inf")}, "`deadline` must be .*, got inf; None is no limit"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"public_prefix_len": 2}, "cache_salt"),
        ({"public_prefix_len": 41, "cache_salt": "a"}, "public_prefix_len is 41"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(one_at_a_time: Runner, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        complete(one_at_a_time, PROMPT, max_tokens=1, **options)


def test_more_public_messages_than_there_are_are_refused(one_at_a_time: Runner) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    request = ChatCompletionRequest(messages, "default", cache_salt="a", public_messages=2)
    with pytest.raises(InvalidArgumentError, match="public_messages is 2 and the chat has 1"):
        one_at_a_time.send_chat_completion_request(request)


def test_policies_are_chosen_by_name() -> None:
    expected = None
    for admission in ("watermark", "reserved", "optimistic"):
        runner = Runner(which=text_model("llama"), memory_goal="256tokens", pa_blk_size=8, num_threads=1, admission=admission)
        answers = begun_together(
            runner, lambda at, runner=runner: complete(runner, PROMPT[at:], max_tokens=40).choices[0].text, 8
        )
        expected = expected or answers
        assert answers == expected
        stats = wait_until_idle(runner)
        assert stats["preemptions"] == 0 or admission != "reserved"
    for argument, works in [
        ("admission", "watermark, reserved, optimistic"),
        ("victim", "least_cost, newest"),
        ("fairness", "priority, fcfs, drr"),
        ("speculative", '"off", "auto", "prompt_lookup", "draft_model" or "mtp"'),
    ]:
        with pytest.raises(InvalidArgumentError, match=f"`{argument}`.*{works}"):
            Runner(which=text_model("llama"), **{argument: "best"})


def test_first_come_first_served_refuses_priorities() -> None:
    runner = Runner(which=text_model("llama"), pa_ctxt_len=1024, max_seqs=1, num_threads=1, fairness="fcfs")
    with pytest.raises(InvalidArgumentError, match="priorit"):
        complete(runner, PROMPT, max_tokens=1, priority=1)
    assert in_line(runner, {"a": {}, "b": {}, "c": {}}) == ["a", "b", "c"]


def test_a_drained_runner_serves_what_it_has_and_refuses_more() -> None:
    runner = Runner(which=text_model("llama"), pa_ctxt_len=1024, num_threads=1)
    runner.pause()
    assert runner.kv_cache_stats()["paused"]
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda: answers.append(complete(runner, PROMPT, max_tokens=8).choices[0].text)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    while runner.kv_cache_stats()["requests_waiting"] < 3:
        pass
    assert runner.drain()
    assert runner.kv_cache_stats()["draining"]
    for thread in threads:
        thread.join()
    assert len(answers) == 3
    with pytest.raises(DrainingError, match="resume"):
        complete(runner, PROMPT, max_tokens=1)
    runner.resume()
    assert complete(runner, PROMPT, max_tokens=8).choices[0].text == answers[0]
    # Enough to do that it runs for a while.
    request = ChatCompletionRequest("Hello", "default", max_tokens=900, n_choices=64, ignore_eos=True, stream=True)
    stream = runner.send_chat_completion_request(request)
    next(stream)
    assert not runner.drain(timeout=0.001)
    stream.close()
    assert runner.drain(timeout=60)
    assert runner.drain(timeout=0)
    with pytest.raises(InvalidArgumentError, match="timeout"):
        runner.drain(timeout=-1)


def test_usage_tells_preemptions_and_what_they_cost() -> None:
    runner = Runner(which=text_model("llama"), memory_goal="128tokens", pa_blk_size=8, num_threads=1, admission="optimistic")
    usages = begun_together(runner, lambda at: complete(runner, PROMPT[at:], max_tokens=60).usage, 6)
    stats = wait_until_idle(runner)
    assert 0 < sum(usage.preemptions for usage in usages) <= stats["preemptions"]
    assert all(usage.recomputed_tokens == 0 for usage in usages if usage.preemptions == 0)
    assert complete(runner, PROMPT, max_tokens=2).usage.preemptions == 0


def test_requests_take_the_arguments_by_keyword_only() -> None:
    with pytest.raises(TypeError):
        CompletionRequest(PROMPT, "default", *[None] * 26, 1)  # type: ignore[misc]
