"""Planning and report of the benchmark on a GPU, with made-up times; none of them goes into docs/."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import generate

from mistral_paged import MistralPagedError, ModelDType, Runner, Which, _core

sys.path.insert(0, str(Path(__file__).parent.parent / "benches"))
import gpu
import gpu_model
import gpu_peers
import gpu_plan
import gpu_report
import gpu_steps

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
MIXTURE = {**TINY, "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
COPY = {"kind": "copy", "bytes": 1 << 30}
BANDWIDTH = 4e12


def works() -> list[gpu_plan.Work]:
    return [*gpu_plan.attention_works(70e9), *gpu_plan.linear_works()]


def test_every_property_of_the_goals_is_measured() -> None:
    attention = gpu_plan.attention_works(1e12)
    assert {work["batch"] for work in attention} == {1, 2, 4, 8, 16, 32, 64, 128, 256}
    assert {work["context"] for work in attention} == {512, 2048, 4096, 8192, 32768}
    assert {work["queries_per_kv"] for work in attention} == {1, 2, 4, 8, 16}
    assert {work["head_dim"] for work in attention} == {64, 80, 96, 112, 128, 192, 256}
    assert {work["cache"] for work in attention} == set(gpu_plan.ELEMENT_BYTES)
    assert {work["block_size"] for work in attention} == {8, 16, 32}
    keys = [json.dumps(work, sort_keys=True) for work in [*attention, *gpu_plan.linear_works()]]
    assert len(set(keys)) == len(keys), "nothing is measured twice"


def test_what_does_not_fit_is_left_out() -> None:
    most = max(gpu_plan.kv_bytes(work) for work in gpu_plan.attention_works(1e12))
    assert most == 2 * 256 * 32768 * 8 * 128 * 2
    assert all(gpu_plan.kv_bytes(work) <= 1e10 for work in gpu_plan.attention_works(1e10))


def test_bytes_are_those_that_have_to_move() -> None:
    work = {**gpu_plan.BASE, "batch": 2, "context": 100, "cache": "int8"}
    # A byte a value and a scale of two bytes a vector, of keys and values; queries and outputs in f32.
    assert gpu_plan.moved_bytes(work) == 2 * 2 * 100 * 8 * (128 + 2) + 2 * 2 * 64 * 128 * 4
    linear = {"kind": "linear", "out_features": 64, "in_features": 256, "rows": 3, "format": "Q4_K"}
    assert gpu_plan.moved_bytes(linear) == 64 * 144 + 4 * 3 * (64 + 256)
    assert gpu_plan.operations(linear) == 2 * 3 * 64 * 256
    # 7.50 billion weights without the embedding.
    assert gpu_plan.weight_bytes(gpu_plan.LLAMA_8B) == pytest.approx(2 * 7.505e9, rel=1e-3)


@pytest.mark.parametrize("config", [TINY, MIXTURE])
def test_a_model_of_random_weights_runs(config: dict[str, int], tmp_path: Path) -> None:
    gpu_model.write(tmp_path, config)
    header_bytes = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    parameters = sum(int(np.prod(shape)) for _, shape in gpu_model.shapes(config))
    assert (tmp_path / "model.safetensors").stat().st_size == 8 + header_bytes + 2 * parameters
    matrices = (shape for name, shape in gpu_model.shapes(config) if len(shape) == 2 and "embed" not in name)
    assert gpu_plan.weight_bytes(config) == 2 * sum(int(np.prod(shape)) for shape in matrices)
    runner = Runner(which=Which.Plain(str(tmp_path), dtype=ModelDType.F32), pa_ctxt_len=512, num_threads=1)
    logprobs = [logprob for _, logprob in generate(runner, [3, 900, 1023], 8)]
    assert len(set(logprobs)) > 1
    assert all(-20 < logprob < 0 for logprob in logprobs)
    assert gpu.decode(runner, batch=3, new=4) > 0


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    config = gpu_plan.QWEN3_30B_QUARTER
    assert [round(gpu_plan.experts_of(config, batch)) for batch in (1, 8, 64)] == [8, 52, 126]
    expert = 3 * 2 * config["hidden_size"] * config["moe_intermediate_size"]
    unread = gpu_plan.weight_bytes(config) - gpu_plan.weight_bytes(config, 1)
    assert unread == pytest.approx(config["num_hidden_layers"] * 120 * expert)


class Stranger:
    """Somebody's kernels, which do one kind of work."""

    name = "Other 1.0"
    asked = 0
    released = 0

    def seconds(self, work: gpu_plan.Work, runs: int) -> list[float]:
        self.asked += 1
        if work["kind"] != "linear":
            raise RuntimeError("no such kernel\nat line 1")
        return [1.0] * runs

    def release(self) -> None:
        self.released += 1


