"""One runner, many threads; streams that are dropped; Ctrl-C."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from conftest import GOLDEN, generate, in_threads, text_model, wait_until_idle

from mistral_paged import ChatCompletionRequest, Runner


def stream(runner: Runner, index: int, max_tokens: int = 64) -> Any:
    messages = [{"role": "user", "content": f"Question {index}: what is a block table?"}]
    options = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    return runner.send_chat_completion_request(ChatCompletionRequest(messages, "default", stream=True, **options))


def test_64_threads(llama: Runner) -> None:
    alone = [generate(llama, [20 + index, 30, 40], 20) for index in range(64)]
    assert in_threads(lambda index: generate(llama, [20 + index, 30, 40], 20), 64) == alone


def test_64_streams_at_once(llama: Runner) -> None:
    def text(index: int) -> str:
        return "".join(chunk.choices[0].delta.content for chunk in stream(llama, index, 16))

    texts = in_threads(text, 64)
    assert texts == [text(index) for index in range(64)]


def test_two_runners_serve_at_once_what_each_serves_alone() -> None:
    runners = [Runner(which=text_model(name), pa_ctxt_len=4096) for name in ("llama", "qwen2")]
    alone = [[generate(runner, [20 + index, 30, 40], 40) for index in range(8)] for runner in runners]
    together = in_threads(lambda at: generate(runners[at % 2], [20 + at // 2, 30, 40], 40), 16)
    assert together == [alone[at % 2][at // 2] for at in range(16)]


def test_dropping_half_of_the_streams_frees_their_blocks() -> None:
    runner = Runner(which=text_model("llama"), pa_ctxt_len=32768, max_seqs=64, max_step_latency=3600)
    runner.pause()
    streams = [stream(runner, index, 400) for index in range(64)]
    runner.resume()
    next(streams[-1])
    # 400 steps of 64 rows before the first of them ends.
    runner.pause()
    held = runner.kv_cache_stats()
    assert held["requests_running"] == 64
    kept = streams[::2]
    del streams
    gc.collect()
    rest = runner.kv_cache_stats()
    assert rest["requests_running"] == 32
    assert 0 < rest["blocks_used"] < held["blocks_used"]
    runner.resume()
    for each in kept:
        chunks = list(each)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert chunks[-1].usage.completion_tokens == 400
    assert wait_until_idle(runner)["blocks_used"] == 0


def test_dropping_a_stream_stops_its_generation() -> None:
    runner = Runner(which=text_model("llama"), pa_ctxt_len=512)
    running = stream(runner, 0, 400)
    next(running)
    running.close()
    assert list(running) == []
    wait_until_idle(runner)


def test_a_runner_may_go_while_a_stream_lives() -> None:
    runner = Runner(which=text_model("llama"), pa_ctxt_len=512)
    running = stream(runner, 0, 32)
    del runner
    gc.collect()
    assert list(running)[-1].usage.completion_tokens == 32


def test_other_threads_run_while_one_waits(llama: Runner) -> None:
    """A waiting call that kept the interpreter would wait for ever: only the other thread lets it go on."""
    llama.pause()

    def work(index: int) -> None:
        if index == 0:
            generate(llama, [5, 6, 7], 8)
            return
        while llama.kv_cache_stats()["requests_waiting"] == 0:
            time.sleep(0.001)
        llama.resume()

    try:
        in_threads(work, 2)
    finally:
        llama.resume()


MALLINFO2 = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class HeapUse(ctypes.Structure):
    """What glibc's `mallinfo2` returns (mallinfo(3)), of all arenas together."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO2]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc tells what is allocated from 2.33 on")
def test_no_request_grows_memory_with_its_steps(llama: Runner) -> None:
    # Allocated bytes: resident ones also grow by a huge page where an answer is the first to reach one of the pool's.
    heap_use = ctypes.CDLL(None).mallinfo2
    heap_use.restype = HeapUse

    def allocated() -> int:
        use = heap_use()
        return int(use.uordblks + use.hblkhd)

    length = llama.max_sequence_length()
    generate(llama, [5, 6, 7], length)
    running = stream(llama, 0, length)
    for _ in range(20):
        next(running)
    # While the request lives: what ends with it has not been given back.
    allocations = [allocated() for _ in running]
    assert len(allocations) > 100
    assert max(allocations) - allocations[0] < 1 << 16


@contextmanager
def started(program: str) -> Iterator[subprocess.Popen[str]]:
    """A program that has printed "ready"; killed if it has not ended by itself."""
    # A shell's jobs in the background ignore interrupts, and so would their children.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    command = [sys.executable, "-c", heed + textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def check_interrupted(program: str) -> None:
    with started(program) as process:
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=20)
        assert out == "interrupted\n"
        assert process.returncode == 0


MODEL = str(GOLDEN / "text" / "llama")


def test_ctrl_c_interrupts() -> None:
    check_interrupted(f"""
        from mistral_paged import *
        runner = Runner(which=Which.Plain({MODEL!r}), pa_ctxt_len=4096, no_kv_cache=True)
        request = CompletionRequest([5] * 300, "default", max_tokens=200, ignore_eos=True, n_choices=32)
        print("ready", flush=True)
        try:
            while True:
                runner.send_completion_request(request)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """)


def test_ctrl_c_interrupts_a_stream() -> None:
    check_interrupted(f"""
        from mistral_paged import *
        runner = Runner(which=Which.Plain({MODEL!r}), pa_ctxt_len=4096, no_kv_cache=True)
        # 16 prompts that are computed again at every step; only the last one's chunks are awaited.
        requests = [ChatCompletionRequest("x " * 100, "m", stream=True, max_tokens=300, ignore_eos=True) for _ in range(16)]
        streams = [runner.send_chat_completion_request(request) for request in requests]
        next(streams[-1])
        print("ready", flush=True)
        try:
            while True:
                for chunk in streams[-1]:
                    pass
                streams[-1] = runner.send_chat_completion_request(requests[-1])
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """)


def test_ctrl_c_interrupts_loading() -> None:
    check_interrupted(f"""
        import threading
        from mistral_paged import *
        print("ready", flush=True)
        try:
            while True:
                Runner(which=Which.Plain({MODEL!r}), pa_ctxt_len=4096)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """)


def test_a_forked_child_is_told() -> None:
    program = f"""
        import multiprocessing
        import sys
        from mistral_paged import *
        runner = Runner(which=Which.Plain({MODEL!r}), pa_ctxt_len=4096)
        request = CompletionRequest([5], "m", max_tokens=1)
        chat = ChatCompletionRequest("x", "m", stream=True, max_tokens=50, ignore_eos=True)
        stream = runner.send_chat_completion_request(chat)

        def child():
            for call in (
                lambda: runner.send_completion_request(request),
                lambda: runner.send_chat_completion_request(chat),
                lambda: runner.tokenize_text("x"),
                runner.kv_cache_stats,
                lambda: next(stream),
                stream.close,
            ):
                try:
                    call()
                except InternalError as error:
                    assert "forked" in str(error)
                else:
                    sys.exit(3)
            repr(runner)
            del call, globals()["stream"], globals()["runner"]
            sys.exit(42)

        print("ready", flush=True)
        forked = multiprocessing.get_context("fork").Process(target=child)
        forked.start()
        forked.join(20)
        forked.kill()
        assert len(list(stream)) > 1
        runner.send_completion_request(request)
        print(forked.exitcode)
    """
    with started(program) as process:
        out, _ = process.communicate(timeout=60)
        assert out == "42\n"
        assert process.returncode == 0
