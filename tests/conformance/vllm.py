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
    absent,
    chat,
    completion,
    error,
    get,
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
    text_logprobs,
    usage_counts,
)

FORMS = "structured output has tests of its own"
IMAGES = "this version takes text only"
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

COMPLETION = File(
    VLLM,
    "completion/test_completion.py",
    (
        Case(
            "test_single_completion",
            "a text",
            NAME,
            fields={
                "id": is_text,
                "choices": length(1),
                "choices.0.text": is_text,
                "choices.0.finish_reason": "length",
                "usage.prompt_tokens_details.cached_tokens": above(-1),
            },
            holds=usage_counts(5),
        ),
        Case(
            "test_single_completion",
            "ids",
            IDS,
            fields={"choices.0.text": is_text, "choices.0.prompt_logprobs": absent},
            holds=usage_counts(5),
        ),
        Case("test_no_logprobs", "null", IDS.but(logprobs=None), fields={"choices.0.logprobs": nothing}),
        Case(
            "test_zero_logprobs",
            "0",
            IDS.but(logprobs=0),
            fields={"choices.0.logprobs.top_logprobs.0": length(1)},
            holds=text_logprobs(0),
        ),
        Case(
            "test_some_logprobs",
            "5",
            NAME.but(logprobs=5),
            fields={"choices.0.logprobs.top_logprobs.0": lambda top: 5 <= len(top) <= 6},
            holds=text_logprobs(5),
        ),
        *(
            Case("test_too_many_completion_logprobs", what, IDS.but(**body), 400, error("logprobs"), holds=still_works)
            for what, body in (("21", {"logprobs": 21}), ("30, streamed", {"logprobs": 30, "stream": True}))
        ),
        Case(
            "test_prompt_logprobs_completion",
            "null",
            NAME.but(prompt_logprobs=None),
            fields={"choices.0.prompt_logprobs": nothing},
        ),
        refused("test_prompt_logprobs_completion", "-1", NAME.but(prompt_logprobs=-1), "prompt_logprobs"),
        Case("test_prompt_logprobs_completion", "0", NAME.but(prompt_logprobs=0), holds=prompt_logprobs(0)),
        Case("test_prompt_logprobs_completion", "1", NAME.but(prompt_logprobs=1), holds=prompt_logprobs(1)),
        *(
            Case(
                "test_completion_truncation_side_controls_prompt_truncation",
                side,
                NAME.but(return_token_ids=True, truncate_prompt_tokens=4, truncation_side=side),
                holds=keeps(*part),
            )
            for side, part in (("left", (-4, None)), ("right", (0, 4)))
        ),
        Case(
            "test_completion_streaming",
            "the same text",
            completion("What is an LLM?", max_tokens=5, temperature=0),
            holds=streams_the_same,
        ),
        Case(
            "test_parallel_no_streaming",
            "three",
            completion("What is an LLM?", max_tokens=50, n=3, temperature=1, seed=42, logprobs=0),
            fields={"choices": length(3), "choices.*.finish_reason": is_text},
            holds=both(choices_differ(3), lambda x: [choice["index"] for choice in x.answer["choices"]] == [0, 1, 2]),
        ),
        Case(
            "test_parallel_streaming",
            "three",
            completion("What is an LLM?", max_tokens=50, n=3, temperature=1, seed=42, stream=True),
            holds=both(choices_differ(3), lambda x: all(x.finish(index) != "None" for index in range(3))),
        ),
        Case(
            "test_completion_stream_options",
            "neither",
            streamed(CAPITAL, include_usage=False, continuous_usage_stats=False),
            holds=of_usage(parts=False, last=False),
        ),
        Case(
            "test_completion_stream_options",
            "continuous alone",
            streamed(CAPITAL, include_usage=False, continuous_usage_stats=True),
            holds=of_usage(parts=False, last=False),
        ),
        Case(
            "test_completion_stream_options",
            "usage alone",
            streamed(CAPITAL, include_usage=True, continuous_usage_stats=False),
            holds=of_usage(parts=False, last=True),
        ),
        Case(
            "test_completion_stream_options",
            "both",
            streamed(CAPITAL, include_usage=True, continuous_usage_stats=True),
            holds=of_usage(parts=True, last=True),
        ),
        Case("test_completion_stream_options", "empty", streamed(CAPITAL), holds=of_usage(parts=False, last=False)),
        *(
            refused(
                "test_completion_stream_options",
                f"not streamed, {key} {value}",
                CAPITAL.but(stream=False, stream_options={key: value}),
                "stream_options",
            )
            for key, value in NOT_STREAMED
        ),
        *(
            case
            for what, send in (
                ("texts", NAME.but(prompt=["Hello, my name is"] * 2)),
                ("lists of ids", IDS.but(prompt=[[5, 5, 5, 5, 5]] * 2)),
            )
            for case in (
                Case("test_batch_completions", what, send, fields={"choices": length(2)}, holds=lambda x: x.text(0) == x.text(1)),
                Case(
                    "test_batch_completions",
                    f"{what}, streamed",
                    send.but(stream=True),
                    holds=lambda x: x.text(0) == x.text(1) != "",
                ),
                refused(
                    "test_batch_completions",
                    f"{what}, beam search",
                    send.but(n=2, use_beam_search=True),
                    "use_beam_search",
                    differs="there is no beam search",
                ),
            )
        ),
        *(
            Case(
                "test_echo_logprob_completion",
                f"{what}, {logprobs}",
                send.but(echo=True, logprobs=logprobs),
                fields={
                    "choices.0.logprobs.token_logprobs.0": None,
                    "choices.0.logprobs.top_logprobs.0": None,
                    "choices.0.logprobs.tokens": lambda tokens: len(tokens) > 5,
                    "choices.0.logprobs.text_offset": lambda offsets: len(offsets) > 5,
                },
                holds=lambda x, logprobs=logprobs: (
                    all(
                        max(logprobs, 1) <= len(top) <= logprobs + 1
                        for top in x.answer["choices"][0]["logprobs"]["top_logprobs"][1:]
                    )
                    and x.text().startswith(
                        prompt
                        if isinstance(prompt := x.send.body["prompt"], str)
                        else x.other(post("/detokenize", {"tokens": prompt})).answer["prompt"]
                    )
                ),
            )
            for what, send in (("a text", NAME), ("ids", completion([47, 76, 83, 341, 47, 76], max_tokens=5, temperature=0)))
            for logprobs in (1, 0)
        ),
    ),
    elsewhere={"test_invalid_{json_schema,regex,grammar}": FORMS},
)

COMPLETION_ERROR = File(
    VLLM,
    "completion/test_completion_error.py",
    (
        refused("test_negative_prompt_token_ids_nested", "-1", CAPITAL.but(prompt=[[-1]]), "prompt"),
        refused("test_negative_prompt_token_ids_flat", "-1", CAPITAL.but(prompt=[-1]), "prompt"),
    ),
    elsewhere={
        "test_json_schema_response_format_missing_schema": FORMS,
        "test_completion_error_non_stream, _stream": "a fault in the engine; tests beside the server's code have it",
    },
)

COMPLETION_LOGPROBS = File(
    VLLM,
    "completion/test_completion_logprobs.py",
    (
        Case(
            "test_completion_logprobs_handles_sampled_token_absent_from_step",
            "unlikely tokens",
            CAPITAL.but(logprobs=1, temperature=2, seed=1, max_tokens=20),
            holds=both(
                text_logprobs(1), lambda x: any(len(top) == 2 for top in x.answer["choices"][0]["logprobs"]["top_logprobs"])
            ),
        ),
    ),
)


def offsets_agree(x: Exchange) -> bool:
    """Offsets of a stream whose text is held back for a stop string are those of the whole answer."""
    whole = x.again(stream=...).answer["choices"][0]["logprobs"]
    starts = [0]
    for token in whole["tokens"]:
        starts.append(starts[-1] + len(token))
    parts = [part["logprobs"] for part in x.choices(0) if part["logprobs"]]
    return [offset for part in parts for offset in part["text_offset"]] == whole["text_offset"] == starts[:-1]


TEXT_OFFSET = File(
    VLLM,
    "completion/test_completion_text_offset.py",
    (
        Case(
            "test_stream_text_offset_matches_non_stream_with_stop_holdback",
            "a stop string",
            completion(
                "Hi",
                max_tokens=8,
                temperature=0,
                logprobs=0,
                stop=["\n\n"],
                stream=True,
                allowed_token_ids=[70, 71, 72, 76, 83, 206],
            ),
            holds=offsets_agree,
        ),
    ),
)

PROMPTS = File(
    VLLM,
    "completion/test_prompt_validation.py",
    (
        refused("test_empty_prompt", "null, and no embeddings", CAPITAL.but(prompt=None, prompt_embeds=[]), "prompt_embeds"),
        refused("test_empty_prompt", "null", CAPITAL.but(prompt=None), "prompt"),
        refused("test_out_of_vocab_token_ids", "999999", CAPITAL.but(prompt=[999999]), None, "999999", "vocabulary"),
    ),
    elsewhere={
        "test_load_prompt_embeds, test_disable_prompt_embeds": "a prompt is a text or token ids",
        "test_inline_hidden_states_*": "a hidden state is asked of /v1/embeddings",
    },
)

EMPTY = File(
    VLLM,
    "completion/test_empty_prompt_list.py",
    (
        refused("test_empty_prompt_list_rejected", "none", CAPITAL.but(prompt=[]), "prompt"),
        Case("test_nonempty_prompt_list_ok", "one", CAPITAL.but(prompt=["hello"]), fields={"choices": length(1)}),
    ),
)

BASIC = File(
    VLLM,
    "basic/test_basic.py",
    (
        Case("test_show_version", "the version", get("/version"), fields={"version": is_text}),
        Case("test_check_health", "well", get("/health")),
        Case(
            "test_request_wrong_content_type",
            "a form",
            Send("POST", "/v1/chat/completions", SUM.body, {"Content-Type": "application/x-www-form-urlencoded"}),
            fields={"choices": length(1)},
            differs="JSON is read whatever curl calls it; multipart is refused with 415",
        ),
        Case(
            "test_server_load",
            "what runs",
            get("/health"),
            fields={"in_flight": 0},
            differs="/health and /metrics count them; there is no /load",
        ),
    ),
    elsewhere={
        "test_request_cancellation": "tests/test_server.py, test_a_client_that_goes_frees_its_blocks",
        "test_health_check_engine_dead_error": "a fault in the engine; tests beside the server's code have it",
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
    COMPLETION,
    COMPLETION_ERROR,
    COMPLETION_LOGPROBS,
    TEXT_OFFSET,
    PROMPTS,
    EMPTY,
    usage_policy(CAPITAL, "completion/test_usage_policy.py"),
    BASIC,
)
