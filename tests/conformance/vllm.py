"""Cases of vLLM's OpenAI server. Those of its test of a class of requests are sent as the requests that make the class."""

from __future__ import annotations

from typing import Any

from .exchange import Exchange
from .form import (
    VLLM,
    Case,
    File,
    Send,
    above,
    chat,
    completion,
    error,
    is_text,
    length,
    nothing,
    post,
)
from .relations import (
    both,
    chat_logprobs,
    choices_differ,
    repeats,
    same_as_of,
    still_works,
    streams_the_same,
    usage_counts,
)

FORMS = "structured output has tests of its own"
IMAGES = "images have tests of their own"
LORA = "adapters have tests of their own"
SUM = chat("what is 1+1?", system="you are a helpful assistant", max_completion_tokens=5, temperature=0)
NAME = completion("Hello, my name is", max_tokens=5, temperature=0)
IDS = completion([5, 5, 5, 5, 5], max_tokens=5, temperature=0)
CAPITAL = completion("What is the capital of France?", max_tokens=5, temperature=0)
EMPLOYEE = {"type": "json_schema"}
VOCABULARY = 512
"""Of the tiny model."""


def of_usage(*, parts: bool, last: bool) -> Any:
    """Which chunks of a stream have a usage: all of the text's, and the last."""

    def holds(x: Exchange) -> None:
        chunks = x.events
        if last:
            usage = x.usage()
            assert usage["prompt_tokens"] > 0
            assert usage["completion_tokens"] > 0
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            chunks = chunks[:-1]
        assert all(chunk["choices"] for chunk in chunks)
        usages = [chunk.get("usage") for chunk in chunks]
        assert all((usage is not None) == parts for usage in usages), usages
        if parts:
            counts = [usage["completion_tokens"] for usage in usages]
            assert counts == sorted(counts)
            assert counts[-1] == x.send.body.get("max_tokens", x.send.body.get("max_completion_tokens"))
            assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)

    return holds


def prompt_logprobs(top: int) -> Any:
    """Each token of the prompt but the first has its own and the likeliest, with ranks."""

    def holds(x: Exchange) -> None:
        answer = x.answer
        entries = answer["prompt_logprobs"] if "messages" in x.send.body else answer["choices"][0]["prompt_logprobs"]
        assert len(entries) == x.num_prompt_tokens()
        assert entries[0] is None
        for entry in entries[1:]:
            assert len(entry) in (max(top, 1), top + 1)
            ranks = sorted(each["rank"] for each in entry.values())
            assert ranks[:top] == list(range(1, top + 1))
            assert all(each["logprob"] <= 0 and isinstance(each["decoded_token"], str) for each in entry.values())

    return holds


def keeps(start: int | None, end: int | None) -> Any:
    """The prompt is cut to this part of it."""

    def holds(x: Exchange) -> None:
        whole = x.again(truncate_prompt_tokens=..., truncation_side=...).ok.answer["choices"][0]["prompt_token_ids"]
        choice = x.answer["choices"][0]
        assert choice["prompt_token_ids"] == whole[start:end]
        assert len(choice["prompt_token_ids"]) < len(whole)
        kept = {"prompt": whole[start:end], "truncate_prompt_tokens": ..., "truncation_side": ...}
        assert choice["token_ids"] == x.again(**kept).ok.answer["choices"][0]["token_ids"]

    return holds


def refused(test: str, what: str, send: Send, param: str | None = None, *says: str, differs: str = "") -> Case:
    return Case(test, what, send, 400, error(param, says=says), differs=differs)


def streamed(send: Send, **options: Any) -> Send:
    return send.but(stream=True, stream_options=options)


NOT_STREAMED = (
    ("include_usage", None),
    ("include_usage", True),
    ("continuous_usage_stats", None),
    ("continuous_usage_stats", True),
)

