"""SmolLM2-135M-Instruct (Q4_1) and gemma-3-270m (Q4_K_M) with quantized kernels."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
from conftest import GOLDEN, complete, golden, score

from mistral_paged import ChatCompletionRequest, DeviceError, Runner, Which

# Tokens that are scored with each instruction set: all, but for the portable code, which is slow.
ISAS = {"scalar": 128, "avx2": 768, "avx512": 768, "amx": 768}


def on_isa(path: Path, isa: str) -> tuple[Runner, str]:
    """A runner with the kernels of an instruction set, and its name; skips what this machine has not."""
    try:
        return Runner(which=Which.GGUF(str(path)), pa_gpu_mem=256, cpu_tier=isa), isa
    except DeviceError as error:
        pytest.skip(str(error))


# Plain code takes minutes, and is what the others are compared with in Rust.
TIERS = [pytest.param(isa, marks=[pytest.mark.long] if isa == "scalar" else []) for isa in ISAS]


@pytest.fixture(scope="module", params=TIERS)
def smollm2_on_isa(request: pytest.FixtureRequest, smollm2_path: Path) -> tuple[Runner, str]:
    return on_isa(smollm2_path, request.param)


@pytest.fixture(scope="module", params=TIERS)
def gemma3_on_isa(request: pytest.FixtureRequest, gemma3_path: Path) -> tuple[Runner, str]:
    return on_isa(gemma3_path, request.param)


@pytest.fixture(scope="session")
def gemma3(gemma3_path: Path) -> Runner:
    return Runner(which=Which.GGUF(str(gemma3_path)), pa_gpu_mem=512)


# By tiles of 16-bit floats, and where few rows are multiplied, by activations of 15 bits.
PRECISE = {"amx": (0.005, 0.985)}


def check_perplexity(runner: Runner, name: str, isa: str, count: int) -> list[float]:
    """The tokens' log probabilities."""
    off, agreeing = PRECISE.get(isa, (0.01, 0.97))
    reference = golden(f"real/{name}")["perplexity"]
    scored = score(runner, reference["ids"][:count])
    nll, expected = [-token.logprob for token in scored[1:]], reference["nll"][: count - 1]
    assert math.exp(sum(nll) / len(nll)) == pytest.approx(math.exp(sum(expected) / len(expected)), rel=off)
    positions = list(zip(scored[1:], reference["argmax"], reference["argmax_margins"], strict=False))
    assert len(positions) == min(count, len(reference["ids"])) - 1
    agreed = [token.top_logprobs[0].token_id == argmax for token, argmax, _ in positions]
    assert sum(agreed) >= agreeing * len(agreed)
    assert all(same for same, (_, _, margin) in zip(agreed, positions, strict=True) if margin > 1.5)
    return [-value for value in nll]


def check_few_rows(path: Path, name: str, isa: str, of_many: list[float]) -> None:
    """With AMX few rows are multiplied by other kernels, which must not differ much."""
    if isa != "amx":
        return
    # Rows of a step, so that prompts are computed as answers are.
    runner = Runner(which=Which.GGUF(str(path)), pa_gpu_mem=256, cpu_tier=isa, max_num_batched_tokens=2)
    of_few = check_perplexity(runner, name, isa, len(of_many) + 1)
    differences = [abs(few - many) for few, many in zip(of_few, of_many, strict=True)]
    assert 0 < sum(differences) / len(differences) < 0.02


def check_tokens(runner: Runner, name: str) -> None:
    for case in json.loads((GOLDEN / "real" / name / "tokens.json").read_text()):
        assert runner.tokenize_text(case["text"], False) == case["ids"], case["text"]


PROMPTS = ["Once upon a time", "def sort(items):", "The capital of France is", "1, 2, 3, 4,", "Der Hund", "\n\n\n", "zqxj vkw"]


@pytest.mark.parametrize("model", ["smollm2", pytest.param("gemma3", marks=pytest.mark.long)])
def test_greedy_tokens_are_the_same_where_only_the_largest_logits_are_computed(
    model: str, request: pytest.FixtureRequest
) -> None:
    runner: Runner = request.getfixturevalue(model)
    for prompt in PROMPTS:
        # Log probabilities need all logits.
        all_logits = complete(runner, prompt, max_tokens=40, logprobs=0)
        assert complete(runner, prompt, max_tokens=40).choices[0].text == all_logits.choices[0].text, prompt


def test_smollm2_perplexity(smollm2_on_isa: tuple[Runner, str], smollm2_path: Path) -> None:
    runner, isa = smollm2_on_isa
    check_few_rows(smollm2_path, "smollm2", isa, check_perplexity(runner, "smollm2", isa, ISAS[isa]))


def test_smollm2_tokens(smollm2: Runner) -> None:
    check_tokens(smollm2, "smollm2")


def test_smollm2_chat_names_paris(smollm2_on_isa: tuple[Runner, str]) -> None:
    smollm2, _ = smollm2_on_isa
    chat = golden("real/smollm2")["chat"]
    assert smollm2.tokenize_text(chat["messages"]) == chat["prompt_ids"]
    response = smollm2.send_chat_completion_request(
        ChatCompletionRequest(chat["messages"], "default", max_tokens=32, temperature=0)
    )
    assert "Paris" in response.choices[0].message.content
    assert response.choices[0].finish_reason == "stop"


def test_smollm2_loads_in_two_seconds(smollm2_path: Path, smollm2: Runner) -> None:
    seconds = []
    for _ in range(3):  # the best of three: other programs of the machine slow a load down, and nothing speeds one up
        start = time.perf_counter()
        Runner(which=Which.GGUF(str(smollm2_path)), pa_gpu_mem=64)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 2.0


def test_gemma3_perplexity(gemma3_on_isa: tuple[Runner, str], gemma3_path: Path) -> None:
    runner, isa = gemma3_on_isa
    check_few_rows(gemma3_path, "gemma3", isa, check_perplexity(runner, "gemma3", isa, ISAS[isa]))


def test_gemma3_tokens(gemma3: Runner) -> None:
    check_tokens(gemma3, "gemma3")


def test_gemma3_has_no_chat_template(gemma3: Runner) -> None:
    with pytest.raises(ValueError, match="chat template"):
        gemma3.send_chat_completion_request(ChatCompletionRequest("Hello", "default"))
