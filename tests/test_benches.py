"""The benchmark and its report run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN

from mistral_paged import ChatCompletionRequest, Runner, Which

BENCHES = Path(__file__).parent.parent / "benches"
sys.path.insert(0, str(BENCHES))
from model_bytes import heads_of  # noqa: E402
from records import Run  # noqa: E402

MODEL = GOLDEN / "gguf" / "llama.gguf"


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHES / script), *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    roofline = folder / "roofline"
    roofline.write_text("""#!/bin/sh\necho '{"best_gb_per_s": 2.1, "buffer_bytes": 1000}'\n""")
    roofline.chmod(0o700)
    run("throughput.py", "--quick", "--model", str(MODEL), "--roofline", str(roofline), "--output", str(folder / "records.jsonl"))
    return folder / "records.jsonl"


def write(path: Path, *entries: dict[str, Any]) -> Path:
    """Records as a run leaves them, of a model of 1 MB of weights whose tokens take 1 kB of KV."""
    machine = {"cpu": "a processor", "cpus": 2, "extensions": ["avx2"], "cache_kib": 1024, "memory_bytes": 1 << 30}
    machine |= {"system": "Linux", "python": "3.12", "date": "2026-01-02", "commit": "0123456789", "load": 0.0}
    model = {"name": "a.gguf", "file_bytes": 1_000_000, "weight_bytes": 1_000_000, "kv_bytes_per_token": 1000}
    model |= {"expert_bytes": 0, "expert_share": 1.0, "layer_parameters": 2_000_000, "attention_flop_per_pair": 100}
    lines = [{"record": "machine", **machine}, {"record": "model", **model}, *entries]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def samples(measure: str, values: dict[int, list[float]], engine: str = "mistral_paged") -> list[dict[str, Any]]:
    return [
        {"record": "sample", "engine": engine, "measure": measure, "at": at, "value": value}
        for at, some in values.items()
        for value in some
    ]


def report(folder: Path, *records: Path) -> str:
    pytest.importorskip("matplotlib", reason="the report needs `pip install matplotlib`")
    run("report.py", *map(str, records), "--output", str(folder), "--criterion", str(folder))
    assert (folder / "benchmarks.png").read_bytes().startswith(b"\x89PNG")
    return (folder / "benchmarks.md").read_text()


def test_what_a_token_reads_of_experts_latent_attention_and_hybrids() -> None:
    sizes = {"block_count": 3, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2}

    def heads(**more: Any) -> Any:
        named = {key.replace("__", "."): value for key, value in more.items()}
        return heads_of({"general.architecture": "a"} | {f"a.{key}": value for key, value in (sizes | named).items()})

    dense = heads()
    assert (dense.kv_values, dense.flop_per_pair) == (3 * 2 * (16 + 16), 3 * 4 * 4 * 16)
    assert heads(attention__head_count_kv=[0, 2, 0]).kv_values == 2 * (16 + 16)
    latent = {"attention__head_count_kv": 1, "attention__key_length": 24, "attention__value_length": 16}
    assert heads(**latent, attention__kv_lora_rank=16).kv_values == 3 * 24
    mixture = heads(expert_count=8, expert_used_count=2)
    assert (mixture.experts_used, mixture.experts) == (2, 8)
    model = {"weight_bytes": 100, "expert_bytes": 80, "expert_share": 2 / 8, "kv_bytes_per_token": 1}
    run = Run(machine={}, model=model)
    assert run.bytes_read(0) == 20 + 80 / 4
    assert run.bytes_read(10, 2) == 20 + 80 * (1 - 0.75**2) + 2 * 10


