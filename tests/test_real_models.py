"""SmolLM2-135M-Instruct (Q4_1) and gemma-3-270m (Q4_K_M) with quantised kernels."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
from conftest import GOLDEN, golden, score

from mistral_paged import ChatCompletionRequest, Runner, Which


@pytest.fixture(scope="session")
def gemma3(gemma3_path: Path) -> Runner:
    return Runner(which=Which.GGUF(str(gemma3_path)), pa_gpu_mem=512)


def check_perplexity(runner: Runner, name: str) -> None:
    reference = golden(f"real/{name}")["perplexity"]
    scored = score(runner, reference["ids"])
    nll = [-token.logprob for token in scored[1:]]
    assert math.exp(sum(nll) / len(nll)) == pytest.approx(reference["ppl"], rel=0.01)
    positions = list(zip(scored[1:], reference["argmax"], reference["argmax_margins"], strict=False))
    assert len(positions) == len(reference["ids"]) - 1
    agreed = [token.top_logprobs[0].token == argmax for token, argmax, _ in positions]
    assert sum(agreed) >= 0.97 * len(agreed)
    assert all(same for same, (_, _, margin) in zip(agreed, positions, strict=True) if margin > 1.5)


def check_tokens(runner: Runner, name: str) -> None:
    for case in json.loads((GOLDEN / "real" / name / "tokens.json").read_text()):
        assert runner.tokenize_text(case["text"], False) == case["ids"], case["text"]


def test_smollm2_perplexity(smollm2: Runner) -> None:
    check_perplexity(smollm2, "smollm2")


def test_smollm2_tokens(smollm2: Runner) -> None:
    check_tokens(smollm2, "smollm2")


def test_smollm2_chat_names_paris(smollm2: Runner) -> None:
    chat = golden("real/smollm2")["chat"]
    assert smollm2.tokenize_text(chat["messages"]) == chat["prompt_ids"]
    response = smollm2.send_chat_completion_request(
        ChatCompletionRequest(chat["messages"], "default", max_tokens=32, temperature=0)
    )
    assert "Paris" in response.choices[0].message.content
    assert response.choices[0].finish_reason == "stop"


def test_smollm2_loads_in_two_seconds(smollm2_path: Path, smollm2: Runner) -> None:
    start = time.perf_counter()
    Runner(which=Which.GGUF(str(smollm2_path)), pa_gpu_mem=64)
    assert time.perf_counter() - start < 2.0


def test_gemma3_perplexity(gemma3: Runner) -> None:
    check_perplexity(gemma3, "gemma3")


def test_gemma3_tokens(gemma3: Runner) -> None:
    check_tokens(gemma3, "gemma3")


def test_gemma3_has_no_chat_template(gemma3: Runner) -> None:
    with pytest.raises(ValueError, match="chat template"):
        gemma3.send_chat_completion_request(ChatCompletionRequest("Hello", "default"))
