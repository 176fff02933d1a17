"""Cases of llama.cpp's server. Its own routes (`/completion`, `/models`) are asked by their OpenAI names."""

from __future__ import annotations

import signal
import socket

from test_server import raw, serving, wait_until

from .exchange import Exchange
from .form import (
    LLAMA_CPP,
    Case,
    File,
    Send,
    above,
    absent,
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
    both,
    chat_logprobs,
    in_message_order,
    in_response_order,
    repeats,
    role_comes_first,
    same_together,
    streams_the_same,
    text_logprobs,
    token_texts,
    usage_counts,
)

FORMS = "structured output has tests of its own"
TOOLS = "tools have tests of their own"
IMAGES = "this version takes text only"
NOT_OPENAI = "llama-server's own key; keys that are not honoured are refused by name"

GREEDY = {"temperature": 0, "max_tokens": 8}
BOOK = chat(**GREEDY)
MEANING = completion(**GREEDY)
PARTS = [{"type": "text", "text": "What is"}, {"type": "text", "text": "the best book"}]
CHATML = "<|im_start|>system\nBook<|im_end|>\n<|im_start|>user\nWhat is the best book<|im_end|>\n<|im_start|>assistant\n"
LONG = {"messages": [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}] * 100}
ANSWER = {
    "id": has("cmpl"),
    "system_fingerprint": is_text,
    "choices.0.message.role": "assistant",
    "choices.0.message.content": is_text,
    "choices.0.finish_reason": "length",
}


def prefill(content: object) -> Send:
    said = [{"role": "user", "content": "What is the best book"}, {"role": "assistant", "content": content}]
    return post("/apply-template", {"messages": said, "continue_final_message": True})


def avoids_its_tokens(x: Exchange) -> bool:
    """With a bias of -100 on the tokens of an answer, none of them comes."""
    asked = x.again(logprobs=True if "messages" in x.send.body else 1)
    ids = {}
    for text in set(token_texts(asked)):
        tokens = x.other(post("/tokenize", {"content": text})).answer["tokens"]
        if len(tokens) == 1:
            ids[text] = tokens[0]
    biased = asked.again(logit_bias={str(token): -100 for token in ids.values()})
    return bool(ids) and not set(token_texts(biased)) & set(ids)


def stops_nowhere_in_the_text(x: Exchange) -> bool:
    """No part of a stream has a stop string or the beginning of one, and it ends where the whole answer does."""
    whole = x.again(stream=..., stop=...).text()
    stop = whole[2:5]
    stopped = x.again(stop=[stop, "User:\n"])
    return stopped.text() == whole[: whole.index(stop)] and stopped.finish() == "stop"


def is_freed_when_its_client_goes(x: Exchange) -> None:
    with raw(x.server, {"prompt": "Hello", "max_tokens": 100_000, "ignore_eos": True}):
        wait_until(lambda: x.server.metric("vllm:num_requests_running") > 0)
    wait_until(lambda: x.server.metric("vllm:num_requests_running") == 0)


def cannot_forge_lines(_: Exchange) -> None:
    forged = "FORGED-LINE"
    with serving() as server:
        assert server.send("DELETE", f"/v1/stream?conv_id=%0D%0A{forged}").status == 404
        assert server.send("DELETE", f"/v1/%0D%0A{forged}").status == 404
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(f"GET /\r\n{forged} HTTP/1.1\r\n\r\n".encode())
            connection.recv(1000)
        server.process.send_signal(signal.SIGTERM)
        _, log = server.process.communicate(timeout=20)
    assert not [line for line in log.splitlines() if line.startswith(forged)]
    assert f"%0D%0A{forged}" in log


def goes_on_past_the_end(x: Exchange) -> bool:
    usage = x.usage()
    return usage["completion_tokens"] == x.send.body["max_tokens"] and x.finish() == "length"


def hits_are_counted(x: Exchange) -> bool:
    before = x.server.metric("vllm:prefix_cache_hits_total")
    cached = x.again().usage()["prompt_tokens_details"]["cached_tokens"]
    return cached > 0 and x.server.metric("vllm:prefix_cache_hits_total") == before + cached


def counts_pieces(x: Exchange) -> bool:
    pieces = [piece["piece"] for piece in x.answer["tokens"]]
    whole = b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces)
    return all(pieces) and whole.decode() == x.send.body["content"]