CHAT = File(
    VLLM,
    "chat_completion/test_chat.py",
    (
        Case("test_no_logprobs_chat", "false", SUM.but(logprobs=False), fields={"choices.0.logprobs": nothing}),
        Case("test_zero_logprobs_chat", "0", SUM.but(logprobs=True, top_logprobs=0), holds=chat_logprobs(0)),
        Case("test_some_logprobs_chat", "5", SUM.but(logprobs=True, top_logprobs=5), holds=chat_logprobs(5)),
        *(
            Case(
                "test_too_many_chat_logprobs", what, SUM.but(logprobs=True, **body), 400, error("top_logprobs"), holds=still_works
            )
            for what, body in (("21, streamed", {"top_logprobs": 21, "stream": True}), ("30", {"top_logprobs": 30}))
        ),
        Case("test_prompt_logprobs_chat", "null", SUM.but(prompt_logprobs=None), fields={"prompt_logprobs": nothing}),
        refused("test_prompt_logprobs_chat", "-1", SUM.but(prompt_logprobs=-1), "prompt_logprobs"),
        Case("test_prompt_logprobs_chat", "0", SUM.but(prompt_logprobs=0), holds=prompt_logprobs(0)),
        Case("test_prompt_logprobs_chat", "1", SUM.but(prompt_logprobs=1), holds=prompt_logprobs(1)),
        Case("test_more_than_one_prompt_logprobs_chat", "2", SUM.but(prompt_logprobs=2), holds=prompt_logprobs(2)),
        Case(
            "test_single_chat_session",
            "one turn",
            SUM.but(logprobs=True, top_logprobs=5),
            fields={
                "id": is_text,
                "choices": length(1),
                "choices.0.finish_reason": "length",
                "choices.0.message.role": "assistant",
            },
            holds=usage_counts(5),
        ),
        Case(
            "test_single_chat_session",
            "two turns",
            SUM,
            holds=lambda x: (
                x.again(
                    messages=[
                        *x.send.body["messages"],
                        x.answer["choices"][0]["message"],
                        {"role": "user", "content": "express your result in json"},
                    ]
                ).text()
                != ""
            ),
        ),
        Case("test_chat_streaming", "the same text", SUM.but(max_completion_tokens=10), holds=streams_the_same),
        Case(
            "test_chat_completion_stream_options",
            "without usage",
            streamed(SUM, include_usage=False),
            holds=of_usage(parts=False, last=False),
        ),
        Case(
            "test_chat_completion_stream_options",
            "with usage",
            streamed(SUM, include_usage=True, continuous_usage_stats=False),
            holds=of_usage(parts=False, last=True),
        ),
        Case(
            "test_chat_completion_stream_options",
            "with usage in each part",
            streamed(SUM, include_usage=True, continuous_usage_stats=True),
            holds=of_usage(parts=True, last=True),
        ),
        *(
            refused(
                "test_chat_completion_stream_options",
                f"not streamed, {value}",
                SUM.but(stream=False, stream_options={"include_usage": value}),
                "stream_options",
            )
            for value in (None, True)
        ),
        refused(
            "test_chat_completion_stream_options",
            "a key that nobody knows",
            streamed(SUM, include_usage=False).but(min_characters=10),
            "min_characters",
            differs="unknown keys are refused by name, not ignored",
        ),
        Case(
            "test_response_format_text",
            "text",
            SUM.but(response_format={"type": "text"}),
            fields={"choices.0.message.content": is_text},
        ),
        Case(
            "test_extra_fields_allowed",
            "in a message",
            SUM.but(messages=[{"role": "user", "content": "what is 1+1?", "extra_field": "0"}]),
            fields={"choices.0.message.content": is_text},
        ),
        Case(
            "test_complex_message_content",
            "a part of text",
            chat([{"type": "text", "text": "what is 1+1?"}], system=None, max_tokens=5, temperature=0, seed=0),
            holds=same_as_of(messages=[{"role": "user", "content": "what is 1+1?"}]),
        ),
        Case(
            "test_custom_role",
            "a text and a part of text",
            SUM.but(messages=[{"role": "my-custom-role", "content": "what is 1+1?"}]),
            holds=same_as_of(messages=[{"role": "my-custom-role", "content": [{"type": "text", "text": "what is 1+1?"}]}]),
        ),
        *(refused("test_long_seed", str(seed), SUM.but(seed=seed), "seed") for seed in (-(2**63) - 1, 2**63)),
        Case(
            "test_invocations",
            "SageMaker's route",
            post("/invocations", SUM.body),
            404,
            error(code="route_not_found"),
            differs="OpenAI's routes alone",
        ),
        Case(
            "test_chat_completion_n_parameter_non_streaming",
            "three",
            SUM.but(max_completion_tokens=20, temperature=0.7, n=3, seed=1),
            fields={"choices": length(3), "choices.*.message.content": is_text},
            holds=both(choices_differ(3), lambda x: [choice["index"] for choice in x.answer["choices"]] == [0, 1, 2]),
        ),
        Case(
            "test_chat_completion_n_parameter_streaming",
            "two",
            SUM.but(max_completion_tokens=15, temperature=0.7, n=2, seed=1, stream=True),
            holds=choices_differ(2),
        ),
        Case(
            "test_chat_completion_n_with_seed",
            "two",
            SUM.but(max_completion_tokens=10, temperature=0.8, n=2, seed=42),
            fields={"choices": length(2), "choices.*.message.content": is_text},
            holds=repeats(2),
        ),
        Case("test_chat_completion_n_equals_1", "one", SUM.but(n=1), fields={"choices": length(1), "choices.0.index": 0}),
        Case("test_chat_completion_request_n_parameter_default", "none", SUM, fields={"choices": length(1)}),
    ),
    elsewhere={
        "test_structured_outputs_*": FORMS,
        "test_response_format_json_{object,schema}": FORMS,
        "every test with zephyr-lora": LORA,
    },
)

