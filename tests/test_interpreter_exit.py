"""Threads that wait in the engine when the interpreter ends, and Ctrl-C while a text is tokenized."""

import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import text_model

PRELUDE = f"""
import sys, threading, time
from mistral_paged import CompletionRequest, ChatCompletionRequest, Runner, Which
runner = Runner(which=Which.Plain({text_model("llama").model_id!r}), memory_goal="4096tokens")
def complete(prompt, **fields):
    return runner.send_completion_request(CompletionRequest(prompt, "default", **fields))
complete([5], max_tokens=1)
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PRELUDE + program], capture_output=True, text=True, timeout=60)


WAITING = {
    "an answer": "complete([5, 6], max_tokens=400, ignore_eos=True)",
    "a stream": "list(runner.send_chat_completion_request(ChatCompletionRequest("
    "'Hi', 'default', max_tokens=400, ignore_eos=True, stream=True)))",
    "a pause": "runner.pause(); complete([5, 6], max_tokens=4)",
    "a long text": "complete('word ' * 20_000_000, max_tokens=1)",
    "one call after the other": "[runner.kv_cache_stats() for _ in iter(int, 1)]",
}


@pytest.mark.parametrize("end", ["sys.exit(7)", "raise ValueError('wrong')", "pass"])
@pytest.mark.parametrize("work", WAITING.values(), ids=WAITING.keys())
def test_a_daemon_thread_in_the_engine_does_not_change_how_a_program_ends(work: str, end: str) -> None:
    program = f"""
def work():
    while True:
        {work}
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
{end}
"""
    done = run(program)
    assert done.returncode == {"sys.exit(7)": 7, "pass": 0}.get(end, 1), done.stderr
    lines = done.stderr.splitlines()
    assert lines == [] if end != "raise ValueError('wrong')" else lines[-1] == "ValueError: wrong", done.stderr


def test_what_runs_at_exit_may_still_ask() -> None:
    done = run("import atexit; atexit.register(lambda: print(len(complete([5, 6], max_tokens=3).choices)))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_a_forked_child_ends_though_threads_of_its_parent_were_inside() -> None:
    program = """
import os
threading.Thread(target=lambda: complete([5, 6], max_tokens=2000, ignore_eos=True), daemon=True).start()
time.sleep(0.1)
started = time.monotonic()
pid = os.fork()
if pid == 0:
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), time.monotonic() - started < 5)
"""
    done = run(program)
    assert (done.returncode, done.stdout) == (0, "3 True\n"), done.stderr


@pytest.mark.parametrize("call", ["complete(text, max_tokens=1)", "runner.tokenize_text(text)"])
def test_ctrl_c_interrupts_a_long_tokenization(call: str) -> None:
    # What is started in the background of a shell ignores SIGINT, and Python then leaves it at that.
    program = f"""
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
text = "word " * 40_000_000
print("ready", flush=True)
try:
    {call}
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", PRELUDE + program], stdout=subprocess.PIPE, text=True) as process:
        killer = threading.Timer(60, process.kill)
        killer.start()
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        assert process.stdout.readline() == "interrupted\n"
        assert time.monotonic() - started < 2
        process.kill()
        killer.cancel()