def test_throughput_measures_everything(records: Path) -> None:
    entries = [json.loads(line) for line in records.read_text().splitlines()]
    model = next(entry for entry in entries if entry["record"] == "model")
    assert 0 < model["weight_bytes"] < model["file_bytes"] == MODEL.stat().st_size
    found = {(entry["measure"], entry["at"]): entry["value"] for entry in entries if entry["record"] == "sample"}
    expected = {
        ("load", 0),
        ("used_resident", 0),
        ("decode", 1),
        ("answer", 1),
        ("batch", 1),
        ("batch", 4),
        ("context_of_1", 256),
    }
    expected |= {("prefill_context", 128), ("context_of_8", 128), ("mixed_chunk", 50), ("mixed_prompt_s", 50)}
    assert expected <= set(found)
    # What a model of 250 kB adds to the resident bytes is less than the system counts them by.
    assert all(found[key] > 0 for key in expected - {("used_resident", 0)}), found
    assert found["mixed_chunk", 50] <= 64


def test_report_holds_what_was_measured(records: Path, tmp_path: Path) -> None:
    text = report(tmp_path, records)
    entries = [json.loads(line) for line in records.read_text().splitlines()]
    decode = next(entry for entry in entries if entry.get("measure") == "decode")
    row = re.search(r"\| llama.gguf \| .*", text)
    assert row is not None
    assert f"| {decode['value']:,.0f} (" in row[0]
    bytes_a_token = 251648 + decode["context"] * 384
    assert f"| {decode['value'] * bytes_a_token / 1e9:.1f} | 2.1 | {decode['value'] * bytes_a_token / 2.1e9:.0%} |" in row[0]
    assert entries[0]["commit"] in text
    assert "times the best peer" not in text


def test_a_prompt_is_counted_in_operations(tmp_path: Path) -> None:
    records = write(tmp_path / "records", *samples("decode", {1: [5.0]}), *samples("prefill", {1000: [4e5]}))
    records.write_text(records.read_text().replace('"value": 5.0', '"value": 5.0, "context": 100'))
    # 2 x 2e6 x 1000 of the matrices and 100 x 1000 x 1001 / 2 of attention, in 2.5 ms.
    flop = (4e9 + 5.005e7) / 2.5e-3 / 1e12
    text = report(tmp_path, records)
    assert f"| {flop:.2f} |" in text
    assert "of the tiles" not in text
    # The rate of products by tiles, where there is AMX.
    tiles = json.dumps(samples("tiles", {2: [4.0, 4.1, 4.2]}))[1:-1].replace("}, {", "}\n{")
    records.write_text(records.read_text() + tiles + "\n")
    assert f"| {flop:.2f} | {flop / 4.1:.0%} |" in report(tmp_path, records)


def test_the_largest_fall_is_told_and_missed(tmp_path: Path) -> None:
    batch = {1: [100.0, 90.0, 500.0], 2: [200.0] * 3, 3: [190.0, 1.0, 191.0], 4: [189.0] * 3}
    text = report(tmp_path, write(tmp_path / "records", *samples("batch", batch)))
    assert "The largest fall is 5.0%, from 2 to 3." in text
    assert "| 3 | 190 (1.0 to 191) | 1.90 | -5.0% |" in text
    assert re.search(r"largest fall .* at most 3.0% \| 5.0% \| \*\*no\*\* \|", text)


def test_attention_is_what_a_longer_context_adds(tmp_path: Path) -> None:
    # Eight sequences: 4 ms a step, then 60 ms with 8 x 7000 tokens more, which are 56 MB.
    contexts = samples("context_of_8", {1000: [2000.0], 8000: [8 / 60e-3]})
    text = report(tmp_path, write(tmp_path / "records", *contexts, *samples("roof_contexts", {1: [21.0]})))
    assert "| 8,000 | 133 (133 to 133) | 1.1 | 5% | 1.0 | 5% |" in text


def test_a_pause_is_held_against_its_latency(tmp_path: Path) -> None:
    mixed = {"mixed_alone_ms": 1.0, "mixed_pause_ms": 60.0, "mixed_chunk": 128.0, "mixed_prompt_s": 0.5}
    measured = [sample for measure, value in mixed.items() for sample in samples(measure, {50: [value], 250: [value]})]
    text = report(tmp_path, write(tmp_path / "records", *measured))
    assert "at most 50 | 60 | **no** |" in text
    assert "at most 250 | 60 | yes |" in text