def comes_back(x: Exchange) -> bool:
    text = x.other(post("/detokenize", {"tokens": x.answer["tokens"]})).answer["content"]
    return len(x.answer["tokens"]) > 5 and text.strip() == x.send.body["content"]


def forms_differ(x: Exchange) -> None:
    openai = x.other(chat("Hello", system=None, max_tokens=5)).answer
    assert openai["object"] == "chat.completion"
    assert {"choices", "usage"} <= set(openai)
    assert not {"type", "content"} & set(openai)
    assert {"prompt_tokens", "completion_tokens"} <= set(openai["usage"])


def preflight(origin: str) -> Send:
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "Authorization"}
    return Send("OPTIONS", "/v1/completions", headers={"Origin": origin, **wanted})


def header(name: str, *texts: str) -> object:
    return lambda x: all(text in x.reply.headers[name] for text in texts)


BASIC = File(
    LLAMA_CPP,
    "test_basic.py",
    (
        Case("test_server_start_simple", "health", get("/health"), fields={"status": "ok"}),
        Case(
            "test_server_models",
            "the model's id is first",
            get("/v1/models"),
            fields={"object": "list", "data.0.id": "llama", "data.*.root": "llama"},
            differs="one entry for each name that a request may use, of one `root`; llama-server lists one entry",
        ),
        Case("test_server_model_aliases_and_tags", "an alias is listed", get("/v1/models"), fields={"data.1.id": "other"}),
        Case("test_server_model_aliases_and_tags", "an alias is a model", get("/v1/models/other"), fields={"root": "llama"}),
        Case(
            "test_server_props",
            "what is served",
            get("/props"),
            404,
            error(code="route_not_found"),
            differs="the same is told by /v1/system/info, /v1/models and /tokenizer_info",
        ),
        Case(
            "test_server_slots",
            "prompts of others",
            get("/slots"),
            404,
            error(code="route_not_found"),
            differs="no route shows what others ask; there, 501 unless a flag turns it on",
        ),
        Case(
            "test_no_webui", "with the page", get("/ui"), holds=lambda x: x.reply.headers["content-type"].startswith("text/html")
        ),
        Case("test_no_webui", "without it", get("/ui"), 404, error(code="route_not_found"), on="no-ui"),
    ),
    elsewhere={
        "test_load_split_model": "loading has tests of its own",
        "test_server_start_with_host_family": "the test server listens on an IPv4 address anyway",
    },
)

