"""Requests that are awaited: `Runner.achat` and `Runner.acomplete`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import textwrap
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from conftest import F32, GOLDEN, complete, in_threads, text_model, wait_until_idle

from mistral_paged import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    DrainingError,
    InvalidArgumentError,
    ModelNotFoundError,
    Runner,
)
from mistral_paged.aio import AsyncChatCompletionStreamer

OPTIONS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def chat(index: int, max_tokens: int = 16, **options: Any) -> ChatCompletionRequest:
    messages = [{"role": "user", "content": f"Question {index}: what is a block table?"}]
    return ChatCompletionRequest(messages, "default", max_tokens=max_tokens, **{**OPTIONS, **options})


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 100))


async def text_of(runner: Runner, request: ChatCompletionRequest) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in await runner.achat(request)])


async def drained(stream: AsyncChatCompletionStreamer) -> None:
    async for _ in stream:
        pass


async def idle(runner: Runner) -> None:
    """Until no request is left, without leaving the loop waiting."""
    while (stats := runner.kv_cache_stats())["blocks_used"] or stats["requests_running"] or stats["requests_waiting"]:
        await asyncio.sleep(0.01)


def num_threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def test_answers_are_those_of_the_waiting_calls(llama: Runner) -> None:
    request, text = chat(1), CompletionRequest("Once upon a time", "default", max_tokens=12, n_choices=2, **OPTIONS)

    async def work() -> None:
        answer = await llama.achat(request)
        assert isinstance(answer, ChatCompletionResponse)
        assert answer.choices[0].message.content == llama.send_chat_completion_request(request).choices[0].message.content
        assert answer.usage.completion_tokens == 16
        completion = await llama.acomplete(text)
        assert isinstance(completion, CompletionResponse)
        expected = llama.send_completion_request(text)
        assert [choice.text for choice in completion.choices] == [choice.text for choice in expected.choices]

    run(work())


def test_chunks_are_those_of_the_waiting_stream(llama: Runner) -> None:
    request = chat(2, n_choices=2, logprobs=True, stream=True)

    def told(chunk: Any) -> Any:
        (choice,) = chunk.choices
        ids = [token.token_id for token in choice.logprobs.content]
        return choice.index, choice.delta.content, ids, choice.finish_reason, chunk.usage is not None

    async def work() -> list[Any]:
        stream = await llama.achat(request)
        assert isinstance(stream, AsyncChatCompletionStreamer)
        chunks = [told(chunk) async for chunk in stream]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        return chunks

    assert sorted(run(work())) == sorted(told(chunk) for chunk in llama.send_chat_completion_request(request))


def test_256_streams_on_one_loop_take_no_threads() -> None:
    runner = Runner(which=text_model("llama"), pa_ctxt_len=32768, max_seqs=256, num_threads=2)

    async def work() -> list[str]:
        before = num_threads()
        streams = [await runner.achat(chat(index, stream=True)) for index in range(256)]
        firsts = await asyncio.gather(*[anext(stream) for stream in streams])
        assert num_threads() == before

        async def rest(first: Any, stream: AsyncChatCompletionStreamer) -> str:
            return "".join([first.choices[0].delta.content, *[chunk.choices[0].delta.content async for chunk in stream]])

        texts = await asyncio.gather(*map(rest, firsts, streams))
        assert num_threads() == before
        return texts

    texts = run(work())
    for index in range(0, 256, 16):
        answer = runner.send_chat_completion_request(chat(index))
        assert texts[index] == answer.choices[0].message.content
    wait_until_idle(runner)


def test_a_loop_wakes_once_a_step_for_all_its_streams(llama: Runner) -> None:
    async def work() -> None:
        loop, wakes = asyncio.get_running_loop(), 0
        watch = loop.add_reader

        def counting(fd: int, callback: Any, *args: Any) -> Any:
            def counted() -> None:
                nonlocal wakes
                wakes += 1
                callback(*args)

            return watch(fd, counted)

        loop.add_reader = counting  # type: ignore[method-assign]
        steps = llama.kv_cache_stats()["steps"]
        llama.pause()
        tasks = [asyncio.create_task(text_of(llama, chat(index, 24, stream=True))) for index in range(16)]
        while llama.kv_cache_stats()["requests_waiting"] < 16:
            await asyncio.sleep(0)
        llama.resume()
        await asyncio.gather(*tasks)
        steps = llama.kv_cache_stats()["steps"] - steps
        assert 0 < wakes <= steps < 16 * 24

    run(work())


def test_cancelling_a_task_frees_its_blocks(llama: Runner) -> None:
    async def work() -> None:
        endless = chat(3, 400, n_choices=8)
        tasks = [asyncio.create_task(llama.achat(endless)) for _ in range(4)]
        while llama.kv_cache_stats()["requests_running"] < 4:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*tasks, return_exceptions=True))
        await idle(llama)

    run(work())


def test_a_timeout_cancels_a_request(llama: Runner) -> None:
    async def work() -> None:
        llama.pause()
        try:
            for request in (chat(4, 400), chat(4, 400, stream=True)):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(text_of(llama, request) if request.stream else llama.achat(request), 0.05)
            # Without a step: a paused engine drops them too.
            await idle(llama)
        finally:
            llama.resume()

    run(work())


@pytest.mark.parametrize("way", ["aclose", "with", "break", "drop", "cancel"])
def test_leaving_a_stream_frees_its_blocks(llama: Runner, way: str) -> None:
    async def work() -> None:
        stream = await llama.achat(chat(5, 400, n_choices=4, stream=True))
        assert (await anext(stream)).choices[0].delta.content is not None
        if way == "aclose":
            await stream.aclose()
            assert [chunk async for chunk in stream] == []
        elif way == "with":
            async with stream:
                await anext(stream)
            assert [chunk async for chunk in stream] == []
        elif way == "break":
            async with contextlib.aclosing(stream) as chunks:
                async for _ in chunks:
                    break
        elif way == "drop":
            del stream
            gc.collect()
        else:
            llama.pause()
            try:
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(drained(stream), 0.2)
            finally:
                llama.resume()
            assert [chunk async for chunk in stream] == []
        await idle(llama)

    run(work())


def test_what_is_wrong_is_raised_by_the_await(llama: Runner) -> None:
    async def work() -> None:
        too_long = CompletionRequest([5] * 100_000, "default", max_tokens=1)
        with pytest.raises(InvalidArgumentError, match="truncate_sequence"):
            await llama.acomplete(too_long)
        not_served = llama.achat(chat(1), model_id="nope")
        with pytest.raises(ModelNotFoundError, match="`nope` was not found"):
            await not_served
        with pytest.raises(TypeError):
            llama.achat(CompletionRequest("x", "m"))  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            llama.acomplete(chat(1))  # type: ignore[arg-type]
        llama.drain()
        try:
            with pytest.raises(DrainingError):
                await llama.achat(chat(1))
        finally:
            llama.resume()
        assert (await llama.achat(chat(1))).usage.completion_tokens == 16

    run(work())


def test_streams_belong_to_their_loop_and_to_one_task_at_a_time(llama: Runner) -> None:
    async def work() -> AsyncChatCompletionStreamer:
        stream = await llama.achat(chat(6, 400, stream=True))
        llama.pause()
        try:
            # What was made before the pause comes at once.
            waiting = asyncio.create_task(asyncio.wait_for(drained(stream), 0.5))
            await asyncio.sleep(0.2)
            with pytest.raises(RuntimeError, match="another task waits"):
                await anext(stream)
            with pytest.raises(asyncio.TimeoutError):
                await waiting
        finally:
            llama.resume()
        return await llama.achat(chat(6, 400, stream=True))

    stream = run(work())
    with pytest.raises(RuntimeError, match="another event loop"):
        run(drained(stream))


def test_loops_in_several_threads(llama: Runner) -> None:
    async def work(thread: int) -> list[str]:
        requests = [chat(8 * thread + index, stream=index % 2 == 0) for index in range(8)]

        async def answer(request: ChatCompletionRequest) -> str:
            if request.stream:
                return await text_of(llama, request)
            return str((await llama.achat(request)).choices[0].message.content)

        return await asyncio.gather(*map(answer, requests))

    texts = [text for one in in_threads(lambda thread: run(work(thread)), 4) for text in one]
    for index, text in enumerate(texts):
        assert text == llama.send_chat_completion_request(chat(index)).choices[0].message.content


def test_loops_one_after_another_leave_no_descriptor_behind(llama: Runner) -> None:
    def descriptors() -> int:
        gc.collect()
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    run(text_of(llama, chat(1, stream=True)))
    before = descriptors()
    for _ in range(5):
        run(text_of(llama, chat(1, stream=True)))
    assert descriptors() <= before


def test_waiting_threads_and_tasks_share_a_runner(llama: Runner) -> None:
    expected = [complete(llama, [20 + index, 30, 40], max_tokens=20).choices[0].text for index in range(8)]

    def work(index: int) -> str:
        if index % 2:
            return str(complete(llama, [20 + index, 30, 40], max_tokens=20).choices[0].text)
        request = CompletionRequest([20 + index, 30, 40], "default", max_tokens=20, **OPTIONS)
        return str(run(llama.acomplete(request)).choices[0].text)

    assert in_threads(work, 8) == expected


def test_an_unloaded_model_is_loaded_by_the_first_request_that_is_awaited() -> None:
    runner = Runner(which=text_model("llama", F32), pa_ctxt_len=4096, num_threads=1)
    expected = runner.send_chat_completion_request(chat(1)).choices[0].message.content
    runner.unload_model()

    async def work() -> list[Any]:
        return await asyncio.gather(*[runner.achat(chat(1)) for _ in range(4)])

    assert [answer.choices[0].message.content for answer in run(work())] == [expected] * 4
    assert runner.list_unloaded_models() == []


def ended(program: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


MODEL = str(GOLDEN / "text" / "llama")


@pytest.mark.parametrize("where", ["main", "daemon"])
def test_an_exit_while_tasks_wait_keeps_the_exit_code(where: str) -> None:
    code, out, errors = ended(f"""
        import asyncio
        import sys
        import threading
        from mistral_paged import *

        runner = Runner(which=Which.Plain({MODEL!r}), pa_ctxt_len=32768, num_threads=1)
        begun = threading.Event()

        async def wait(index):
            request = ChatCompletionRequest(f"Hello {{index}}", "m", stream=True, max_tokens=400, ignore_eos=True)
            async for chunk in await runner.achat(request):
                begun.set()

        async def main():
            tasks = [asyncio.create_task(wait(index)) for index in range(8)]
            while not begun.is_set():
                await asyncio.sleep(0)
            if {where!r} == "main":
                print("leaving", flush=True)
                sys.exit(7)
            await asyncio.gather(*tasks)

        if {where!r} == "main":
            asyncio.run(main())
        threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
        begun.wait()
        print("leaving", flush=True)
        sys.exit(7)
    """)
    assert (code, out) == (7, "leaving\n"), errors


def test_a_forked_child_is_told() -> None:
    code, out, errors = ended(f"""
        import asyncio
        import os
        from mistral_paged import *

        runner = Runner(which=Which.Plain({MODEL!r}), pa_ctxt_len=4096, num_threads=1)
        request = ChatCompletionRequest("Hello", "m", max_tokens=4)
        asyncio.run(runner.achat(request))
        child = os.fork()
        if child == 0:
            try:
                asyncio.run(runner.achat(request))
            except InternalError as error:
                os._exit(42 if "forked" in str(error) else 3)
            os._exit(4)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        asyncio.run(runner.achat(request))
    """)
    assert (code, out) == (0, "42\n"), errors
