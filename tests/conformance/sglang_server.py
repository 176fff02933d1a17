"""Cases of SGLang's server: how it lives, how answers end, and what is too long."""

from __future__ import annotations

import http.client
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
    chat,
    completion,
    error,
    get,
    is_text,
    nothing,
    one_of,
)
from .sglang import SHORT


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

FILES = (LIVENESS, UDS, MATCHED_STOP, REQUEST_LENGTH, IGNORE_EOS, STRICT_MODEL)
