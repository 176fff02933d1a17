"""Naive against paged: `mistral-paged memory`, as a process and as a function."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import AUTO, text_model
from test_cli import MODEL, run

from mistral_paged import Which, memory

CONTEXT = 512 * 384
"""Bytes of a whole context of the tiny model."""
NUMBER = r"\d+"
SHARE = r"\d+\.\d{3} GB \(\d+\.\d{2}%\)"


def tiny(mode: str, count: int, **options: Any) -> memory.Report:
    return memory.run(mode, count, text_model("llama", AUTO), num_threads=2, **options)


def output(batch: str) -> str:
    """What the command prints, as a pattern."""
    return "\n".join(
        [
            "KV budget: 1 MB, blocks of 16 tokens, 384 bytes a token",
            f"Workload: {NUMBER} prompt tokens, {NUMBER} generated in {NUMBER} steps",
            f"Preemptions: {NUMBER}",
            f"Batch size reached: {batch}",
            "-" * 50,
            f"Fragmented Memory: {SHARE} of the KV memory that requests held",
            f"Fragmented Memory: {SHARE} of the KV budget",
            "",
        ]
    )


def test_naive_stops_where_one_more_does_not_fit() -> None:
    done = run("memory", "naive", "9", "--kv-mb", "1", "-m", MODEL)
    assert done.returncode == 1
    assert re.fullmatch(output("5"), done.stdout), done.stdout
    assert done.stderr == (
        "error: out of memory: 9 requests reserve 1.7 MB, 0.2 MB each for a context of 512 tokens, and the KV budget is 1 MB: "
        "5 fit, 6 do not\n"
    )


def test_naive_runs_what_fits() -> None:
    done = run("memory", "naive", "5", "--kv-mb", "1", "-m", MODEL)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(output("5"), done.stdout), done.stdout


def test_paged_goes_on() -> None:
    done = run("memory", "paged", "9", "--kv-mb", "1", "-m", MODEL)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(output("[6-9]"), done.stdout), done.stdout


def test_json_has_the_report_and_the_memory_over_time() -> None:
    done = run("memory", "naive", "3", "--kv-mb", "1", "--blk-size", "32", "--json", "--model", MODEL)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    timeline = report["timeline"]
    assert (report["batch_size"], report["block_size"], report["out_of_memory"]) == (3, 32, False)
    assert report["peak_held_bytes"] == 3 * CONTEXT
    assert max(sample["held_bytes"] for sample in timeline) <= 3 * CONTEXT
    assert all(sample["live_bytes"] <= sample["held_bytes"] for sample in timeline)
    steps = [sample["step"] for sample in timeline]
    assert steps == sorted(set(steps))
    assert steps[-1] == report["steps"]
    weights = [step - before for step, before in zip(steps, [0, *steps], strict=False)]
    mean = sum(sample["held_bytes"] * weight for sample, weight in zip(timeline, weights, strict=True)) / steps[-1]
    assert mean == pytest.approx(report["held_bytes"])


def test_shares_are_of_what_is_held_and_of_the_budget() -> None:
    report = tiny("naive", 2, kv_mb=1)
    assert 0 < report.live_bytes < report.held_bytes <= 2 * CONTEXT
    assert report.fragmented_bytes == report.held_bytes - report.live_bytes
    assert report.fragmented_share_of_held == report.fragmented_bytes / report.held_bytes
    assert report.fragmented_share_of_budget == report.fragmented_bytes / 2**20


def test_paged_wastes_less_than_a_block_a_request() -> None:
    report = tiny("paged", 6, kv_mb=8)
    assert report.preemptions == 0
    assert all(sample.held_bytes - sample.live_bytes < 6 * report.block_size * report.token_bytes for sample in report.timeline)


def test_a_pool_that_is_too_small_for_all_preempts_and_still_answers_in_full() -> None:
    small, large = tiny("paged", 30, kv_mb=1), tiny("paged", 30, kv_mb=64)
    assert small.preemptions > 0
    assert large.preemptions == 0
    assert small.generated_tokens == large.generated_tokens > 0


@pytest.mark.timeout(300)
@pytest.mark.long
@pytest.mark.parametrize("block_size", [16, 32])
def test_paged_runs_six_times_as_many_of_the_default_model(smollm2_path: Path, block_size: int) -> None:
    which = Which.GGUF(str(smollm2_path))
    naive, paged = (memory.run(mode, 7, which, kv_mb=190, block_size=block_size) for mode in memory.MODES)
    assert (naive.batch_size, naive.out_of_memory) == (1, True)
    assert paged.preemptions == 0
    assert paged.batch_size >= 6 * naive.batch_size
    assert naive.fragmented_share_of_held > 0.9
    assert paged.fragmented_share_of_held < 0.1


@pytest.mark.parametrize("count", [0, -1, 100])
def test_the_number_of_requests_is_that_of_conversations(count: int) -> None:
    with pytest.raises(ValueError, match=rf"{count} requests were asked for and there are 99 conversations: ask for 1 to 99"):
        tiny("paged", count)
    assert len(memory.conversations(99)) == 99


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of naive, paged"):
        tiny("greedy", 1)


def test_a_budget_too_small_for_one_context_is_refused_with_the_one_that_does(smollm2_path: Path) -> None:
    which = Which.GGUF(str(smollm2_path))
    with pytest.raises(ValueError, match=r"context of 8192 tokens .* holds [0-9]+: give it at least 180 MB"):
        memory.run("naive", 1, which, kv_mb=179)
    assert memory.run("naive", 1, which, kv_mb=180).batch_size == 1


def test_a_budget_too_small_for_one_request_is_refused_with_the_one_that_does(smollm2_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the longest request has 3885 tokens and .* holds 1360: give it at least 86 MB"):
        memory.run("paged", 99, Which.GGUF(str(smollm2_path)), kv_mb=30)
