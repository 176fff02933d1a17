"""Quantized GGUF files, and importance matrices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import AUTO, F32, GOLDEN, generate, gguf_model, golden, text_model

from mistral_paged import Runner, Which, cli, quantize

LLAMA = str(GOLDEN / "text" / "llama")
IMATRIX = str(GOLDEN / "imatrix" / "imatrix.dat")


def greedy(which: Which, **options: str) -> list[int]:
    prompt = golden("text/llama")["completions"][1]["prompt_ids"]
    return [token for token, _ in generate(Runner(which=which, pa_gpu_mem=16, **options), prompt, 24)]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "phi3"])
def test_a_file_answers_as_in_situ_quantization_of_its_folder_does(name: str, tmp_path: Path) -> None:
    output = tmp_path / "model.gguf"
    types = quantize(text_model(name, AUTO), "Q4K", output)
    assert {"F32", "Q5_0", "Q8_0"} == set(types)
    assert greedy(Which.GGUF(str(output), dtype=F32)) == greedy(text_model(name), in_situ_quant="Q4K")


def test_a_file_of_a_file(tmp_path: Path) -> None:
    output = tmp_path / "model.gguf"
    done: list[tuple[int, int]] = []
    quantize(gguf_model("mistral", AUTO), "8", output, num_threads=1, progress=lambda *step: done.append(step))
    assert greedy(Which.GGUF(str(output), dtype=F32)) == greedy(gguf_model("mistral"), in_situ_quant="8")
    assert done == sorted(done)
    assert done[-1][0] > 0.9 * done[-1][1]


def test_the_command_writes_a_file_and_says_what_is_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "model.gguf"
    command = ["quantize", "-m", LLAMA, "--type", "Q4_0", "-o", str(output)]
    assert cli.main(command) == 0
    assert f"{output}: 0.1 MB; tensors: 7 F32, 21 Q4_0, 2 Q8_0" in capsys.readouterr().out
    assert cli.main(command) == 1
    assert "model.gguf exists" in capsys.readouterr().err
    assert cli.main([*command, "--force", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == {"file": str(output), "bytes": output.stat().st_size, "tensors": {"F32": 7, "Q4_0": 21, "Q8_0": 2}}


def test_what_cannot_be_quantized_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "model.gguf"
    with pytest.raises(ValueError, match=r'type is "Q9"; use 2, 3'):
        quantize(text_model("llama", AUTO), "Q9", output)
    with pytest.raises(NotImplementedError, match="architecture qwen2_vl"):
        quantize(Which.Plain(str(GOLDEN / "vision" / "qwen2_vl")), "8", output)
    with pytest.raises(ValueError, match="`which` has adapters"):
        quantize(Which.Lora(LLAMA), "8", output)
    with pytest.raises(ValueError, match="`dtype` is a type to compute in"):
        quantize(text_model("llama"), "8", output)
    with pytest.raises(ValueError, match="keeps the tokenizer that it has"):
        quantize(Which.GGUF(str(GOLDEN / "gguf" / "llama.gguf"), tok_model_id=LLAMA), "8", output)
    with pytest.raises(ValueError, match="`num_threads` must be"):
        quantize(text_model("llama", AUTO), "8", output, num_threads=0)
    assert cli.main(["quantize", "--type", "8", "-o", str(output)]) == 1
    assert "quantised already" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "nothing is quantized"),
        ({"in_situ_quant": "8"}, "Q8_0\\) is quantized without importance"),
        ({"in_situ_quant": "Q4K"}, "multiple of 256 columns"),
    ],
)
def test_an_importance_matrix_without_use_is_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Runner(which=Which.Plain(LLAMA, imatrix=IMATRIX), pa_gpu_mem=16, **options)


@pytest.mark.parametrize(
    ("options", "words"), [({}, "nothing is quantized"), ({"in_situ_quant": "Q4K"}, "multiple of 256 columns")]
)
def test_a_text_to_calibrate_by_without_use_is_refused(options: dict[str, str], words: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("word " * 500)
    for load in (Runner, Runner.memory_plan):
        with pytest.raises(ValueError, match=f"calibration_file is .*{words}"):
            load(which=Which.Plain(LLAMA, calibration_file=str(text)), pa_gpu_mem=16, **options)
    with pytest.raises(ValueError, match="leave out one of the two"):
        Runner(which=Which.Plain(LLAMA, calibration_file=str(text), imatrix=IMATRIX), in_situ_quant="Q4K")
    command = ["quantize", "-m", LLAMA, "--type", "Q4K", "-o", str(tmp_path / "out.gguf"), "--calibration-file", str(text)]
    assert cli.main(command) == 1


def test_an_importance_matrix_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.dat"
    broken.write_bytes(b"no matrix of importance")
    for path in (broken, tmp_path / "absent.dat", Path(LLAMA)):
        with pytest.raises(ValueError, match=f"importance matrix .*{path.name}"):
            Runner(which=Which.Plain(LLAMA, imatrix=str(path)), in_situ_quant="Q4K", pa_gpu_mem=16)
    assert cli.main(["run", "-m", LLAMA, "--isq", "Q4K", "--imatrix", str(broken), "-i", "Hi"]) == 1
    assert "broken.dat" in capsys.readouterr().err
