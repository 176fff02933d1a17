"""Cases of SGLang's server: OpenAI's and Anthropic's routes."""

from __future__ import annotations

import itertools

from .exchange import Exchange
from .form import (
    SGLANG,
    Case,
    File,
    Send,
    above,
    begins,
    chat,
    completion,
    error,
    get,
    has,
    is_a,
    is_text,
    length,
    message,
    one_of,
    post,
    response,
)
from .relations import (
    adds_tokens,
    both,
    chat_logprobs,
    in_message_order,
    in_response_order,
    role_comes_first,
    usage_counts,
)

FORMS = "structured output has tests of its own"
REASONING = "reasoning has tests of its own"
CAPITAL = "The capital of France is"
IDS = [59, 70, 281, 304, 228, 47, 76]


def completions(stream: bool) -> tuple[Case, ...]:
    """Every combination of what a completion may have."""
    cases = []
    for echo, logprobs, is_list, n, by_ids in itertools.product((False, True), (None, 5), (True, False), (1, 2), (False, True)):
        prompt = IDS if by_ids else CAPITAL
        body = {"max_tokens": 8, "temperature": 0, "echo": echo, "logprobs": logprobs, "n": n}
        send = completion([prompt, prompt] if is_list else prompt, **body)
        if stream:
            send = send.but(stream=True, stream_options={"include_usage": True})
        words = ["two prompts" if is_list else "a prompt", "of ids" if by_ids else "of text", f"n={n}"]
        what = ", ".join([*words, *["echo"] * echo, *["logprobs"] * (logprobs is not None)])
        test = "test_completion_stream" if stream else "test_completion"
        cases.append(Case(test, what, send, fields={} if stream else {"id": is_text, "created": above(0)}, holds=has_all_choices))
    return tuple(cases)


def has_all_choices(x: Exchange) -> None:
    body = x.send.body
    prompts = (
        body["prompt"] if isinstance(body["prompt"][0], (str, list)) and not isinstance(body["prompt"], str) else [body["prompt"]]
    )
    count = len(prompts) * body["n"]
    if x.send.streams:
        chunks = x.events
        assert all(chunk["id"] and chunk["created"] for chunk in chunks)
        indices = sorted({choice["index"] for chunk in chunks for choice in chunk["choices"]})
    else:
        indices = [choice["index"] for choice in x.answer["choices"]]
    assert indices == list(range(count))
    prompt = prompts[0] if isinstance(prompts[0], str) else x.other(post("/detokenize", {"tokens": prompts[0]})).answer["prompt"]
    for index in indices:
        assert x.finish(index) in ("stop", "length")
        assert x.text(index).startswith(prompt) == body["echo"]
        parts = x.choices(index) if x.send.streams else [x.answer["choices"][index]]
        lists = [part["logprobs"] for part in parts if part["logprobs"]]
        assert bool(lists) == (body["logprobs"] is not None)
        tops = [top for each in lists for top in each["top_logprobs"]]
        assert all(isinstance(token, str) for each in lists for token in each["tokens"])
        if lists:
            assert (tops[0] is None) == body["echo"]
            assert all(0 < len(top) <= body["logprobs"] + 1 for top in tops[1:])
    usage = x.usage()
    assert usage["prompt_tokens"] == x.num_prompt_tokens()
    assert usage["completion_tokens"] > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def chats(stream: bool) -> tuple[Case, ...]:
    cases = []
    for logprobs, n in itertools.product((None, 5), (1, 2)):
        body = {"max_tokens": 8, "temperature": 0, "n": n, "logprobs": logprobs is not None, "top_logprobs": logprobs}
        send = chat("What is the capital of France?", system="You are a helpful AI assistant", **body)
        relations = [
            usage_counts(),
            lambda x: all(x.text(index) and x.finish(index) in ("stop", "length") for index in range(x.send.body["n"])),
        ]
        if logprobs:
            relations.append(chat_logprobs(logprobs))
        fields = {"choices": length(n), "choices.0.message.role": "assistant", "id": is_text, "created": above(0)}
        if stream:
            send = send.but(stream=True, stream_options={"include_usage": True})
            relations.append(role_comes_first)
            fields = {"*.id": is_text, "*.created": above(0)}
        test = "test_chat_completion_stream" if stream else "test_chat_completion"
        cases.append(Case(test, f"n={n}" + ", logprobs" * bool(logprobs), send, fields=fields, holds=both(*relations)))
    return tuple(cases)


def goes_on(x: Exchange) -> bool:
    """The prompt ends with the answer's beginning, and the answer is what comes behind it."""
    body = {key: x.send.body[key] for key in ("messages", "continue_final_message")}
    rendered = x.other(post("/apply-template", body)).answer
    rest = x.other(completion(rendered["tokens"], max_tokens=8, temperature=0)).text()
    return rendered["prompt"].rstrip().endswith("{") and x.text() == rest


