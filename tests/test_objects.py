"""Requests, answers and selections of a model as Python objects: shown, given back, copied, pickled, as JSON."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
from conftest import complete, text_model, tokens

import mistral_paged
from mistral_paged import (
    Architecture,
    ChatCompletionRequest,
    CompletionRequest,
    ModelDType,
    PagedCacheType,
    Runner,
    ToolChoice,
    Which,
)

CHAT = {
    "logprobs": True,
    "n_choices": 2,
    "logit_bias": {5: -1.5, 6: 100.0},
    "top_logprobs": 3,
    "max_tokens": 7,
    "presence_penalty": 0.1,
    "frequency_penalty": -0.3,
    "repetition_penalty": 1.1,
    "stop_seqs": ["a", "é"],
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 0,
    "stream": True,
    "min_p": 0.05,
    "tool_choice": ToolChoice.NoTools,
    "dry_multiplier": 0.8,
    "dry_base": 1.5,
    "dry_allowed_length": 3,
    "dry_sequence_breakers": ["\n"],
    "enable_thinking": False,
    "truncate_sequence": True,
    "reasoning_effort": "off",
    "ignore_eos": True,
    "seed": 2**64 - 1,
    "priority": -1,
    "deadline": 2.5,
    "tenant": "t",
    "cache_salt": "s",
    "public_messages": 1,
    "keep": True,
}
ONLY_CHAT = ["stream", "top_logprobs", "enable_thinking", "reasoning_effort", "public_messages"]
COMPLETION = {
    **{name: value for name, value in CHAT.items() if name not in ONLY_CHAT},
    "logprobs": 4,
    "best_of": 3,
    "echo_prompt": True,
    "suffix": "!",
    "fill_in_middle": True,
    "public_prefix_len": 2,
}
MESSAGES = [{"role": "user", "content": "Hi", "name": "me"}, {"role": "assistant", "content": [{"type": "text", "text": "<b>"}]}]
REQUESTS = [
    ChatCompletionRequest(MESSAGES, "m", **CHAT),
    ChatCompletionRequest("Hi", "m"),
    CompletionRequest("Once", "m", **COMPLETION),
    CompletionRequest([1, 2, 3], "m", temperature=0),
]
SELECTIONS = [
    Which.Plain("a/b", Architecture.Mistral, dtype=ModelDType.F32, hf_cache_path="/cache"),
    Which.Plain("a/b"),
    Which.GGUF("folder", ["a.gguf", "b.gguf"], tok_model_id="x", dtype=ModelDType.BF16),
    Which.GGUF("a.gguf"),
]


def copies(original: Any) -> list[Any]:
    return [
        copy.copy(original),
        copy.deepcopy(original),
        *(pickle.loads(pickle.dumps(original, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)),
    ]


def test_a_request_gives_its_fields_back() -> None:
    chat, plain, completion, ids = REQUESTS
    assert {name: getattr(chat, name) for name in CHAT} == CHAT
    assert {name: getattr(completion, name) for name in COMPLETION} == COMPLETION
    assert (chat.messages, chat.model, chat.stream) == (MESSAGES, "m", True)
    assert plain.messages == [{"role": "user", "content": "Hi"}]
    assert (completion.prompt, ids.prompt) == ("Once", [1, 2, 3])
    assert (plain.n_choices, plain.priority, plain.public_messages) == (1, 0, 0)
    assert (plain.logprobs, plain.stream, plain.keep, plain.temperature, ids.temperature) == (False, False, False, None, 0.0)
    assert ids.logprobs is None


def test_what_a_request_gives_back_is_a_copy() -> None:
    chat = REQUESTS[0]
    chat.messages.clear()
    chat.logit_bias.clear()
    chat.stop_seqs.clear()
    assert (chat.messages, chat.logit_bias, chat.stop_seqs) == (MESSAGES, CHAT["logit_bias"], CHAT["stop_seqs"])
    messages = [{"role": "user", "content": "Hi"}]
    request = ChatCompletionRequest(messages, "m")
    messages[0]["content"] = "changed"
    assert request.messages[0]["content"] == "Hi"


@pytest.mark.parametrize("original", [*REQUESTS, *SELECTIONS], ids=lambda made: repr(made)[:30])
def test_what_was_made_is_shown_as_it_would_be_made_again(original: Any) -> None:
    assert eval(repr(original), vars(mistral_paged)) == original
    for same in copies(original):
        assert same == original
        assert repr(same) == repr(original)
    assert [other for other in [*REQUESTS, *SELECTIONS] if other == original] == [original]
    assert original != repr(original)


def test_only_what_was_given_is_shown() -> None:
    assert repr(REQUESTS[3]) == "CompletionRequest(prompt=[1, 2, 3], model='m', temperature=0.0)"
    assert repr(SELECTIONS[1]) == "Which.Plain(model_id='a/b')"
    assert repr(SELECTIONS[0]) == (
        "Which.Plain(model_id='a/b', arch=Architecture.Mistral, dtype=ModelDType.F32, hf_cache_path='/cache')"
    )


@pytest.mark.parametrize("member", [Architecture.Phi3_5MoE, ModelDType.F32, PagedCacheType.Int8, ToolChoice.Auto], ids=repr)
def test_enums_are_copied_and_pickled(member: Any) -> None:
    assert all(same == member for same in copies(member))


def chat(runner: Runner, **options: Any) -> Any:
    options = {"max_tokens": 4, "temperature": 0.0, "logprobs": True, "top_logprobs": 2, "ignore_eos": True, **options}
    return runner.send_chat_completion_request(ChatCompletionRequest("Hello", "m", **options))


def test_answers_are_copied_and_pickled(llama: Runner) -> None:
    answers = [chat(llama), complete(llama, [5, 6], max_tokens=3, logprobs=1), *chat(llama, stream=True)]
    for answer in answers:
        for same in copies(answer):
            assert same == answer
            assert same.to_json() == answer.to_json()
            assert same.choices[0].logprobs == answer.choices[0].logprobs
    assert answers[0] != answers[1]
    assert answers[0].choices[0] != chat(llama, max_tokens=3).choices[0]


def test_a_kept_sequence_is_copied_and_not_pickled(llama: Runner) -> None:
    answer = chat(llama, keep=True)
    sequence = answer.choices[0].sequence
    for same in (copy.copy(answer), copy.deepcopy(answer)):
        assert same.choices[0].sequence is sequence
    with pytest.raises(TypeError, match="a Sequence lives in its runner and cannot be pickled; send its `tokens`"):
        pickle.dumps(answer)
    sequence.release()


def test_the_likeliest_tokens_have_the_fields_of_the_sampled_one(llama: Runner) -> None:
    for token in tokens(complete(llama, [5, 6], max_tokens=8, logprobs=4)):
        best = token.top_logprobs[0]
        assert (best.token, best.token_id, best.logprob, best.bytes) == (token.token, token.token_id, token.logprob, token.bytes)
        assert isinstance(best.bytes, bytes)


def test_a_chat_answer_as_json_has_openais_shape(llama: Runner) -> None:
    answer = chat(llama)
    body = answer.to_dict()
    assert body == json.loads(answer.to_json())
    assert list(body) == ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"]
    assert (body["object"], body["id"], body["created"]) == ("chat.completion", answer.id, answer.created)
    (choice,) = body["choices"]
    assert list(choice) == ["index", "message", "logprobs", "finish_reason"]
    assert choice["message"] == {"role": "assistant", "content": answer.choices[0].message.content, "refusal": None}
    assert choice["finish_reason"] == "length"
    for entry, token in zip(choice["logprobs"]["content"], answer.choices[0].logprobs.content, strict=True):
        assert list(entry) == ["token", "logprob", "bytes", "top_logprobs"]
        assert (entry["token"], entry["logprob"], entry["bytes"]) == (token.token, token.logprob, list(token.bytes))
        expected = [{"token": top.token, "logprob": top.logprob, "bytes": list(top.bytes)} for top in token.top_logprobs]
        assert entry["top_logprobs"] == expected
        assert len(expected) == 2
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] == answer.usage.total_tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] == answer.usage.prompt_tokens_details.cached_tokens
    assert chat(llama, logprobs=False, top_logprobs=None).to_dict()["choices"][0]["logprobs"] is None


def test_a_streamed_answer_as_json_has_openais_shape(llama: Runner) -> None:
    chunks = [chunk.to_dict() for chunk in chat(llama, stream=True)]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == chat(llama).choices[0].message.content
    assert [("usage" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert list(chunks[0]["choices"][0]["logprobs"]["content"][0]) == ["token", "logprob", "bytes", "top_logprobs"]


def test_a_text_answer_as_json_has_openais_shape(llama: Runner) -> None:
    answer = complete(llama, [5, 6, 7], max_tokens=3, logprobs=2, echo_prompt=True)
    body = answer.to_dict()
    assert body["object"] == "text_completion"
    (choice,) = body["choices"]
    assert list(choice) == ["index", "text", "logprobs", "finish_reason"]
    logprobs = choice["logprobs"]
    entries = tokens(answer)
    assert logprobs["tokens"] == [entry.token for entry in entries]
    assert logprobs["token_logprobs"] == [entry.logprob for entry in entries]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {top.token: top.logprob for top in entries[1].top_logprobs}
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:index])) for index in range(len(entries))]


def test_a_stop_string_is_named(llama: Runner) -> None:
    text = complete(llama, [5, 6], max_tokens=8).choices[0].text
    stopped = complete(llama, [5, 6], max_tokens=8, stop_seqs=[text[2]]).to_dict()["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_sequence"]) == ("stop", text[2])


def test_an_answer_is_readable_in_a_notebook(llama: Runner) -> None:
    answer = chat(llama)
    html = answer._repr_html_()
    assert "generated at" in html
    assert f"{answer.usage.prompt_tokens} prompt tokens" in html
    assert "length" in html
    (echoed,) = [complete(llama, "<script>&", max_tokens=1, echo_prompt=True)._repr_html_()]
    assert "&lt;script&gt;&amp;" in echoed
    assert "<script>" not in echoed
    assert "<pre" in next(iter(chat(llama, stream=True)))._repr_html_()


def test_a_plan_is_copied_and_readable_in_a_notebook(llama: Runner) -> None:
    plan = llama.memory_ledger()
    for same in (copy.copy(plan), copy.deepcopy(plan)):
        assert str(same) == str(plan)
    assert plan._repr_html_().startswith("<pre>")
    assert str(plan.num_blocks) in plan._repr_html_()


def test_a_memory_plan_is_copied_pickled_and_compared() -> None:
    which = text_model("gemma3")
    plan = Runner.memory_plan(which, pa_ctxt_len=256, max_seqs=3)
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan == copy.copy(plan) == copy.deepcopy(plan)
    assert (str(again), repr(again), again.devices, again.groups) == (str(plan), repr(plan), plan.devices, plan.groups)
    assert [again.num_requests_that_fit(n) for n in (1, 100, 256)] == [plan.num_requests_that_fit(n) for n in (1, 100, 256)]
    assert plan != Runner.memory_plan(which, pa_ctxt_len=128, max_seqs=3)
    assert plan != "a plan"