def test_what_others_cannot_do_is_told_once_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    peer = gpu_peers.Forgiving(Stranger())
    assert [peer.seconds(work, 1) for work in (gpu_plan.BASE, gpu_plan.SMALL, next(gpu_plan.linear_works()))] == [[], [], [1.0]]
    assert capsys.readouterr().out == "Other 1.0: no such kernel\n"


def test_memory_that_others_keep_is_given_back_after_each_work() -> None:
    stranger = Stranger()
    peer = gpu_peers.Forgiving(stranger)
    for work in (gpu_plan.BASE, next(gpu_plan.linear_works())):
        peer.seconds(work, 1)
    assert stranger.released == 2


class Full:
    """Kernels of ours on a card that is full for a while."""

    name = "mistral_paged"

    def seconds(self, work: gpu_plan.Work, runs: int) -> list[float]:
        if work["rows"] == 2:
            raise MistralPagedError("the GPU has 0 bytes free")
        return [1.0] * runs

    def release(self) -> None:
        pass


def test_what_does_not_fit_ends_its_record_and_not_the_run(tmp_path: Path) -> None:
    few = [work for work in gpu_plan.linear_works() if work["rows"] <= 4][:3]
    with (tmp_path / "records").open("w") as out:
        gpu.measure_kernels(gpu.Log(out), [Full()], few)
    records = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    assert [(record["record"], record["work"]["rows"]) for record in records] == [("work", 1), ("failed", 2), ("work", 4)]
    text = report(tmp_path, entry(few[0], 1e-5), records[1])
    assert "## Not measured" in text
    assert "the GPU has 0 bytes free" in text


def test_others_that_take_too_long_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    stranger = Stranger()
    peer = gpu_peers.Forgiving(stranger, allowed_seconds=0.0)
    assert peer.seconds(next(gpu_plan.linear_works()), 1) == []
    assert stranger.asked == 0
    assert "took too long" in capsys.readouterr().out


def test_without_a_gpu_the_reason_is_told() -> None:
    if _core.survey()["gpus"]:
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, gpu.__file__], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "cuda:0" in done.stderr
    assert "driver" in done.stderr


