"""What a case is: what is sent, and what must come back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

LLAMA_CPP, VLLM, SGLANG = "llama.cpp", "vLLM", "SGLang"
FOLDERS = {
    LLAMA_CPP: "tools/server/tests/unit",
    VLLM: "tests/entrypoints/openai",
    SGLANG: "test/registered/openai_server",
}
"""Where the peers keep their tests."""


@dataclass(frozen=True)
class Send:
    """A request."""

    method: str
    path: str
    body: Any = None
    """JSON, or bytes as they are."""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        return isinstance(self.body, dict) and self.body.get("stream") is True

    def but(self, **changes: Any) -> Send:
        """The same request with other keys; a key with `...` is left out."""
        body = {**self.body, **changes}
        return replace(self, body={key: value for key, value in body.items() if value is not ...})


Holds = Callable[[Any], object]
"""Relations of an exchange: asserts, or returns whether they hold."""


@dataclass(frozen=True)
class Case:
    """A case of a peer's test."""

    test: str
    """The peer's name of the test."""
    what: str
    """Which case of it."""
    send: Send
    status: int = 200
    fields: Mapping[str, Any] = field(default_factory=dict)
    """By path, such as "choices.*.index": the value, or what says whether a value will do."""
    holds: Holds | None = None
    on: str = "tiny"
    """Which server: see `SERVERS` of the walk."""
    differs: str = ""
    """Why the answer is another than the peer's; the case has this server's."""


@dataclass(frozen=True)
class File:
    """A file of a peer's tests."""

    peer: str
    path: str
    cases: tuple[Case, ...]
    missing: Mapping[str, str] = field(default_factory=dict)
    """Cases that ought to pass and do not yet, by the peer's test: why. Not counted."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Tests of what is tested elsewhere, or of what this server has not: why. Not counted."""


def get(path: str, **headers: str) -> Send:
    return Send("GET", path, headers=headers)


def chat(content: Any = "What is the best book", *, system: str | None = "Book", **body: Any) -> Send:
    """A chat of a system's and a user's message, or of the messages in `body`."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": content})
    return Send("POST", "/v1/chat/completions", {"messages": messages, **body})


def completion(prompt: Any = "I believe the meaning of life is", **body: Any) -> Send:
    return Send("POST", "/v1/completions", {"prompt": prompt, **body})


def message(content: Any = "Hello", **body: Any) -> Send:
    """A message in Anthropic's form, greedy and of 16 tokens unless given."""
    given = {"model": "default", "max_tokens": 16, "temperature": 0, "messages": [{"role": "user", "content": content}], **body}
    return Send("POST", "/v1/messages", {key: value for key, value in given.items() if value is not ...})


def response(given: Any = "The capital of France is", **body: Any) -> Send:
    """A response, greedy unless given."""
    return Send("POST", "/v1/responses", {"model": "default", "temperature": 0, "input": given, **body})


def post(path: str, body: Any, **headers: str) -> Send:
    return Send("POST", path, body, headers)


Check = Callable[[Any], bool]


def above(least: float) -> Check:
    return lambda value: isinstance(value, (int, float)) and value > least


def at_most(most: float) -> Check:
    return lambda value: isinstance(value, (int, float)) and value <= most


def begins(text: str) -> Check:
    return lambda value: isinstance(value, str) and value.startswith(text)


def has(*texts: str) -> Check:
    return lambda value: all(text in value for text in texts)


def one_of(*values: Any) -> Check:
    return lambda value: value in values


def length(count: int) -> Check:
    return lambda value: len(value) == count


def matches(pattern: str) -> Check:
    return lambda value: re.search(pattern, value) is not None


def is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def is_a(kind: type) -> Check:
    return lambda value: isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def absent(value: Any) -> bool:
    return value is ...


def nothing(value: Any) -> bool:
    """Absent or null."""
    return value is ... or value is None


def look_up(value: Any, path: str) -> list[Any]:
    """What is at a path; `...` where nothing is."""
    if not path:
        return [value]
    head, _, rest = path.partition(".")
    if head == "*":
        found = list(value.values()) if isinstance(value, dict) else list(value)
        return [each for item in found for each in look_up(item, rest)]
    if isinstance(value, list) and re.fullmatch(r"-?\d+", head):
        index = int(head)
        return look_up(value[index], rest) if -len(value) <= index < len(value) else [...]
    if isinstance(value, dict) and head in value:
        return look_up(value[head], rest)
    return [...]


def check_fields(answer: Any, fields: Mapping[str, Any]) -> None:
    for path, expected in fields.items():
        found = look_up(answer, path)
        for value in found:
            good = expected(value) if callable(expected) else value == expected
            assert good, f"{path} is {value!r} in {json.dumps(answer, default=str)[:2000]}"


def error(param: str | None = None, code: str | None = None, *, says: str | tuple[str, ...] = ()) -> dict[str, Any]:
    """Fields of an error in OpenAI's form."""
    texts = (says,) if isinstance(says, str) else says
    fields: dict[str, Any] = {"error.message": has(*texts) if texts else is_text, "error.type": is_text, "error.code": is_text}
    if param is not None:
        fields["error.param"] = param
    if code is not None:
        fields["error.code"] = code
    return fields
