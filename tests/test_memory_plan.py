"""What is planned before loading is what is resident; promised contexts are served; windows hold no more than windows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import GOLDEN, complete, generate, in_threads, text_model, wait_until_idle

from mistral_paged import MistralPagedError, Runner, Which

# Runs a step of the most tokens, and one that attention divides, writes every block, and computes all rows of logits, in a
# process of its own. Prints the plan's and the system's figures, less those of the process before: its imports, and the code
# that a tiny model has run.
MEASURE = """
import ctypes, json, sys
from mistral_paged import CompletionRequest, Runner, Which

def resident():
    ctypes.CDLL(None).malloc_trim(0)  # what is free in the heap is unowned
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("Rss:")).split()[1])

def send(first, count, **more):
    request = CompletionRequest(list(range(first, first + count)), "default", max_tokens=1, ignore_eos=True, **more)
    runner.send_completion_request(request)

path, tiny, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
options = dict(max_num_batched_tokens=256, max_seqs=2, num_threads=2)
runner = Runner(Which.GGUF(tiny), pa_ctxt_len=512, **options)
send(1, 200, echo_prompt=True, logprobs=0)
del runner
before = resident()
plan = Runner.memory_plan(Which.GGUF(path), pa_ctxt_len=tokens, **options)
runner = Runner(Which.GGUF(path), pa_ctxt_len=tokens, **options)
longest = min(plan.servable_tokens, runner.max_sequence_length()) - 1
send(1000, longest)
send(20000, longest // 256 * 256 + 65)
for turn in range(4):  # blocks that are free were written by an earlier turn, or are cached
    if runner.kv_cache_stats()["blocks_cached"] >= plan.num_blocks - len(plan.groups):
        break
    send(12000 + 5000 * turn, longest)
cached, served = runner.kv_cache_stats()["blocks_cached"], resident() - before
send(9000, 200, echo_prompt=True, logprobs=0)
print(json.dumps({
    "planned": plan.resident_bytes, "margin": plan.margin_bytes, "grown": resident() - before, "served": served,
    "weights": plan.weights_bytes, "kv": plan.kv_cache_bytes, "cached": cached, "blocks": plan.num_blocks,
}))
"""


def measure(path: Path, tokens: int) -> dict[str, int]:
    arguments = [sys.executable, "-c", MEASURE, str(path), str(GOLDEN / "gguf" / "llama.gguf"), str(tokens)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["smollm2_path", "gemma3_path"])
def test_resident_memory_is_what_was_planned(model: str, request: pytest.FixtureRequest) -> None:
    # A thread that others left no work writes to none of its buffers: one of three must come to it.
    all_figures = []
    for _ in range(3):
        figures = measure(request.getfixturevalue(model), 1024)
        all_figures.append(figures)
        assert figures["cached"] >= 0.9 * figures["blocks"]  # every block has been written
        assert figures["grown"] <= 1.02 * figures["planned"], figures
        assert figures["served"] <= 1.35 * (figures["weights"] + figures["kv"]), figures  # before logits of many rows
        # The margin is room for what cannot be counted, and need not be filled.
        if figures["grown"] >= 0.98 * (figures["planned"] - figures["margin"]):
            return
    pytest.fail(f"less is resident than planned: {all_figures}")


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3"])
@pytest.mark.parametrize("tokens", [63, 64, 65])
def test_a_context_length_is_served_to_all_at_once_where_it_is_guaranteed(name: str, tokens: int) -> None:
    runner = Runner(
        text_model(name), pa_ctxt_len=tokens, pa_blk_size=8, max_seqs=3, max_num_batched_tokens=32, guaranteed=True, num_threads=1
    )
    assert runner.max_sequence_length() == tokens
    plan = runner.memory_ledger()
    assert plan.guaranteed
    assert plan.num_requests_that_fit(tokens) >= 3

    def serve(index: int) -> None:
        prompt = [10 + index] * 20
        response = complete(runner, prompt, max_tokens=tokens - len(prompt))
        assert response.usage.total_tokens == tokens
        with pytest.raises(MistralPagedError):
            complete(runner, [10] * (tokens + 1), max_tokens=1)

    in_threads(serve, 3)
    assert wait_until_idle(runner)["preemptions"] == 0


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3"])
@pytest.mark.parametrize("tokens", [31, 32, 33])
def test_a_context_length_is_served_to_one(name: str, tokens: int) -> None:
    runner = Runner(text_model(name), pa_ctxt_len=tokens, pa_blk_size=8, max_num_batched_tokens=16, num_threads=1)
    response = complete(runner, [5] * 10, max_tokens=tokens - 10)
    assert response.usage.total_tokens == tokens


def test_a_context_that_does_not_fit_is_refused_with_one_that_does() -> None:
    which = text_model("llama")
    with pytest.raises(MistralPagedError, match="would fit") as refused:
        Runner.memory_plan(which, pa_ctxt_len=10**7, devices=[8])
    fitting = int(str(refused.value).split("1 x ")[2].split()[0])
    assert Runner.memory_plan(which, pa_ctxt_len=fitting, devices=[8]).servable_tokens > 0
    with pytest.raises(MistralPagedError, match="would fit"):
        Runner.memory_plan(which, pa_ctxt_len=fitting + 1, devices=[8])


def llama_3_8b(folder: Path) -> Which:
    config = {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return Which.Plain(str(folder))


def test_seven_requests_of_llama_3_8b_fit_a_card_of_24_gb(tmp_path: Path) -> None:
    which = llama_3_8b(tmp_path)
    plan = Runner.memory_plan(which, max_seqs=7, guaranteed=True, pa_gpu_mem_usage=0.95, devices=[24 * 1024])
    assert plan.num_requests_that_fit(8192) == 7
    with pytest.raises(MistralPagedError, match="7 x 8192 tokens would fit"):
        Runner.memory_plan(which, max_seqs=8, guaranteed=True, pa_gpu_mem_usage=0.95, devices=[24 * 1024])
    halves = Runner.memory_plan(which, pa_ctxt_len=8192, devices=[12 * 1024, 12 * 1024])
    first, last = (device["kv_cache_bytes"] for device in halves.devices)
    assert first == last == halves.kv_cache_bytes // 2


def test_snapshots_are_planned_where_there_is_a_prefix_cache() -> None:
    which = text_model("lfm2")
    for prefix_cache_n in (0, 16):
        options = {"pa_ctxt_len": 256, "max_seqs": 2, "prefix_cache_n": prefix_cache_n, "num_threads": 1}
        plan = Runner.memory_plan(which, **options)
        assert plan.state_snapshots_bytes == Runner(which, **options).memory_ledger().state_snapshots_bytes
        assert (plan.state_snapshots_bytes > 0) == (prefix_cache_n > 0)


@pytest.mark.parametrize("name", ["mistral-window", "gemma3"])
def test_windowed_layers_hold_their_windows_alone(name: str) -> None:
    config = json.loads((GOLDEN / "text" / name / "config.json").read_text())
    window = config["sliding_window"]
    size, chunk, tokens = 8, 16, 16 * window - 40
    runner = Runner(
        text_model(name), pa_blk_size=size, max_num_batched_tokens=chunk, pa_ctxt_len=tokens + 40, num_threads=1, prefix_cache_n=1
    )
    plan = runner.memory_ledger()
    whole = -(-(tokens + 40) // size)
    most = sum(
        whole if group["window"] is None else min(whole, -(-(window - 1) // size) + -(-(chunk + size - 1) // size))
        for group in plan.groups
    )
    prompt = [3 + i % 200 for i in range(tokens)]
    answer = [token for token, _ in generate(runner, prompt, 40)]
    # Full layers keep all; windowed ones their windows, so that this pool is enough, which has no block more.
    full = sum(whole for group in plan.groups if group["window"] is None)
    assert full < runner.kv_cache_stats()["peak_blocks_used"] <= most == plan.num_blocks < whole * len(plan.groups)
    # The next turn needs the last window of windowed layers, although they never had all tokens before it.
    before = runner.kv_cache_stats()["prefix_hit_tokens"]
    complete(runner, [*prompt, *answer[:-1], 7], max_tokens=1)
    assert runner.kv_cache_stats()["prefix_hit_tokens"] - before >= tokens + 39 - size
