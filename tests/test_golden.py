"""Tiny models against outputs of the reference implementation, through the Python API."""

from __future__ import annotations

import math
from typing import Any

import pytest
from conftest import FAMILIES, GGUF, GOLDEN, TEXT, cases, generate, golden, runner_of, score, tokens

from mistral_paged import ChatCompletionRequest, CompletionRequest, ModelDType, Runner, Which

MODELS = [("text", name) for name in TEXT] + [("gguf", name) for name in GGUF]
LOGPROB = 2e-3
MARGIN = 5e-3


def models(ids: list[tuple[str, str]] = MODELS) -> Any:
    return pytest.mark.parametrize(("folder", "name"), ids, ids=[f"{folder}-{name}" for folder, name in ids])


def check_teacher_forced(runner: Runner, case: dict[str, Any], logprob: float, margin: float) -> int:
    """Checks one case; returns at how many positions the argmax was sure enough to be compared."""
    prompt, greedy = case["prompt_ids"], case["greedy_ids"]
    scored = score(runner, prompt + greedy)
    assert [token.token_id for token in scored] == prompt + greedy
    assert scored[0].logprob is None
    expected = case["prompt_logprobs"] + case["greedy_logprobs"]
    assert [token.logprob for token in scored[1:]] == pytest.approx(expected, abs=logprob)
    checked = 0
    for position, (argmax, gap) in enumerate(zip(case["argmax"], case["argmax_margins"], strict=True)):
        if gap > margin:
            assert scored[position + 1].top_logprobs[0].token_id == argmax, position
            checked += 1
    return checked


@models()
def test_f32_agrees_at_every_position(folder: str, name: str) -> None:
    runner = runner_of(folder, name)
    assert sum(check_teacher_forced(runner, case, LOGPROB, MARGIN) for case in cases(f"text/{name}")) > 100


@pytest.mark.parametrize("name", FAMILIES)
def test_families_agree_on_a_short_prompt(name: str) -> None:
    which = Which.Plain(str(GOLDEN / "text" / name), arch=FAMILIES[name], dtype=ModelDType.F32)
    runner = Runner(which=which, pa_ctxt_len=512, num_threads=2)
    assert check_teacher_forced(runner, cases(f"text/{name}")[1], LOGPROB, MARGIN) > 10


@models([("text", name) for name in TEXT])
def test_auto_agrees_within_bfloat16(folder: str, name: str) -> None:
    runner = runner_of(folder, name, "Auto")
    assert sum(check_teacher_forced(runner, case, 0.15, 0.3) for case in cases(f"text/{name}")) > 30


@models()
def test_f32_last_logits(folder: str, name: str) -> None:
    for case in cases(f"text/{name}"):
        logits = case["last_logits"]
        largest = max(logits)
        total = largest + math.log(sum(math.exp(logit - largest) for logit in logits))
        request = CompletionRequest(
            case["prompt_ids"], name, max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=len(logits)
        )
        top = tokens(runner_of(folder, name).send_completion_request(request))[0].top_logprobs
        assert sorted(entry.token_id for entry in top) == list(range(len(logits)))
        for entry in top:
            assert entry.logprob == pytest.approx(logits[entry.token_id] - total, abs=LOGPROB)


@models()
def test_f32_greedy_tokens(folder: str, name: str) -> None:
    for case in cases(f"text/{name}"):
        expected = case["greedy_ids"]
        # Past a near tie either way is right.
        sure = next((i for i, gap in enumerate(case["greedy_margins"]) if gap <= MARGIN), len(expected))
        generated = generate(runner_of(folder, name), case["prompt_ids"], len(expected))
        assert len(generated) == len(expected)
        assert [token for token, _ in generated[:sure]] == expected[:sure]


@models()
def test_tokenizer(folder: str, name: str) -> None:
    runner = runner_of(folder, name)
    for case in golden(f"text/{name}")["completions"]:
        assert runner.tokenize_text(case["prompt"], False) == case["prompt_ids"]
        assert runner.detokenize_text(case["prompt_ids"]) == case["prompt"]


@models([("text", name) for name in TEXT])
def test_chat_template(folder: str, name: str) -> None:
    runner = runner_of(folder, name)
    chat = golden(f"text/{name}")["chat"]
    assert runner.tokenize_text(chat["messages"]) == chat["prompt_ids"]
    request = ChatCompletionRequest(chat["messages"], name, max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=True)
    response = runner.send_chat_completion_request(request)
    assert response.usage.prompt_tokens == len(chat["prompt_ids"])
    sure = next((i for i, gap in enumerate(chat["greedy_margins"][:8]) if gap <= MARGIN), 8)
    assert [token.token_id for token in response.choices[0].logprobs.content][:sure] == chat["greedy_ids"][:sure]
