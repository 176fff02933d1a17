"""Models that are unloaded and loaded again."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import complete, in_threads, text_model

from mistral_paged import (
    ChatCompletionRequest,
    CompletionRequest,
    InternalError,
    InvalidArgumentError,
    ModelNotFoundError,
    Runner,
    Which,
)

PROMPT = [5, 6, 7]


def tiny(**options: Any) -> Runner:
    return Runner(which=text_model("llama"), num_threads=1, **{"pa_ctxt_len": 4096, **options})


def stream(runner: Runner, max_tokens: int, **options: Any) -> Any:
    request = ChatCompletionRequest("Hello", "default", stream=True, max_tokens=max_tokens, ignore_eos=True, **options)
    return runner.send_chat_completion_request(request)


def statuses(runner: Runner) -> tuple[bool, str, list[tuple[str, str]], list[str]]:
    (own,) = runner.list_models()
    return (
        runner.is_model_loaded(own),
        runner.get_model_status(own),
        runner.list_models_with_status(),
        runner.list_unloaded_models(),
    )


def test_status_follows_unloading_and_reloading() -> None:
    runner = tiny()
    (own,) = runner.list_models()
    loaded = (True, "loaded", [(own, "loaded")], [])
    assert statuses(runner) == loaded
    text = complete(runner, PROMPT, max_tokens=8).choices[0].text
    runner.unload_model()
    assert statuses(runner) == (False, "unloaded", [(own, "unloaded")], [own])
    with pytest.raises(InvalidArgumentError, match="unloaded already"):
        runner.unload_model(own)
    runner.reload_model()
    assert statuses(runner) == loaded
    runner.reload_model(own)
    assert complete(runner, PROMPT, max_tokens=8).choices[0].text == text
    for call in (runner.unload_model, runner.reload_model, runner.is_model_loaded, runner.get_model_status):
        with pytest.raises(ModelNotFoundError, match="model `nope` was not found"):
            call("nope")
    assert statuses(runner) == loaded


def test_a_request_loads_an_unloaded_model_and_other_methods_name_what_does() -> None:
    runner = tiny()
    text = complete(runner, PROMPT, max_tokens=8).choices[0].text
    runner.unload_model()
    for call in (
        runner.kv_cache_stats,
        runner.memory_ledger,
        runner.max_sequence_length,
        runner.pause,
        runner.resume,
        runner.drain,
        lambda: runner.tokenize_text("x"),
        lambda: runner.detokenize_text([5]),
    ):
        with pytest.raises(InvalidArgumentError, match=r"`reload_model\(\)`"):
            call()
    assert repr(runner).startswith("Runner(")
    assert complete(runner, PROMPT, max_tokens=8).choices[0].text == text
    assert runner.kv_cache_stats()["blocks_used"] == 0


def test_unloading_ends_requests_with_their_text() -> None:
    runner = tiny(max_seqs=128, pa_ctxt_len=128 * 512)
    expected = complete(runner, PROMPT, max_tokens=400, n_choices=2).choices[0].text
    runner.pause()
    running = stream(runner, 400, temperature=0.0, n_choices=64)
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(complete(runner, PROMPT, max_tokens=400, n_choices=64)))
    waiting.start()
    deadline = time.monotonic() + 60
    while runner.kv_cache_stats()["requests_waiting"] < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    # Both run from the same step on, and neither to its end: 128 answers of 400 tokens take some tenths of a second.
    runner.resume()
    next(running)
    runner.pause()
    runner.unload_model()
    waiting.join()
    assert {choice.finish_reason for choice in answers[0].choices} == {"canceled"}
    texts = [choice.text for choice in answers[0].choices]
    assert all(expected.startswith(text) for text in texts)
    assert any(texts)
    chunks = list(running)
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason]
    assert ends == ["canceled"] * 64
    assert 0 < chunks[-1].usage.completion_tokens < 64 * 400
    assert runner.list_unloaded_models() == runner.list_models()


def test_kept_sequences_end_with_the_model() -> None:
    runner = tiny()
    sequence = complete(runner, PROMPT, max_tokens=8, keep=True).choices[0].sequence
    assert sequence is not None
    tokens = sequence.tokens
    runner.unload_model()
    assert sequence.tokens == tokens
    with pytest.raises(InternalError, match="unloaded"):
        sequence.generate(max_tokens=4)
    expected = complete(runner, tokens, max_tokens=4).choices[0].text
    with pytest.raises(InternalError, match="unloaded"):
        sequence.generate(max_tokens=4)
    sequence.release()
    assert complete(runner, tokens, max_tokens=4).choices[0].text == expected


def test_threads_that_unload_and_ask_at_once_lose_nothing() -> None:
    runner = tiny()
    expected = complete(runner, PROMPT, max_tokens=30).choices[0].text

    def work(index: int) -> list[tuple[str, str]]:
        if index == 0:
            for _ in range(10):
                try:
                    runner.unload_model()
                except InvalidArgumentError as error:
                    assert "already" in str(error)
                time.sleep(0.01)
            return []
        answers = []
        for _ in range(10):
            try:
                choice = complete(runner, PROMPT, max_tokens=30).choices[0]
            except InternalError as error:
                # It came in while the engine ended.
                assert "unloaded" in str(error) or "stopped" in str(error)
                continue
            answers.append((choice.finish_reason, choice.text))
        return answers

    for reason, text in [answer for answers in in_threads(work, 5) for answer in answers]:
        assert (reason, text) == ("length", expected) or (reason == "canceled" and expected.startswith(text))
    assert complete(runner, PROMPT, max_tokens=30).choices[0].text == expected


def test_unloading_in_a_pause_or_a_drain() -> None:
    runner = tiny()
    runner.pause()
    running = stream(runner, 10)
    runner.unload_model()
    assert [chunk.choices[0].finish_reason for chunk in running] == ["canceled"]
    assert complete(runner, PROMPT, max_tokens=2).usage.completion_tokens == 2
    runner.drain()
    runner.unload_model()
    # Loaded again, it is as it was made.
    assert complete(runner, PROMPT, max_tokens=2).usage.completion_tokens == 2


def test_the_tier_of_an_unloaded_model_serves_the_next(tmp_path: Path) -> None:
    runner = tiny(kv_tier=tmp_path)
    prompt = [5 + index for index in range(300)]
    text = complete(runner, prompt, max_tokens=4).choices[0].text
    runner.unload_model()
    assert any(path.is_file() for path in tmp_path.rglob("*"))
    assert complete(runner, prompt, max_tokens=4).choices[0].text == text


def test_a_model_that_is_gone_stays_unloaded(tmp_path: Path) -> None:
    source = text_model("llama")
    copy = tmp_path / "model"
    copy.mkdir()
    for file in Path(source.model_id).iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    runner = Runner(which=Which.Plain(str(copy)), pa_ctxt_len=256, num_threads=1)
    runner.unload_model()
    config = copy / "config.json"
    hidden = config.rename(copy / "hidden")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"config\.json"):
            complete(runner, PROMPT, max_tokens=1)
        assert runner.get_model_status(str(copy)) == "unloaded"
    hidden.rename(config)
    assert complete(runner, PROMPT, max_tokens=1).usage.completion_tokens == 1


def test_the_end_of_a_with_block_closes_the_runner_for_good() -> None:
    with tiny() as runner:
        sequence = complete(runner, PROMPT, max_tokens=8, keep=True).choices[0].sequence
        # Paused, it can't end before the block does.
        runner.pause()
        running = stream(runner, 400, temperature=0.0)
    assert [chunk.choices[0].finish_reason for chunk in running][-1] == "canceled"
    (own,) = runner.list_models()
    assert statuses(runner) == (False, "closed", [(own, "closed")], [own])
    runner.close()
    assert sequence is not None
    for call in (
        lambda: complete(runner, PROMPT, max_tokens=1),
        lambda: asyncio.run(runner.acomplete(CompletionRequest(PROMPT, "default", max_tokens=1))),
        runner.reload_model,
        runner.unload_model,
        runner.kv_cache_stats,
        runner.generation_config,
    ):
        with pytest.raises(InvalidArgumentError, match="the runner is closed; make another one"):
            call()
    with pytest.raises(InternalError, match="unloaded"):
        sequence.generate(max_tokens=1)


def test_an_exception_leaves_a_with_block_and_closes_the_runner() -> None:
    with pytest.raises(KeyError), tiny() as runner:
        raise KeyError
    assert runner.get_model_status(runner.list_models()[0]) == "closed"
    unloaded = tiny()
    unloaded.unload_model()
    unloaded.close()
    assert unloaded.list_models_with_status()[0][1] == "closed"


def test_threads_that_close_while_others_ask_end_all_requests() -> None:
    runner = tiny()

    def work(index: int) -> list[str]:
        if index < 2:
            time.sleep(0.02)
            runner.close()
            return []
        reasons = []
        while True:
            try:
                reasons.append(complete(runner, PROMPT, max_tokens=30).choices[0].finish_reason)
            except InternalError as error:
                assert "unloaded" in str(error) or "stopped" in str(error)
            except InvalidArgumentError as error:
                assert "closed" in str(error)
                return reasons

    assert {reason for reasons in in_threads(work, 6) for reason in reasons} <= {"length", "canceled"}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_unloading_gives_the_memory_back(smollm2_path: Path) -> None:
    runner = Runner(which=Which.GGUF(str(smollm2_path)), pa_gpu_mem=512, num_threads=2)
    complete(runner, [5 + index % 4000 for index in range(2000)], max_tokens=2)
    ledger = runner.memory_ledger()
    loaded = resident_bytes()
    runner.unload_model()
    given_back = loaded - resident_bytes()
    # Packed weights, and the blocks of 2000 tokens; the vocabulary may stay.
    assert given_back > 0.7 * ledger.weights_bytes, (given_back, ledger)
    runner.reload_model()
    assert complete(runner, PROMPT, max_tokens=2).usage.completion_tokens == 2
    runner.unload_model()
    assert loaded - resident_bytes() > 0.7 * ledger.weights_bytes
