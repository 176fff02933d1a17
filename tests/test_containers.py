"""Older containers from Python and the command line. rust/engine/tests/golden_models.rs compares what their models compute."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN, complete, tokens
from test_server import COMMAND

from mistral_paged import InvalidArgumentError, ModelDType, ModelLoadError, Runner, Which

CONTAINERS = GOLDEN / "containers"
GGML = CONTAINERS / "ggml"


def golden(path: Path) -> dict[str, Any]:
    case: dict[str, Any] = json.loads(path.read_text())["completions"][1]
    return case


def answers(which: Which, path: Path) -> None:
    case = golden(path)
    with Runner(which=which, pa_gpu_mem=16, num_threads=1) as runner:
        response = complete(runner, case["prompt_ids"], max_tokens=16, temperature=0, ignore_eos=True, logprobs=0)
    assert [token.token_id for token in tokens(response)] == case["greedy_ids"][:16]


@pytest.mark.parametrize("name", ["llama-bin-sharded", "llama-meta"])
def test_a_folder_answers_as_its_golden(name: str) -> None:
    answers(Which.Plain(str(CONTAINERS / name), dtype=ModelDType.F32), CONTAINERS / name / "golden.json")


@pytest.mark.parametrize(("name", "gqa"), [("llama-q4_0", 1), ("llama-gqa2-f16", 2)])
def test_a_ggml_file_answers_as_its_golden(name: str, gqa: int) -> None:
    path = GGML / f"{name}.golden.json"
    answers(Which.GGML(str(GGML / f"{name}.bin"), gqa=gqa, dtype=ModelDType.F32), path)
    answers(Which.GGML(str(GGML), f"{name}.bin", gqa=gqa, dtype=ModelDType.F32), path)


def test_which_ggml_is_a_value() -> None:
    which = Which.GGML("folder", "model.bin", gqa=8)
    assert repr(which) == "Which.GGML(quantized_model_id='folder', quantized_filename='model.bin', gqa=8)"
    assert which == copy.copy(which) == pickle.loads(pickle.dumps(which))
    assert which != Which.GGML("folder", "model.bin")
    assert repr(Which.GGML("folder")) == "Which.GGML(quantized_model_id='folder')"


def test_what_a_ggml_file_cannot_be_is_refused() -> None:
    for which, words in (
        (Which.GGML(str(GGML)), "quantized_filename"),
        (Which.GGML(str(GGML), ["a", "b"]), "one file"),
        (Which.GGML(str(GGML / "llama-q4_0.bin"), gqa=3), "gqa is 3"),
        (Which.GGML(str(GOLDEN / "gguf" / "llama.gguf")), "none of GGML, GGMF and GGJT"),
        (Which.GGML(str(GGML), "typo.bin"), r"typo.bin.*llama-q4_0.bin"),
        (Which.GGUF(str(GGML / "llama-q4_0.bin")), "not a GGUF file"),
    ):
        with pytest.raises((InvalidArgumentError, ModelLoadError), match=words):
            Runner(which=which, pa_gpu_mem=16)


def test_gqa_is_checked_where_it_is_given() -> None:
    for value in (0, -1, 1 << 70):
        with pytest.raises(InvalidArgumentError, match="gqa"):
            Which.GGML("x", gqa=value)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(COMMAND), *arguments], capture_output=True, text=True, timeout=100, check=False)


def test_the_selector_ggml_and_its_newer_form(tmp_path: Path) -> None:
    file = str(GGML / "llama-gqa2-f16.bin")
    request = ["--max-tokens", "4", "-i", "Hello"]
    new = run("run", "-m", file, "--gqa", "2", "--chat-template", template(tmp_path), *request)
    assert new.returncode == 0, new.stderr
    wrong = run("run", "-m", file, "--gqa", "3", *request)
    assert wrong.returncode != 0
    assert "gqa is 3" in wrong.stderr
    alone = run("run", "-m", str(GOLDEN / "gguf" / "llama.gguf"), "--gqa", "2", *request)
    assert "--gqa goes with a GGML file" in alone.stderr


def template(folder: Path) -> str:
    """The path of a chat template, which old files do not have."""
    path = folder / "template.jinja"
    path.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    return str(path)


def test_memory_runs_on_metas_folder_inside_a_downloaded_one(tmp_path: Path) -> None:
    shutil.copytree(CONTAINERS / "llama-meta", tmp_path / "model" / "original")
    done = run("memory", "paged", "2", "-m", str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr
