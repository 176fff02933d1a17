"""Chats and completions of llama.cpp's server. Its own routes (`/completion`, `/models`) are asked by their OpenAI names."""

from __future__ import annotations

from test_server import raw, wait_until

from .exchange import Exchange
from .form import (
    LLAMA_CPP,
    Case,
    File,
    Send,
    above,
    chat,
    completion,
    error,
    get,
    has,
    is_a,
    is_text,
    length,
    post,
)
from .relations import (
    both,
    chat_logprobs,
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
IMAGES = "images have tests of their own"
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

FILES = (BASIC, CHAT, COMPLETION)