CHAT = File(
    LLAMA_CPP,
    "test_chat_completion.py",
    (
        Case("test_chat_completion", "a word", chat("Hey", **GREEDY), fields=ANSWER, holds=usage_counts(8)),
        Case("test_chat_completion", "a question", BOOK, fields=ANSWER, holds=usage_counts(8)),
        Case(
            "test_chat_completion",
            "128 tokens",
            chat("Write the fibonacci function in c++.", system="You are a coding assistant.", max_tokens=128, temperature=0),
            fields=ANSWER,
            holds=usage_counts(128),
        ),
        Case("test_chat_completion", "parts of text", chat(PARTS, **GREEDY), fields=ANSWER, holds=usage_counts(8)),
        Case(
            "test_chat_completion",
            "a name that no model has",
            BOOK.but(model="codellama70b"),
            404,
            error("model", "model_not_found"),
            differs="a request for a model that is not served is no request for another; llama-server answers it",
        ),
        Case(
            "test_chat_completion_stream",
            "a question",
            BOOK.but(stream=True, stream_options={"include_usage": True}),
            fields={"*.model": "llama", "*.system_fingerprint": is_text},
            holds=both(role_comes_first, usage_counts(8), streams_the_same),
        ),
        Case(
            "test_chat_completion_stream",
            "128 tokens",
            chat(
                "Write the fibonacci function in c++.",
                max_tokens=128,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            ),
            holds=both(role_comes_first, usage_counts(128), streams_the_same),
        ),
        Case(
            "test_chat_completion_with_openai_library",
            "its keys",
            BOOK.but(model="default", seed=42, temperature=0.8),
            fields=ANSWER,
            holds=repeats(2),
        ),
        Case(
            "test_chat_template",
            "the prompt",
            post("/apply-template", {"messages": BOOK.body["messages"]}),
            fields={"prompt": CHATML},
        ),
        Case(
            "test_chat_template_assistant_prefill",
            "a text",
            prefill("Whill"),
            fields={"prompt": lambda text: text.endswith("<|im_start|>assistant\nWhill")},
            differs="the last message is gone on from when `continue_final_message` asks for it, as at vLLM; there, always",
        ),
        Case(
            "test_chat_template_assistant_prefill",
            "parts",
            prefill([{"type": "text", "text": "Wh"}, {"type": "text", "text": "ill"}]),
            fields={"prompt": lambda text: text.endswith("<|im_start|>assistant\nWhill")},
            differs="as above",
        ),
        Case(
            "test_apply_chat_template",
            "two messages",
            post("/apply-template", {"messages": chat("Hi there", system="You are a test.").body["messages"]}),
            fields={"prompt": has("You are a test.", "Hi there", "assistant\n"), "tokens": is_a(list)},
        ),
        *(
            Case(
                "test_invalid_chat_completion_req", what, post("/v1/chat/completions", {"messages": messages}), 400, error(param)
            )
            for what, messages, param in (
                ("null", None, "messages"),
                ("a string", "string", "messages"),
                ("a number", [123], "messages[0]"),
                ("without a role", [{}], "messages[0].role"),
                ("a role that is a number", [{"role": 123}], "messages[0].role"),
                ("content that is a number", [{"role": "system", "content": 123}], "messages[0].content"),
                ("a second without a role", [{"role": "system", "content": "test"}, {}], "messages[1].role"),
            )
        ),
        Case(
            "test_invalid_chat_completion_req",
            "two answers on end",
            post(
                "/v1/chat/completions",
                {"messages": [*BOOK.body["messages"], *[{"role": "assistant", "content": "test"}] * 2], "max_tokens": 2},
            ),
            differs="the chat template decides which orders it takes; llama-server refuses two answers on end",
        ),
        Case(
            "test_chat_completion_with_timings_per_token",
            "its key",
            BOOK.but(timings_per_token=True),
            400,
            error("timings_per_token"),
            differs=NOT_OPENAI,
        ),
        Case("test_logprobs", "whole", BOOK.but(logprobs=True, top_logprobs=10), holds=chat_logprobs(10)),
        Case(
            "test_logprobs_stream",
            "streamed",
            BOOK.but(logprobs=True, top_logprobs=10, stream=True),
            holds=both(role_comes_first, chat_logprobs(10)),
        ),
        Case("test_logit_bias", "none of its tokens", BOOK, holds=avoids_its_tokens),
        *(
            Case(
                test,
                "says how long it is",
                post("/v1/chat/completions", {**LONG, **more}),
                400,
                {"error.n_prompt_tokens": above(512), "error.n_ctx": 512, "error.code": "context_length_exceeded"},
                differs="the error's `type` is OpenAI's, not exceed_context_size_error",
            )
            for test, more in (("test_context_size_exceeded", {}), ("test_context_size_exceeded_stream", {"stream": True}))
        ),
        Case(
            "test_return_progress",
            "its key",
            BOOK.but(stream=True, return_progress=True),
            400,
            error("return_progress"),
            differs=NOT_OPENAI,
        ),
        Case(
            "test_chat_completions_multiple_choices",
            "two",
            BOOK.but(n=2),
            fields={
                "choices": length(2),
                "choices.*.message.role": "assistant",
                "choices.*.message.content": is_text,
                "choices.*.finish_reason": "length",
            },
        ),
    ),
    elsewhere={
        "test_completion_with_response_format": FORMS,
        "test_completion_with_json_schema": FORMS,
        "test_completion_with_grammar": FORMS,
    },
)

