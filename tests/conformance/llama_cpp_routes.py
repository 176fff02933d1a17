"""Cases of llama.cpp's server: access, other routes and what goes with a stream."""

from __future__ import annotations

import signal
import socket

from test_server import serving

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
from .llama_cpp import BOOK, FORMS, IMAGES, MEANING, NOT_OPENAI, PARTS, TOOLS
from .relations import (
    in_message_order,
    in_response_order,
)


def preflight(origin: str) -> Send:
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "Authorization"}
    return Send("OPTIONS", "/v1/completions", headers={"Origin": origin, **wanted})


def header(name: str, *texts: str) -> object:
    return lambda x: all(text in x.reply.headers[name] for text in texts)


def forms_differ(x: Exchange) -> None:
    openai = x.other(chat("Hello", system=None, max_tokens=5)).answer
    assert openai["object"] == "chat.completion"
    assert {"choices", "usage"} <= set(openai)
    assert not {"type", "content"} & set(openai)
    assert {"prompt_tokens", "completion_tokens"} <= set(openai["usage"])


def comes_back(x: Exchange) -> bool:
    text = x.other(post("/detokenize", {"tokens": x.answer["tokens"]})).answer["content"]
    return len(x.answer["tokens"]) > 5 and text.strip() == x.send.body["content"]


def counts_pieces(x: Exchange) -> bool:
    pieces = [piece["piece"] for piece in x.answer["tokens"]]
    whole = b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces)
    return all(pieces) and whole.decode() == x.send.body["content"]


def goes_on_past_the_end(x: Exchange) -> bool:
    usage = x.usage()
    return usage["completion_tokens"] == x.send.body["max_tokens"] and x.finish() == "length"


def hits_are_counted(x: Exchange) -> bool:
    before = x.server.metric("vllm:prefix_cache_hits_total")
    cached = x.again().usage()["prompt_tokens_details"]["cached_tokens"]
    return cached > 0 and x.server.metric("vllm:prefix_cache_hits_total") == before + cached


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
        "test_stream_resume_and_stop_with_slashed_model_name": "a router of processes, which this server is not",
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

FILES = (SECURITY, ANTHROPIC, RESPONSES, TOKENIZE, TEMPLATE, STREAM, IGNORE_EOS, METRICS, LOG_INJECTION)