HELPFUL = {
    "max_output_tokens": 16,
    "temperature": 0,
    "top_p": 1,
    "store": True,
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "truncation": "disabled",
}
RESPONSE = {
    "id": begins("resp_"),
    "object": "response",
    "created_at": above(0),
    "model": is_text,
    "output": is_a(list),
    "error": None,
    "text.format.type": "text",
}
USAGE = {"usage.input_tokens": above(0), "usage.output_tokens": above(0), "usage.total_tokens": above(0)}
SHORT = "What is 2+2?"
"""The default model ends its answer by itself."""

OPENAI = File(
    SGLANG,
    "basic/test_openai_server.py",
    (
        *completions(stream=False),
        *completions(stream=True),
        *chats(stream=False),
        *chats(stream=True),
        Case(
            "test_penalty",
            "of frequency",
            chat("Introduce the capital of France.", max_tokens=64, temperature=0, frequency_penalty=1.0, ignore_eos=True),
            fields={"choices.0.message.content": is_text},
            holds=lambda x: x.again(frequency_penalty=...).text() != x.text(),
        ),
        Case(
            "test_response_prefill",
            "an open brace",
            chat(CAPITAL, max_tokens=8, temperature=0).but(
                messages=[
                    {"role": "user", "content": "Extract the name as a JSON object"},
                    {"role": "assistant", "content": "{\n"},
                ],
                continue_final_message=True,
            ),
            holds=goes_on,
        ),
        Case(
            "test_model_list",
            "lengths",
            get("/v1/models"),
            fields={"data.*.max_model_len": is_a(int), "data.*.root": "llama"},
            differs="one entry for each name that a request may use, of one `root`; SGLang lists one entry",
        ),
        Case("test_retrieve_model", "there", get("/v1/models/llama"), fields={"id": "llama", "root": "llama"}),
        Case("test_retrieve_model", "not there", get("/v1/models/non-existent-model"), 404, error(code="model_not_found")),
        Case(
            "TestOpenAIServerv1Responses.test_response",
            "to its end",
            response(SHORT, **{**HELPFUL, "max_output_tokens": 32}),
            fields={**RESPONSE, **USAGE, "status": "completed", "incomplete_details": None},
            on="default",
        ),
        Case(
            "TestOpenAIServerv1Responses.test_response_stream",
            "to its end",
            response(SHORT, **{**HELPFUL, "max_output_tokens": 32}, stream=True, stream_options={"include_usage": True}),
            fields={"-1.type": "response.completed", "-1.response.usage.total_tokens": above(0)},
            holds=in_response_order,
            on="default",
        ),
        Case(
            "TestOpenAIServerv1Responses.test_response_completion",
            "cut",
            response(CAPITAL, **HELPFUL),
            fields={**RESPONSE, **USAGE, "status": "incomplete", "incomplete_details.reason": "max_output_tokens"},
            differs="what the limit cut is `incomplete`, as OpenAI's; SGLang calls it completed",
        ),
        Case(
            "TestOpenAIServerv1Responses.test_response_completion_stream",
            "cut",
            response(CAPITAL, **HELPFUL, stream=True),
            fields={"-1.type": "response.incomplete"},
            holds=in_response_order,
            differs="as above",
        ),
        Case(
            "TestOpenAIServerv1Responses.test_error",
            "a response that is not there",
            response("Hi", previous_response_id="bad"),
            404,
            error("previous_response_id", "previous_response_not_found"),
            differs="404, whatever the id looks like; there 400 for one of another form",
        ),
        Case(
            "TestOpenAIServerv1Responses.test_penalty",
            "of frequency",
            response("Introduce the capital of France.", frequency_penalty=1.0),
            400,
            error("frequency_penalty", "unknown_parameter"),
            differs="OpenAI's responses have no penalties",
        ),
        Case(
            "TestOpenAIServerv1Responses.test_model_list",
            "lengths",
            get("/v1/models"),
            fields={"data.*.max_model_len": is_a(int)},
            differs="as test_model_list",
        ),
    ),
    elsewhere={
        "test_regex": FORMS,
        "TestOpenAIServerv1Responses.test_invalid_tools_error": "tools have tests of their own",
        "TestOpenAIV1Rerank, TestOpenAIV1Score": "routes that this server has not",
        "TestOpenAIServerCustomLogitProcessor": "a client sends no code",
    },
)

CAPITAL_OF_FRANCE = "What is the capital of France? Answer in a few words."
MESSAGE = {"type": "message", "role": "assistant", "content.0.type": "text", "content.0.text": is_text}


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(itertools.cycle(("user", "assistant")), texts, strict=False)]


def count_tokens(**body: object) -> Send:
    return post("/v1/messages/count_tokens", {"model": "default", **body})