def write(path: Path, *entries: dict[str, Any]) -> Path:
    machine = {"record": "machine", "gpu": "a card", "multiprocessors": 100, "cpu": "a processor", "cpus": 16}
    machine |= {"system": "Linux", "python": "3.12", "date": "2026-01-02", "commit": "0123456789"}
    lines = [machine, entry(COPY, 2 * (1 << 30) / BANDWIDTH), *entries, {"record": "end", "seconds": 90.0}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def entry(work: gpu_plan.Work, seconds: float, engine: str = "mistral_paged") -> dict[str, Any]:
    return {"record": "work", "engine": engine, "work": work, "seconds": [9 * seconds, seconds, seconds / 9]}


def report(folder: Path, *entries: dict[str, Any]) -> str:
    pytest.importorskip("matplotlib", reason="the report needs `pip install matplotlib`")
    gpu_report.write_report(gpu_report.read(write(folder / "gpu.jsonl", *entries)), folder)
    assert (folder / "gpu.png").read_bytes().startswith(b"\x89PNG")
    return (folder / "gpu.md").read_text()


def test_shares_are_of_the_copy_that_was_measured(tmp_path: Path) -> None:
    made = [entry(work, gpu_plan.moved_bytes(work) / (0.5 * BANDWIDTH)) for work in works()]
    text = report(tmp_path, *made)
    assert "A copy moves 4.00 TB/s." in text
    assert "a card" in text
    assert "batch 32, 4,096 tokens, bf16 | at least 90% | 50% | **no** |" in text
    assert f"| {gpu_plan.moved_bytes(gpu_plan.BASE) / 2e12 * 1e6:,.1f} (50%) |" in text
    assert "PyTorch" not in text.split("## Decode attention")[1]


def test_goals_are_told_as_reached_by_what_was_measured(tmp_path: Path) -> None:
    base, small = gpu_plan.BASE, gpu_plan.SMALL
    text = report(tmp_path, entry(base, gpu_plan.moved_bytes(base) / (0.91 * BANDWIDTH)), entry(small, 7.9e-6))
    assert "batch 32, 4,096 tokens, bf16 | at least 90% | 91% | yes |" in text
    assert "at most 8 | 7.9 | yes |" in text
    assert "int8" not in text, "nothing is said of what was not measured"


def test_others_stand_beside_the_same_shape(tmp_path: Path) -> None:
    base, product = gpu_plan.BASE, next(gpu_plan.linear_works())
    made = [entry(base, 1e-4), entry(base, 2.5e-4, "Other 1.0"), entry(product, 3e-5), entry(product, 4e-5, "Other 1.0")]
    text = report(tmp_path, *made)
    assert f"blocks of 16 | 100.0 | {gpu_plan.moved_bytes(base) / 1e-4 / BANDWIDTH:.0%} | 250.0 |" in text
    assert "| 30.0 |" in text
    assert "| 40.0 |" in text


def test_a_model_is_compared_with_reading_all_of_it(tmp_path: Path) -> None:
    config = gpu_plan.LLAMA_8B
    speeds = {(1, False): 100.0, (1, True): 200.0, (32, False): 3000.0}
    made = [
        {
            "record": "model",
            "format": "BF16",
            "graphs": graphs,
            "batch": batch,
            "context": 80,
            "tokens_per_second": [speed],
            "config": config,
        }
        for (batch, graphs), speed in speeds.items()
    ]
    made.append({**made[1], "format": "Q4_K", "tokens_per_second": [720.0]})
    made.append({**made[1], "config": gpu_plan.QWEN3_30B_QUARTER, "tokens_per_second": [640.0]})
    text = report(tmp_path, *made)
    mixture = text.split("a quarter of Qwen3-30B-A3B's shape")[1]
    roof = BANDWIDTH / gpu_plan.step_bytes(gpu_plan.QWEN3_30B_QUARTER, 1, 80)
    assert f"| BF16 | 1 |  | 640 | {roof:,.0f} | {640 / roof:.0%} |" in mixture
    quantized = BANDWIDTH / (gpu_plan.weight_bytes(config) * 144 / 512 + 80 * 131072)
    assert f"| Q4_K | 1 |  | 720 | {quantized:,.0f} | {720 / quantized:.0%} |" in text
    assert f"Q4_K, batch 1, share of the roof | at least 75% | {720 / quantized:.0%} | yes |" in text
    roof = BANDWIDTH / (gpu_plan.weight_bytes(config) + 80 * 131072)
    assert f"| 1 | 100 | 200 | {roof:,.0f} | {200 / roof:.0%} |" in text
    assert "| 32 | 3,000 |  |" in text


def test_kernels_are_charged_from_the_end_of_the_one_before() -> None:
    def step(begin: float) -> list[gpu_steps.Launch]:
        # The product begins while the embedding is looked up, and waits for it.
        return [
            gpu_steps.Launch("embed_bf16", begin, begin + 4.0),
            gpu_steps.Launch("gemm_bf16_r8", begin + 1.0, begin + 14.0),
            gpu_steps.Launch("sample", begin + 5.0, begin + 16.0),
        ]

    prompt = [gpu_steps.Launch("embed_bf16", 0.0, 9.0), *[gpu_steps.Launch("matmul", 10.0 + i, 11.0 + i) for i in range(5)]]
    steps = gpu_steps.steps_of([*prompt, *step(100.0), *step(120.0), *step(140.0)])
    assert [launches[0].begin for launches in steps] == [100.0, 120.0]
    lines = gpu_steps.table(steps, [120.0, 140.0])
    assert lines[0] == "2 steps of 3 launches: 20 us each, 4 us of them idle"
    assert [line.split() for line in lines[1:]] == [
        ["gemm_bf16_r8", "1.0", "x", "10.00", "us", "=", "10.0", "us"],
        ["embed_bf16", "1.0", "x", "4.00", "us", "=", "4.0", "us"],
        ["sample", "1.0", "x", "2.00", "us", "=", "2.0", "us"],
    ]