CHAT_ERROR = File(
    VLLM,
    "chat_completion/test_chat_error.py",
    (
        Case("test_system_message_accepts_text", "a text", SUM, fields={"choices.0.message.content": is_text}),
        Case(
            "test_system_message_accepts_text_array",
            "a part of text",
            SUM.but(messages=[{"role": "system", "content": [{"type": "text", "text": "You are a helpful assistant."}]}]),
            fields={"choices.0.message.content": is_text},
        ),
        *(
            refused(
                f"test_system_message_warns_on_{kind}",
                "with a type",
                SUM.but(messages=[{"role": "system", "content": [{"type": name, name: {}}]}]),
                "messages[0].content[0].type",
                differs="what is no text is refused, not warned of",
            )
            for kind, name in (("image", "image_url"), ("audio", "input_audio"), ("video", "video_url"))
        ),
        *(
            refused(
                f"test_system_message_warns_on_{kind}",
                "without a type",
                SUM.but(messages=[{"role": "system", "content": [{name: {}}]}]),
                "messages[0].content[0].type",
                differs="as above",
            )
            for kind, name in (("image", "image_url"), ("audio", "input_audio"), ("video", "video_url"))
        ),
    ),
    elsewhere={
        "test_json_schema_response_format_missing_schema": FORMS,
        "test_chat_error_non_stream, _stream": "a fault in the engine; tests beside the server's code have it",
        "test_user_message_accepts_image": IMAGES,
    },
)

BIASED = chat("Testing", system=None, max_tokens=5, temperature=0)