COMPLETION = File(
    LLAMA_CPP,
    "test_completion.py",
    (
        Case(
            "test_completion",
            "8 tokens",
            MEANING,
            fields={"choices.0.text": is_text, "choices.0.finish_reason": "length"},
            holds=usage_counts(8),
        ),
        Case(
            "test_completion",
            "64 tokens",
            completion("Write a joke about AI from a very long prompt which will not be truncated", max_tokens=64, temperature=0),
            holds=usage_counts(64),
        ),
        Case(
            "test_completion",
            "return_tokens",
            MEANING.but(return_token_ids=True),
            fields={"choices.0.token_ids": length(8), "choices.0.token_ids.*": is_a(int)},
        ),
        Case(
            "test_completion_stream",
            "8 tokens",
            MEANING.but(stream=True, stream_options={"include_usage": True}),
            holds=usage_counts(8),
        ),
        Case(
            "test_completion_stream",
            "64 tokens",
            completion(
                "Write a joke about AI", max_tokens=64, temperature=0, stream=True, stream_options={"include_usage": True}
            ),
            holds=usage_counts(64),
        ),
        Case("test_completion_stream_vs_non_stream", "the same text", MEANING, holds=streams_the_same),
        Case(
            "test_completion_with_openai_library",
            "its keys",
            MEANING.but(model="default"),
            fields={"system_fingerprint": is_text, "choices.0.text": is_text},
        ),
        Case(
            "test_completion_stream_with_openai_library",
            "its keys",
            MEANING.but(model="default", stream=True),
            holds=lambda x: x.text() != "",
        ),
        Case(
            "test_completion_stream_with_openai_library_stops",
            "two stops",
            MEANING.but(stream=True),
            holds=stops_nowhere_in_the_text,
        ),
        Case("test_consistent_result_same_seed", "one at a time", MEANING.but(seed=42), holds=repeats(4)),
        Case("test_consistent_result_same_seed", "two at once", MEANING.but(seed=42), holds=same_together(2)),
        *(
            Case(
                "test_different_result_different_seed",
                f"of {server}",
                MEANING.but(temperature=1, seed=0, max_tokens=16),
                holds=lambda x: len({x.again(seed=seed).text() for seed in range(4)}) == 4,
                on=server,
            )
            for server in ("tiny", "two at once")
        ),
        *(
            Case(
                "test_consistent_result_different_batch_size",
                f"{tokens} tokens a step",
                MEANING.but(seed=42),
                holds=both(repeats(4), lambda x: x.text() == x.other(x.send, "tiny").text()),
                on=f"{tokens} tokens a step",
            )
            for tokens in (16, 32)
        ),
        Case(
            "test_nocache_long_input_prompt",
            "too long",
            completion("I believe the meaning of life is" * 32),
            400,
            error(code="context_length_exceeded"),
        ),
        Case(
            "test_completion_with_tokens_input",
            "ids",
            MEANING,
            holds=lambda x: (
                x.again(
                    prompt=x.other(post("/tokenize", {"content": x.send.body["prompt"], "add_special": True})).answer["tokens"]
                ).text()
                == x.text()
            ),
        ),
        Case(
            "test_completion_with_tokens_input",
            "lists of ids",
            MEANING.but(prompt=[[5, 6, 7]] * 2),
            holds=lambda x: x.text(0) == x.text(1),
        ),
        *(
            Case(
                "test_completion_with_tokens_input",
                what,
                MEANING.but(prompt=prompt),
                400,
                error("prompt"),
                differs="OpenAI's forms alone: a string, strings, ids, or lists of ids; not mixed",
            )
            for what, prompt in (("ids and a string", [[1, 2], "life"]), ("a string among ids", [1, 2, "life", 3]))
        ),
        *(
            Case(
                "test_completion_parallel_slots",
                f"{count} requests on {server}",
                completion("Write a very long book.", max_tokens=24, temperature=1, seed=42, ignore_eos=True),
                holds=lambda x, count=count: all(
                    len(each.text()) > 10
                    for each in x.at_once(*(x.send.but(prompt=f"{i}. Write a very long book.") for i in range(count)))
                ),
                on=server,
            )
            for count, server in ((3, "one at once"), (2, "two at once"), (4, "two at once"), (2, "tiny"), (6, "tiny"))
        ),
        Case(
            "test_completion_response_fields",
            "its key",
            MEANING.but(response_fields=["content"]),
            400,
            error("response_fields"),
            differs=NOT_OPENAI,
        ),
        Case("test_n_probs", "ten likeliest", MEANING.but(logprobs=10), holds=text_logprobs(10)),
        Case(
            "test_n_probs_stream",
            "ten likeliest",
            MEANING.but(logprobs=10, stream=True),
            holds=lambda x: sum(len(part["logprobs"]["tokens"]) for part in x.choices(0) if part["logprobs"]) == 8,
        ),
        Case(
            "test_n_probs_post_sampling",
            "its key",
            MEANING.but(post_sampling_probs=True),
            400,
            error("post_sampling_probs"),
            differs=NOT_OPENAI,
        ),
        Case("test_logit_bias", "ids in OpenAI's form", MEANING.but(max_tokens=16), holds=avoids_its_tokens),
        *(
            Case(
                "test_logit_bias",
                what,
                MEANING.but(logit_bias=bias),
                400,
                error("logit_bias"),
                differs="OpenAI's form alone: an object of token ids",
            )
            for what, bias in (
                ("pairs of ids", [[5, -100], [6, -100]]),
                ("pairs of words", [[" the ", -100]]),
                ("words in OpenAI's form", {" the ": -100}),
            )
        ),
        Case("test_cancel_request", "a client goes", get("/health"), holds=is_freed_when_its_client_goes, on="default"),
    ),
    elsewhere={"test_cache_vs_nocache_prompt": "skipped there as well; tests/test_prefix_cache.py has it"},
)

SECURITY = File(
    LLAMA_CPP,
    "test_security.py",
    (
        Case("test_access_public_endpoint", "health", get("/health"), fields={"error": absent}, on="keys"),
        Case(
            "test_access_public_endpoint",
            "models",
            get("/v1/models"),
            401,
            error(code="invalid_api_key"),
            on="keys",
            differs="with keys all is guarded but health and the page's files",
        ),
        Case("test_access_static_assets_without_api_key", "root", get("/"), on="keys"),
        Case("test_access_static_assets_without_api_key", "script", get("/ui/assets/page.js"), on="keys"),
        Case("test_access_static_assets_without_api_key", "style", get("/ui/assets/page.css"), on="keys"),
        Case("test_incorrect_api_key", "none", MEANING, 401, {"error.type": "authentication_error"}, on="keys"),
        Case(
            "test_incorrect_api_key",
            "a wrong one",
            Send("POST", "/v1/completions", MEANING.body, {"Authorization": "Bearer invalid-key"}),
            401,
            {"error.type": "authentication_error"},
            on="keys",
        ),
        Case(
            "test_correct_api_key",
            "bearer",
            Send("POST", "/v1/completions", MEANING.body, {"Authorization": "Bearer secret"}),
            fields={"choices.0.text": is_text, "error": absent},
            on="keys",
        ),
        Case(
            "test_correct_api_key_anthropic_header",
            "x-api-key",
            Send("POST", "/v1/completions", MEANING.body, {"X-Api-Key": "secret"}),
            fields={"choices.0.text": is_text, "error": absent},
            on="keys",
        ),
        Case(
            "test_openai_library_correct_api_key",
            "a chat",
            Send("POST", "/v1/chat/completions", BOOK.body, {"Authorization": "Bearer secret"}),
            fields={"choices": length(1)},
            on="keys",
        ),
        *(
            Case("test_cors_options", what, preflight("http://web.mydomain.fr"), 204, holds=holds, on="cors", differs=differs)
            for what, holds, differs in (
                (
                    "an origin",
                    header("access-control-allow-origin", "http://web.mydomain.fr"),
                    "only origins of --cors-origin; 204, not 200",
                ),
                ("methods", header("access-control-allow-methods", "GET", "POST"), "as above"),
                (
                    "headers",
                    header("access-control-allow-headers", "authorization", "content-type"),
                    "those that are used, not all",
                ),
                (
                    "credentials",
                    lambda x: "access-control-allow-credentials" not in x.reply.headers,
                    "a key goes in a header of its own, and cookies are never used",
                ),
            )
        ),
        Case(
            "test_cors_options",
            "an origin that nobody allowed",
            preflight("http://localhost"),
            403,
            error(code="origin_not_allowed"),
            on="cors",
            differs="pages may use the server only from the origins of --cors-origin",
        ),
    ),
    elsewhere={"test_local_media_file": IMAGES},
)

MESSAGE = {"type": "message", "role": "assistant", "content.0.type": "text", "content.0.text": is_text}

