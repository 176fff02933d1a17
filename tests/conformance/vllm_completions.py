"""Cases of vLLM's OpenAI server: completions, and the server itself."""

from __future__ import annotations

from .exchange import Exchange
from .form import (
    VLLM,
    Case,
    File,
    Send,
    above,
    absent,
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
    choices_differ,
    still_works,
    streams_the_same,
    text_logprobs,
    usage_counts,
)
from .vllm import CAPITAL, FORMS, IDS, NAME, NOT_STREAMED, SUM, keeps, of_usage, prompt_logprobs, refused, streamed, usage_policy

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
    COMPLETION,
    COMPLETION_ERROR,
    COMPLETION_LOGPROBS,
    TEXT_OFFSET,
    PROMPTS,
    EMPTY,
    usage_policy(CAPITAL, "completion/test_usage_policy.py"),
    BASIC,
)
