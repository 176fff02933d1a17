"""The benchmark and its report run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import GOLDEN

BENCHES = Path(__file__).parent.parent / "benches"
MODEL = GOLDEN / "gguf" / "llama.gguf"


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHES / script), *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "records.jsonl"
    run("throughput.py", "--quick", "--model", str(MODEL), "--output", str(path))
    return path


def test_throughput_measures_everything(records: Path) -> None:
    entries = [json.loads(line) for line in records.read_text().splitlines()]
    model = next(entry for entry in entries if entry["record"] == "model")
    assert 0 < model["weight_bytes"] < model["file_bytes"] == MODEL.stat().st_size
    samples = {(entry["measure"], entry["at"]): entry["value"] for entry in entries if entry["record"] == "sample"}
    expected = {("load", 0), ("decode", 1), ("answer", 1), ("streams", 1), ("streams", 2), ("streams", 4), ("context", 128)}
    assert expected <= set(samples)
    assert "prefill" in {measure for measure, _ in samples}
    assert all(samples[key] > 0 for key in expected)


def test_report_holds_what_was_measured(records: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the report needs `pip install matplotlib`")
    roof = tmp_path / "roof.jsonl"
    roof.write_text('{"gb_per_s": 20.0, "best_gb_per_s": 21.0, "threads": 2, "buffer_bytes": 1000000000, "tier": "avx2"}\n')
    run("report.py", str(records), str(roof), "--output", str(tmp_path))
    assert (tmp_path / "benchmarks.png").read_bytes().startswith(b"\x89PNG")
    report = (tmp_path / "benchmarks.md").read_text()
    entries = [json.loads(line) for line in records.read_text().splitlines()]
    decode = next(entry for entry in entries if entry.get("measure") == "decode")
    row = re.search(r"\| decode of one stream.*", report)
    assert row is not None
    assert f"| {decode['value']:,.0f} (" in row[0]
    bytes_a_token = 251648 + decode["context"] * 384
    assert f"| {decode['value'] * bytes_a_token / 21e9:.0%} |" in row[0]
    assert entries[0]["commit"] in report
    assert "peer" not in report.split("## llama.gguf")[1]


def test_the_allocators_are_simulated_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the pictures need `pip install mistral-paged[plot]`")
    run("allocators.py", "--requests", "600", "--output", str(tmp_path))
    assert (tmp_path / "allocators.png").read_bytes().startswith(b"\x89PNG")
    written = (tmp_path / "allocators.md").read_text()
    assert re.search(r"\| Paged \| 9\d\.\d \|", written)
    assert "600 requests" in written


def test_naive_and_paged_are_drawn_and_told(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the pictures need `pip install matplotlib`")
    for mode in ("naive", "paged"):
        command = ["memory", mode, "7", "--kv-mb", "1", "--json", "-m", str(GOLDEN / "text" / "llama")]
        done = subprocess.run(
            [sys.executable, "-m", "mistral_paged.cli", *command], capture_output=True, text=True, timeout=100, check=False
        )
        (tmp_path / mode).write_text(done.stdout)
    run("naive_and_paged.py", str(tmp_path / "naive"), str(tmp_path / "paged"), "--output", str(tmp_path))
    for picture in ("memory.png", "memory_over_time.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "naive").read_text())
    text = (tmp_path / "memory.md").read_text()
    assert "5 fit, 6 do not" in text
    assert f"| {report['fragmented_share_of_held']:.2%} | {report['fragmented_share_of_budget']:.2%} |" in text


def test_a_prefix_hit_is_measured_against_the_same_prompt_computed() -> None:
    printed = run("prefix_hit.py", "--model", str(MODEL), "--shared", "256", "--rounds", "1", "--vocabulary", "400")
    assert re.search(r"cold [\d.]+ ms\nwith 256 of them cached: [\d.]+ ms\n[\d.]+ times faster", printed), printed


def test_report_tells_what_the_books_cost(records: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the report needs `pip install matplotlib`")
    measured = tmp_path / "pool" / "free" / "new"
    measured.mkdir(parents=True)
    (measured / "benchmark.json").write_text('{"full_id": "pool/free", "throughput": {"Elements": 1000}}')
    interval = '{"lower_bound": 2000.0, "upper_bound": 4000.0}'
    (measured / "estimates.json").write_text(f'{{"median": {{"point_estimate": 3000.0, "confidence_interval": {interval}}}}}')
    run("report.py", str(records), "--output", str(tmp_path), "--criterion", str(tmp_path))
    assert "| pool/free | 3 µs | 2 µs | 4 µs | 3 ns |" in (tmp_path / "benchmarks.md").read_text()