ANTHROPIC = File(
    LLAMA_CPP,
    "test_compat_anthropic.py",
    (
        Case(
            "test_anthropic_messages_basic",
            "its fields",
            message("Say hello"),
            fields={
                **MESSAGE,
                "stop_reason": one_of("end_turn", "max_tokens"),
                "usage.input_tokens": is_a(int),
                "usage.cache_read_input_tokens": is_a(int),
                "usage.output_tokens": above(0),
                "timings": absent,
            },
        ),
        Case(
            "test_anthropic_messages_with_system",
            "a system prompt",
            message(system="You are a helpful assistant."),
            fields=MESSAGE,
        ),
        Case("test_anthropic_messages_multipart_content", "two blocks", message(PARTS), fields=MESSAGE),
        Case(
            "test_anthropic_messages_conversation",
            "three turns",
            message(
                messages=[
                    {"role": role, "content": text}
                    for role, text in (("user", "Hello"), ("assistant", "Hi there!"), ("user", "How are you?"))
                ]
            ),
            fields=MESSAGE,
        ),
        Case(
            "test_anthropic_messages_streaming",
            "events and fields",
            message("Say hello", stream=True),
            fields={
                "0.message.type": "message",
                "0.message.role": "assistant",
                "0.message.content": [],
                "0.message.usage.input_tokens": above(0),
                "1.index": 0,
                "1.content_block.type": "text",
                "2.index": 0,
                "2.delta.type": "text_delta",
                "-3.index": 0,
                "-2.delta.stop_reason": one_of("end_turn", "max_tokens"),
                "-2.usage.output_tokens": above(0),
                "-1.timings": absent,
            },
            holds=in_message_order,
        ),
        *(
            Case(
                test,
                "a count alone",
                post("/v1/messages/count_tokens", {"model": "default", **body}),
                fields={"input_tokens": above(0), "output_tokens": absent},
            )
            for test, body in (
                ("test_anthropic_count_tokens", {"messages": [{"role": "user", "content": "Hello world"}]}),
                (
                    "test_anthropic_count_tokens_with_system",
                    {"messages": [{"role": "user", "content": "Hello"}], "system": "You are a helpful assistant."},
                ),
                ("test_anthropic_count_tokens_no_max_tokens", {"messages": [{"role": "user", "content": "Hello"}]}),
            )
        ),
        Case(
            "test_anthropic_stop_sequences",
            "two",
            message("Count to 10", stop_sequences=["\n", "END"]),
            fields={"type": "message"},
        ),
        Case("test_anthropic_temperature", "a half", message(temperature=0.5), fields={"type": "message"}),
        Case("test_anthropic_top_p", "0.9", message(top_p=0.9), fields=MESSAGE),
        Case("test_anthropic_top_k", "40", message(top_k=40), fields=MESSAGE),
        Case(
            "test_anthropic_missing_messages",
            "none",
            message(messages=...),
            400,
            {"type": "error", "error.type": "invalid_request_error"},
        ),
        Case(
            "test_anthropic_empty_messages",
            "an empty list",
            message(messages=[]),
            400,
            {"type": "error", "error.type": "invalid_request_error"},
            differs="Anthropic's interface wants one at least; llama-server answers something",
        ),
        Case("test_anthropic_metadata", "a user", message(metadata={"user_id": "test_user_123"}), fields=MESSAGE),
        Case(
            "test_anthropic_vs_openai_different_response_format",
            "both",
            message(max_tokens=5),
            fields=MESSAGE,
            holds=forms_differ,
        ),
        Case(
            "test_anthropic_vision_format_accepted",
            "an image",
            message([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}]),
            400,
            {"error.message": has("content[0].type", "image")},
            differs="400, for the request is at fault; there, 500",
        ),
    ),
    elsewhere={
        "test_anthropic_tool_use_basic": TOOLS,
        "test_anthropic_tool_result, _with_text, _error": TOOLS,
        "test_anthropic_tool_streaming": TOOLS,
        "test_anthropic_streaming_content_block_indices": TOOLS,
        "test_anthropic_vision_base64_with_multimodal_model": IMAGES,
        "test_anthropic_thinking, _with_reasoning_model": "reasoning has tests of its own",
    },
)

BOOK_INPUT = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]

