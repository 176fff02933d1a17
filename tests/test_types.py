"""What type checkers and editors know of the interface."""

from __future__ import annotations

from pathlib import Path

import pytest

api = pytest.importorskip("mypy.api")

PROGRAM = """
from typing import assert_type

from mistral_paged import (
    ChatCompletionChunkResponse, ChatCompletionRequest, ChatCompletionResponse, ChatCompletionStreamer, Runner
)
from mistral_paged.aio import AsyncChatCompletionStreamer

def whole(runner: Runner) -> None:
    answer = runner.send_chat_completion_request(ChatCompletionRequest("Hi", "m", temperature=0.0))
    assert_type(answer, ChatCompletionResponse)
    assert_type(answer.choices[0].message.content, str | None)
    request = ChatCompletionRequest("Hi", "m", stream=False)
    assert_type(runner.send_chat_completion_request_to_model(request, "m"), ChatCompletionResponse)

def streamed(runner: Runner) -> None:
    stream = runner.send_chat_completion_request(ChatCompletionRequest("Hi", "m", max_tokens=3, stream=True))
    assert_type(stream, ChatCompletionStreamer)
    assert_type([chunk for chunk in stream], list[ChatCompletionChunkResponse])

def either(runner: Runner, stream: bool, request: ChatCompletionRequest) -> None:
    answer = runner.send_chat_completion_request(ChatCompletionRequest("Hi", "m", stream=stream))
    assert_type(answer, ChatCompletionResponse | ChatCompletionStreamer)
    assert_type(runner.send_chat_completion_request(request), ChatCompletionResponse | ChatCompletionStreamer)

async def awaited(runner: Runner) -> None:
    assert_type(await runner.achat(ChatCompletionRequest("Hi", "m")), ChatCompletionResponse)
    assert_type(await runner.achat(ChatCompletionRequest("Hi", "m", stream=True)), AsyncChatCompletionStreamer)

def closed() -> None:
    with Runner(which=...) as runner:  # type: ignore[arg-type]
        assert_type(runner, Runner)
"""


def test_what_comes_back_of_a_chat_follows_from_stream(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    out, errors, status = api.run(["--strict", "--python-version=3.11", f"--cache-dir={tmp_path}", str(program)])
    assert status == 0, out + errors