ANTHROPIC = File(
    SGLANG,
    "basic/test_anthropic_server.py",
    (
        Case(
            "test_simple_messages",
            "its fields",
            message(CAPITAL_OF_FRANCE),
            fields={
                **MESSAGE,
                "id": begins("msg_"),
                "model": is_text,
                "stop_reason": one_of("end_turn", "max_tokens", "stop_sequence"),
                "usage.input_tokens": above(0),
                "usage.output_tokens": above(0),
            },
        ),
        Case(
            "test_multi_turn_messages",
            "three",
            message(messages=said("My name is Alice.", "Hello Alice!", "What is my name?")),
            fields=MESSAGE,
        ),
        Case(
            "test_system_message_string", "a text", message(CAPITAL_OF_FRANCE, system="Always respond in French."), fields=MESSAGE
        ),
        Case(
            "test_system_message_blocks",
            "two blocks",
            message(
                CAPITAL_OF_FRANCE,
                system=[{"type": "text", "text": text} for text in ("You are a helpful assistant.", "Always be concise.")],
            ),
            fields=MESSAGE,
        ),
        Case(
            "test_max_tokens",
            "5",
            message("Tell me a long story about a dragon.", max_tokens=5),
            fields={**MESSAGE, "stop_reason": one_of("max_tokens", "end_turn"), "usage.output_tokens": above(0)},
            holds=lambda x: x.answer["usage"]["output_tokens"] <= 5,
        ),
        Case(
            "test_temperature",
            "0",
            message(CAPITAL_OF_FRANCE, temperature=0.0),
            fields=MESSAGE,
            holds=lambda x: x.again().text() == x.text(),
        ),
        Case(
            "test_stop_sequences",
            "a line",
            message(CAPITAL_OF_FRANCE, stop_sequences=["\n"], max_tokens=64),
            fields={"type": "message"},
            holds=lambda x: "\n" not in x.text(),
        ),
        Case("test_top_p_and_top_k", "both", message(CAPITAL_OF_FRANCE, top_p=0.9, top_k=40), fields=MESSAGE),
        Case(
            "test_simple_messages_stream",
            "events and fields",
            message(CAPITAL_OF_FRANCE, stream=True),
            fields={
                "0.message.type": "message",
                "0.message.role": "assistant",
                "0.message.usage": is_a(dict),
                "1.content_block.type": "text",
                "-2.delta.stop_reason": one_of("end_turn", "max_tokens", "stop_sequence"),
                "-2.usage.output_tokens": is_a(int),
            },
            holds=in_message_order,
        ),
        Case(
            "test_stream_multi_turn",
            "three",
            message(messages=said("Say hello.", "Hello!", "Say goodbye."), stream=True),
            holds=in_message_order,
        ),
        Case(
            "test_stream_with_system",
            "a text",
            message(CAPITAL_OF_FRANCE, system="You are a pirate.", stream=True),
            holds=in_message_order,
        ),
        Case(
            "test_error_invalid_max_tokens",
            "-1",
            message(max_tokens=-1),
            400,
            {"type": "error", "error.message": has("max_tokens")},
        ),
        Case("test_error_empty_messages", "none", message(messages=[]), 400, {"type": "error", "error.message": has("messages")}),
        Case("test_error_missing_content_type", "no JSON", Send("POST", "/v1/messages", b"not json"), 400, {"type": "error"}),
        Case(
            "test_raw_http_non_streaming",
            "headers and fields",
            message(CAPITAL_OF_FRANCE, temperature=0),
            fields={**MESSAGE, "id": is_text, "model": is_text, "usage": is_a(dict)},
            holds=lambda x: x.reply.headers["content-type"].startswith("application/json"),
        ),
        Case(
            "test_raw_http_streaming",
            "headers and events",
            message(CAPITAL_OF_FRANCE, temperature=0, stream=True),
            fields={"0.type": "message_start", "-1.type": "message_stop"},
            holds=lambda x: x.reply.headers["content-type"].startswith("text/event-stream"),
        ),
        Case("test_content_blocks_message", "a block", message([{"type": "text", "text": "What is 2+2?"}]), fields=MESSAGE),
        Case("test_count_tokens", "some", count_tokens(messages=said("Hello, how are you?")), fields={"input_tokens": above(0)}),
        Case(
            "test_count_tokens_with_system",
            "more",
            count_tokens(messages=said("Hello"), system="A prompt that adds tokens."),
            holds=adds_tokens,
        ),
        Case(
            "TestAnthropicThinkingConversion.test_convert_response_cache_tokens",
            "a second time",
            message("Cached response, " * 4, temperature=0),
            holds=lambda x: (
                (usage := x.again().answer["usage"])["cache_read_input_tokens"] > 0
                and usage["input_tokens"] + usage["cache_read_input_tokens"]
                == sum(x.answer["usage"][key] for key in ("input_tokens", "cache_read_input_tokens"))
            ),
            differs="`input_tokens` leaves out what the cache had, as Anthropic's; SGLang counts it twice",
        ),
    ),
    elsewhere={
        "test_tool_result_image_content_conversion": "images have tests of their own",
        "TestAnthropicThinkingConversion (the rest), TestAnthropicThinkingStreaming": REASONING,
    },
)

FILES = (OPENAI, ANTHROPIC)