LOGIT_BIAS = File(
    VLLM,
    "chat_completion/test_chat_logit_bias_validation.py",
    (
        Case(
            "test_chat_logit_bias_valid",
            "the last id",
            BIASED.but(logit_bias={str(VOCABULARY - 1): 1.0}),
            fields={"choices.0.message.content": is_text},
        ),
        refused(
            "test_chat_logit_bias_invalid",
            "past the last id",
            BIASED.but(logit_bias={str(VOCABULARY + 1): 1.0}),
            "logit_bias",
            str(VOCABULARY),
            str(VOCABULARY + 1),
        ),
        refused(
            "test_chat_logit_bias_non_integer_key",
            "a word",
            BIASED.but(logit_bias={"not_a_token_id": 50}),
            "logit_bias",
            "not_a_token_id",
            "logit_bias",
        ),
        refused(
            "test_chat_logit_bias_non_numeric_value",
            "a word",
            BIASED.but(logit_bias={"1": "not_a_number"}),
            "logit_bias.1",
            "logit_bias",
        ),
        refused(
            "test_chat_logit_bias_multiple_non_integer_keys",
            "two words",
            BIASED.but(logit_bias={"bad1": 50.0, "bad2": 20.0}),
            "logit_bias",
            "bad1",
            "bad2",
        ),
    ),
)

STOP_TOKEN_IDS = File(
    VLLM,
    "chat_completion/test_chat_stop_token_ids_validation.py",
    (
        Case(
            "test_chat_stop_token_ids_valid",
            "the last id",
            BIASED.but(stop_token_ids=[VOCABULARY - 1]),
            fields={"choices.0.message.content": is_text},
        ),
        refused(
            "test_chat_stop_token_ids_out_of_vocab",
            "past the last id",
            BIASED.but(stop_token_ids=[VOCABULARY + 1]),
            "stop_token_ids",
            str(VOCABULARY),
            str(VOCABULARY + 1),
        ),
        refused("test_chat_stop_token_ids_negative", "-1", BIASED.but(stop_token_ids=[-1]), "stop_token_ids[0]"),
    ),
)

NON_OBJECT = File(
    VLLM,
    "chat_completion/test_non_object_body_validation.py",
    (
        *(
            Case(
                "test_chat_completion_request_rejects_non_object_body",
                what,
                Send("POST", "/v1/chat/completions", body),
                400,
                error(code="invalid_json"),
            )
            for what, body in (
                ("no JSON", b"this is not valid json{{{"),
                ("a string", b'"this is not an object"'),
                ("a list", ["not", "an", "object"]),
                ("a number", 42),
                ("null", b"null"),
            )
        ),
        refused(
            "test_chat_completion_request_cache_salt_still_validated_on_dict",
            "an empty salt",
            SUM.but(cache_salt=""),
            "cache_salt",
        ),
    ),
)


def usage_policy(send: Send, path: str) -> File:
    return File(
        VLLM,
        path,
        (
            Case(
                "test_non_streaming", "usage", send, fields={"usage.prompt_tokens": above(0), "usage.completion_tokens": above(0)}
            ),
            Case("test_streaming_no_usage", "none", send.but(stream=True), holds=of_usage(parts=False, last=False)),
            Case(
                "test_streaming_with_usage_option",
                "in the last",
                streamed(send, include_usage=True),
                holds=of_usage(parts=False, last=True),
            ),
        ),
        elsewhere={},
    )


TOOL_CHOICE = File(
    VLLM,
    "chat_completion/test_tool_choice_null.py",
    (
        Case(
            "test_null_tool_choice_without_tools_matches_an_absent_one",
            "null",
            SUM.but(tool_choice=None),
            holds=same_as_of(tool_choice=...),
        ),
        Case(
            "test_invalid_tool_choice_is_still_rejected",
            "auto without tools",
            SUM.but(tool_choice="auto"),
            fields={"choices.0.message.content": is_text},
            differs='without tools "auto" says what is so anyway, and clients send it',
        ),
    ),
    elsewhere={
        "with tools or structured output, or a choice that is none": "tools and structured output have tests of their own"
    },
)

FILES = (
    CHAT,
    CHAT_ERROR,
    LOGIT_BIAS,
    STOP_TOKEN_IDS,
    NON_OBJECT,
    usage_policy(SUM, "chat_completion/test_usage_policy.py"),
    TOOL_CHOICE,
)