def test_a_race_is_told_against_the_best_peer(tmp_path: Path) -> None:
    engines = {"mistral_paged": [30.0, 60.0, 50.0], "llamacpp": [3.0], "openvino": [20.0, 25.0, 26.0]}
    entries = [{"record": "engine", "engine": engine, "version": "1"} for engine in engines]
    entries.append({"record": "dropped", "engine": "mistralrs", "reason": "cannot\nload at /a/b/c.cpp:1"})
    for engine, values in engines.items():
        entries += samples("answer", {1: values}, engine)
    race = write(tmp_path / "race", *entries)
    text = report(tmp_path, write(tmp_path / "records", *samples("batch", {1: [1.0]})), race)
    assert "| one stream | 50.0 | (3.0) | 25.0 | 2.00 |" in text
    assert "- mistralrs drops out: cannot load at c.cpp:1\n" in text


def test_notes_are_kept(tmp_path: Path) -> None:
    (tmp_path / "benchmarks.md").write_text("# Old\n\n## Notes\n\nA reason.\n")
    text = report(tmp_path, write(tmp_path / "records", *samples("batch", {1: [1.0]})))
    assert "# Old" not in text
    assert text.endswith("## Notes\n\nA reason.\n")


def test_a_race_runs_and_tells_who_cannot_load(tmp_path: Path) -> None:
    output = tmp_path / "race.jsonl"
    options = ["--engines", "mistral_paged", "--rounds", "1", "--new", "4", "--sentences", "2", "--streams", "1,2"]
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(MODEL.read_bytes()[:-1000])
    for model in (MODEL, damaged):
        run("peers.py", "--model", str(model), "--output", str(output), *options)
    entries = [json.loads(line) for line in output.read_text().splitlines()]
    measured = {(entry["measure"], entry["at"]) for entry in entries if entry["record"] == "sample"}
    assert {("answer", 1), ("streams", 2)} <= measured
    dropped = [entry for entry in entries if entry["record"] == "dropped"]
    assert [entry["engine"] for entry in dropped] == ["mistral_paged"]
    assert "damaged.gguf" in dropped[0]["reason"]


def test_the_default_model_becomes_a_folder(tmp_path: Path, smollm2_path: Path) -> None:
    for package in ("gguf", "ml_dtypes", "safetensors"):
        pytest.importorskip(package, reason="the maker of models needs `pip install gguf ml_dtypes safetensors`")
    made = Path(run("models.py", "folder", "--models", str(tmp_path)).strip())
    folder, file = (Runner(which=which, pa_gpu_mem=256) for which in (Which.Plain(str(made)), Which.GGUF(str(smollm2_path))))
    for text in ("In 1969, l'été <|im_end|>", "  two  spaces\n\n\tand 日本語"):
        assert folder.tokenize_text(text) == file.tokenize_text(text)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    request = ChatCompletionRequest(question, "default", max_tokens=8, temperature=0.0)
    assert "Paris" in folder.send_chat_completion_request(request).choices[0].message.content


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


def test_report_tells_what_a_step_costs(records: Path, tmp_path: Path) -> None:
    interval = '{"lower_bound": 2000.0, "upper_bound": 4000.0}'
    for name, elements in (("pool/free", 1000), ("step without kernels/1", 0.01)):
        measured = tmp_path / name / "new"
        measured.mkdir(parents=True)
        (measured / "benchmark.json").write_text(json.dumps({"full_id": name, "throughput": {"Elements": elements}}))
        estimates = f'{{"median": {{"point_estimate": 3000.0, "confidence_interval": {interval}}}}}'
        (measured / "estimates.json").write_text(estimates)
    text = report(tmp_path, records)
    assert "| pool/free | 3 µs | 2 µs | 4 µs | 3 ns |" in text
    assert "| step without kernels/1, µs | at most 60.0 | 300.0 | **no** |" in text
