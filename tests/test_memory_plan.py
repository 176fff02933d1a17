"""What is planned before loading is what is resident; promised contexts are served; windows hold no more than windows."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import GOLDEN, complete, in_threads, text_model, wait_until_idle
from conftest import tokens as response_tokens

from mistral_paged import MistralPagedError, Runner, Which

# What is resident, but for the clean pages of program files: which of them were read is the page cache's business.
RESIDENT = """
import json, re, sys
from mistral_paged import CompletionRequest, Runner, Which

def resident():
    total, field = 0, ""
    for line in open("/proc/self/smaps"):
        if mapping := re.match("[0-9a-f]+-[0-9a-f]+ (.*)", line):
            is_program = "/" in mapping[1] and not mapping[1].endswith((".gguf", ".safetensors"))
            field = "Private_Dirty:" if is_program else "Rss:"
        elif line.startswith(field):
            total += 1024 * int(line.split()[1])
    return total

def send(ids, **more):
    return runner.send_completion_request(CompletionRequest(ids, "default", ignore_eos=True, **more))
"""

# Runs a step of the most tokens, writes every block, and computes all rows of logits, in a process of its own. Prints the plan's
# figures and what the process has grown by since its imports.
MEASURE = (
    RESIDENT
    + """
path, tokens, max_seqs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
options = dict(max_num_batched_tokens=256, max_seqs=max_seqs, num_threads=2, pa_ctxt_len=tokens)
before = resident()
plan = Runner.memory_plan(Which.GGUF(path), **options)
runner = Runner(Which.GGUF(path), **options)
longest = min(plan.servable_tokens, runner.max_sequence_length()) - 1
send(list(range(1000, 1000 + longest)), max_tokens=1)
cached, served = runner.kv_cache_stats()["blocks_cached"], resident() - before
send(list(range(9000, 9200)), max_tokens=1, echo_prompt=True, logprobs=0)
if max_seqs > 2:
    send([1, 2, 3], max_tokens=2, n_choices=max_seqs - 4, logprobs=5, temperature=1.0)
print(json.dumps({
    "planned": plan.resident_bytes, "grown": resident() - before, "served": served, "weights": plan.weights_bytes,
    "kv": plan.kv_cache_bytes, "cached": cached, "blocks": plan.num_blocks,
}))
"""
)


def measure(program: str, *arguments: object) -> dict[str, int]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("model", "max_seqs"), [("smollm2_path", 2), ("smollm2_path", 64), ("gemma3_path", 2)])
def test_resident_memory_is_what_was_planned(model: str, max_seqs: int, request: pytest.FixtureRequest) -> None:
    figures = measure(MEASURE, request.getfixturevalue(model), 2048, max_seqs)
    assert figures["cached"] == figures["blocks"]  # only a block that was written is found again
    assert figures["grown"] == pytest.approx(figures["planned"], rel=0.02), figures
    assert figures["served"] <= 1.35 * (figures["weights"] + figures["kv"]), figures  # before logits of many rows


LONG = (
    RESIDENT
    + """
path, tokens = sys.argv[1], int(sys.argv[2])
runner = Runner(Which.Plain(path), pa_ctxt_len=tokens, pa_blk_size=16, max_seqs=1, max_num_batched_tokens=64, num_threads=1)
send(list(range(10, 210)), max_tokens=1, echo_prompt=True, logprobs=0)
before, written = resident(), runner.kv_cache_stats()["blocks_cached"]
send([3 + i * i % 500 for i in range(tokens - 1)], max_tokens=1)
plan = runner.memory_ledger()
print(json.dumps({
    "grown": resident() - before, "kv": plan.kv_cache_bytes, "written": written * plan.bytes_per_block,
    "tables": plan.activations_bytes,
}))
"""
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "full_layers", "layers"), [("mistral-window", 0, 3), ("gemma3", 1, 7)])
def test_windowed_layers_take_little_memory_at_long_contexts(name: str, full_layers: int, layers: int, tmp_path: Path) -> None:
    tokens = 8192
    figures = {}
    for kind in ["windowed", "full"]:
        folder = tmp_path / kind
        shutil.copytree(GOLDEN / "text" / name, folder)
        config = json.loads((folder / "config.json").read_text())
        config["max_position_embeddings"] = tokens
        if kind == "full":
            config |= {"sliding_window": None} if name == "mistral-window" else {"layer_types": ["full_attention"] * layers}
        (folder / "config.json").write_text(json.dumps(config))
        figures[kind] = measure(LONG, folder, tokens)
    windowed, full = figures["windowed"], figures["full"]
    # A window and a step are 2 % of this context.
    assert windowed["kv"] == pytest.approx(full["kv"] * full_layers / layers, abs=0.03 * full["kv"])
    saved = full["kv"] - windowed["kv"] - full["written"] + windowed["written"]
    assert full["grown"] - windowed["grown"] == pytest.approx(saved, rel=0.1), figures


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
    response = complete(runner, prompt, max_tokens=40, logprobs=0, keep=True)
    answer, held = [token.token_id for token in response_tokens(response)], runner.kv_cache_stats()["blocks_used"]
    response.choices[0].sequence.release()
    # Full layers keep all; windowed ones their windows, so that this pool is enough, which has no block more.
    full = sum(whole for group in plan.groups if group["window"] is None)
    assert full < held <= most == plan.num_blocks < whole * len(plan.groups)
    # The next turn needs the last window of windowed layers, although they never had all tokens before it.
    before = runner.kv_cache_stats()["prefix_hit_tokens"]
    complete(runner, [*prompt, *answer[:-1], 7], max_tokens=1)
    assert runner.kv_cache_stats()["prefix_hit_tokens"] - before >= tokens + 39 - size