RESPONSES = File(
    LLAMA_CPP,
    "test_compat_oai_responses.py",
    (
        Case(
            "test_responses_with_text_format",
            "text",
            response("Write an example", max_output_tokens=10, text={"format": {"type": "text"}}),
        ),
        Case(
            "test_responses_with_openai_library",
            "ids",
            response(BOOK_INPUT, max_output_tokens=8),
            fields={"id": begins("resp_"), "output.0.id": begins("msg_"), "output.0.content.0.text": is_text},
        ),
        Case(
            "test_responses_stream_with_openai_library",
            "ids",
            response(BOOK_INPUT, max_output_tokens=8, stream=True),
            holds=in_response_order,
        ),
        Case(
            "test_responses_stream_with_llama_telemetry",
            "its keys",
            response(max_output_tokens=8, stream=True, timings_per_token=True),
            400,
            error("timings_per_token"),
            differs=NOT_OPENAI,
        ),
    ),
    elsewhere={"test_responses_with_text_format (the other forms)": FORMS},
)

TOKENIZE = File(
    LLAMA_CPP,
    "test_tokenize.py",
    (
        Case(
            "test_tokenize_detokenize",
            "there and back",
            post("/tokenize", {"content": "What is the capital of France ?"}),
            holds=comes_back,
        ),
        Case(
            "test_tokenize_with_bos",
            "BOS is first",
            post("/tokenize", {"content": "What is the capital of France ?", "add_special": True}),
            fields={"tokens.0": 1},
            holds=lambda x: x.answer["tokens"][1:] == x.again(add_special=...).answer["tokens"],
            on="bos",
        ),
        Case(
            "test_tokenize_with_pieces",
            "whole and broken characters",
            post("/tokenize", {"content": "This is a test string with unicode 媽 and emoji 🤗", "with_pieces": True}),
            fields={"tokens.*.id": above(0)},
            holds=counts_pieces,
        ),
    ),
)

TEMPLATE = File(
    LLAMA_CPP,
    "test_template.py",
    (
        *(
            Case(
                "test_add_generation_prompt",
                str(adds),
                post(
                    "/apply-template",
                    {"messages": [{"role": "user", "content": "What is today?"}], "add_generation_prompt": adds},
                ),
                fields={"prompt": lambda text, adds=adds: ("<|im_start|>assistant" in text) == adds},
            )
            for adds in (False, True)
        ),
    ),
    elsewhere={
        "test_reasoning": "reasoning has tests of its own",
        "test_date_inside_prompt": "the templates' own functions have tests beside them",
        "test_system_message_prefix": "a flag of llama-server's",
    },
)

STREAM = File(
    LLAMA_CPP,
    "test_stream.py",
    (),
    elsewhere={
        "test_stream_resume_and_stop_with_slashed_model_name": "a router of models, which this server is not",
        "test_stream_stop_during_model_load": "as above",
        "test_stream_resumes_after_reload_during_model_load": "as above",
    },
)

ENDS = chat("What is 2+2?", system=None, temperature=0, max_tokens=24)

IGNORE_EOS = File(
    LLAMA_CPP,
    "test_ignore_eos.py",
    (
        Case(
            "test_ignore_eos_populates_logit_bias", "goes on", ENDS.but(ignore_eos=True), holds=goes_on_past_the_end, on="default"
        ),
        Case(
            "test_ignore_eos_false_no_logit_bias",
            "ends",
            ENDS.but(ignore_eos=False),
            fields={"choices.0.finish_reason": "stop"},
            on="default",
        ),
    ),
)

METRICS = File(
    LLAMA_CPP,
    "test_metrics.py",
    (
        Case(
            "test_prompt_cache_metrics",
            "hits",
            completion("The cache of metrics", max_tokens=2, temperature=0),
            holds=hits_are_counted,
        ),
    ),
)

LOG_INJECTION = File(
    LLAMA_CPP,
    "test_log_injection.py",
    (Case("test_stream_conv_id_cannot_forge_log_lines", "line ends", get("/live"), holds=cannot_forge_lines),),
)

FILES = (BASIC, CHAT, COMPLETION, SECURITY, ANTHROPIC, RESPONSES, TOKENIZE, TEMPLATE, STREAM, IGNORE_EOS, METRICS, LOG_INJECTION)
