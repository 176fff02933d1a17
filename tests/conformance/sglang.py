"""Cases of SGLang's OpenAI and Anthropic servers."""

from __future__ import annotations

import http.client
import itertools
import json
import signal
import socket
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from test_server import COMMAND, MODEL, wait_until

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
    nothing,
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
        "test_tool_result_image_content_conversion": "this version takes text only",
        "TestAnthropicThinkingConversion (the rest), TestAnthropicThinkingStreaming": REASONING,
    },
)


def answers_meanwhile(x: Exchange) -> None:
    """The server's thread answers while a large prompt is read and tokenized."""
    large = completion("hello " * 200_000, max_tokens=1)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(x.other, large)
        slowest = 0.0
        while not asked.done():
            started = time.monotonic()
            assert x.other(get("/ping")).reply.status == 200
            slowest = max(slowest, time.monotonic() - started)
        assert asked.result().reply.status == 400
    assert slowest < 1


LIVENESS = File(
    SGLANG,
    "basic/test_http_server_liveness.py",
    (Case("test_ping_responds_while_chat_preprocessing_is_blocked", "a large prompt", get("/ping"), holds=answers_meanwhile),),
)


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self.path))


def over_a_unix_socket(x: Exchange) -> None:
    """The same answers over a socket of the file system."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "socket"
        command = [
            str(COMMAND),
            "serve",
            "-m",
            MODEL,
            "--host",
            f"unix:{path}",
            "--pa-memory-mb",
            "16",
            "--num-threads",
            "1",
            "--disable-access-log",
        ]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            wait_until(path.exists, 30)
            connection = UnixConnection(path)
            connection.request(x.send.method, x.send.path, None if x.send.body is None else json.dumps(x.send.body))
            reply = connection.getresponse()
            answer = json.loads(reply.read())
            connection.close()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)
    assert reply.status == 200
    if "choices" in answer:
        assert answer["choices"] == x.answer["choices"]
    else:
        assert [card["root"] for card in answer["data"]] == ["llama", "llama"]


UDS = File(
    SGLANG,
    "basic/test_uds_server.py",
    (
        Case("test_v1_models", "a socket", get("/v1/models"), holds=over_a_unix_socket),
        Case(
            "test_chat_completion", "a socket", chat("Say hi in one word.", max_tokens=8, temperature=0), holds=over_a_unix_socket
        ),
    ),
)

ENDS = chat(SHORT, system=None, temperature=0, max_tokens=32)
STOPPED = {"choices.0.finish_reason": "stop"}
NAMED = "the stop string is in `stop_reason`, as at vLLM; SGLang calls it matched_stop"


def stops_in_the_middle(x: Exchange) -> None:
    whole = x.text()
    stop = whole[2:4]
    answer = x.again(stop=stop).answer["choices"][0]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)
    assert stop not in (answer["text"] if "text" in answer else answer["message"]["content"])


MATCHED_STOP = File(
    SGLANG,
    "validation/test_matched_stop.py",
    (
        *(
            Case("test_finish_stop_str", what, send, holds=stops_in_the_middle, differs=NAMED)
            for what, send in (
                ("a text", completion(max_tokens=16, temperature=0)),
                ("a chat", chat(max_tokens=16, temperature=0)),
            )
        ),
        Case(
            "test_finish_stop_regex_str",
            "its key",
            completion(stop_regex="and|or"),
            400,
            error("stop_regex"),
            differs="a key of SGLang's; keys that are not honoured are refused by name",
        ),
        Case(
            "test_finish_stop_eos",
            "a text",
            completion("<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n", temperature=0, max_tokens=32),
            fields={**STOPPED, "choices.0.stop_reason": nothing},
            on="default",
            differs="null after an end-of-sequence token, as at vLLM; SGLang has its id",
        ),
        Case(
            "test_finish_stop_eos",
            "a chat",
            ENDS,
            fields={**STOPPED, "choices.0.stop_reason": nothing},
            on="default",
            differs="as above",
        ),
        *(
            Case("test_finish_length", what, send, fields={"choices.0.finish_reason": "length", "choices.0.stop_reason": nothing})
            for what, send in (("a text", completion(max_tokens=5, temperature=0)), ("a chat", chat(max_tokens=5, temperature=0)))
        ),
    ),
)

TOO_LONG = error(code="context_length_exceeded", says="maximum context length is 512 tokens")

REQUEST_LENGTH = File(
    SGLANG,
    "validation/test_request_length_validation.py",
    (
        Case("test_input_length_longer_than_context_length", "1200 words", chat("hello " * 1200), 400, TOO_LONG),
        Case(
            "test_input_length_longer_than_maximum_allowed_length", "no room for an answer", completion([5] * 512), 400, TOO_LONG
        ),
        Case(
            "test_input_length_longer_than_context_length_streaming",
            "1200 words",
            chat("hello " * 1200, stream=True),
            400,
            TOO_LONG,
        ),
        Case(
            "test_max_tokens_validation",
            "1200 tokens",
            chat("hello ", max_tokens=1200, temperature=0),
            fields={"choices.0.finish_reason": one_of("length", "stop")},
            differs='`max_tokens` is a ceiling: agents always send 32 k and more; past the room left it ends with "length"',
        ),
    ),
    elsewhere={"test_token_ids_logprob_*": "keys of /generate, a route of SGLang's own"},
)

IGNORE_EOS = File(
    SGLANG,
    "validation/test_openai_server_ignore_eos.py",
    (
        Case(
            "test_ignore_eos",
            "goes on",
            ENDS,
            fields=STOPPED,
            holds=lambda x: (
                (on := x.again(ignore_eos=True)).finish() == "length"
                and on.usage()["completion_tokens"] > x.usage()["completion_tokens"]
            ),
            on="default",
        ),
    ),
)

STRICT_MODEL = File(
    SGLANG,
    "validation/test_strict_model_validation.py",
    (
        Case(
            "test_invalid_model_name_chat",
            "a wrong one",
            chat("hi", model="wrong"),
            404,
            error("model", says=("does not exist", "llama")),
            differs="404, as OpenAI's; there 400",
        ),
        Case(
            "test_invalid_model_name_completion",
            "a wrong one",
            completion("hi", model="wrong"),
            404,
            error("model", says="does not exist"),
            differs="as above",
        ),
        Case(
            "test_valid_model_name_chat",
            "an alias",
            chat("hi", model="other", max_tokens=5, temperature=0),
            fields={"choices.0.message.content": is_text},
        ),
    ),
    elsewhere={"test_lora_model_name": "adapters have tests of their own"},
)

FILES = (OPENAI, ANTHROPIC, LIVENESS, UDS, MATCHED_STOP, REQUEST_LENGTH, IGNORE_EOS, STRICT_MODEL)
