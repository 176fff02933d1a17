"""Models whose numbers or files go bad while they are in use."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import F32, GOLDEN
from test_server import HELLO, serving

from mistral_paged import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    InternalError,
    InvalidArgumentError,
    Runner,
    Which,
)

BAD = 300
"""A token whose embedding is not a number: whatever comes behind it is none either."""
CAUSE = r"logit of token \d+ is NaN; its weights or its input are damaged"


def with_a_bad_token(folder: Path) -> str:
    for file in (GOLDEN / "text" / "llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    embedding = json.loads(data[8:start])["model.embed_tokens.weight"]
    row = embedding["shape"][1] * 2
    begin = start + embedding["data_offsets"][0] + BAD * row
    data[begin : begin + row] = b"\xc0\x7f" * (row // 2)
    path.write_bytes(data)
    return str(folder)


@pytest.fixture
def damaged(tmp_path: Path) -> Runner:
    return Runner(which=Which.Plain(with_a_bad_token(tmp_path), dtype=F32), pa_ctxt_len=512, num_threads=1)


def chat(stream: bool) -> ChatCompletionRequest:
    """The first token that comes is the bad one."""
    bias = {BAD: 100.0}
    return ChatCompletionRequest("Hi", "m", stream=stream, max_tokens=5, temperature=0.0, logit_bias=bias, ignore_eos=True)


def test_logits_that_are_no_numbers_are_an_exception_with_the_cause(damaged: Runner) -> None:
    for logprobs in (None, 0):
        with pytest.raises(InternalError, match=CAUSE) as caught:
            damaged.send_completion_request(CompletionRequest([5, BAD], "m", max_tokens=4, logprobs=logprobs))
        assert isinstance(caught.value.response, CompletionResponse)
        assert caught.value.response.choices[0].finish_reason == "error"
    well = CompletionRequest([5, 6], "m", max_tokens=4, ignore_eos=True)
    assert damaged.send_completion_request(well).usage.completion_tokens == 4
    assert damaged.kv_cache_stats()["blocks_used"] == 0


def test_the_text_so_far_comes_with_the_exception(damaged: Runner) -> None:
    with pytest.raises(InternalError, match=CAUSE) as caught:
        damaged.send_chat_completion_request(chat(stream=False))
    assert isinstance(caught.value.response, ChatCompletionResponse)
    assert caught.value.response.choices[0].message.content == damaged.detokenize_text([BAD])
    assert caught.value.response.usage.completion_tokens == 1


def test_a_stream_raises_behind_its_last_chunk(damaged: Runner) -> None:
    stream = damaged.send_chat_completion_request(chat(stream=True))
    chunks = [next(stream), next(stream)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == damaged.detokenize_text([BAD])
    assert chunks[-1].choices[0].finish_reason == "error"
    with pytest.raises(InternalError, match=CAUSE):
        next(stream)
    assert list(stream) == []


def test_asyncio_raises_as_well(damaged: Runner) -> None:
    async def work() -> None:
        with pytest.raises(InternalError, match=CAUSE) as caught:
            await damaged.achat(chat(stream=False))
        assert isinstance(caught.value.response, ChatCompletionResponse)
        stream = await damaged.achat(chat(stream=True))
        chunks = [await anext(stream), await anext(stream)]
        assert chunks[-1].choices[0].finish_reason == "error"
        with pytest.raises(InternalError, match=CAUSE):
            await anext(stream)

    asyncio.run(work())


@pytest.mark.parametrize("options", [{}, {"n_choices": 8}, {"n_choices": 2, "best_of": 4}])
def test_the_cause_is_logged_once(damaged: Runner, caplog: pytest.LogCaptureFixture, options: dict[str, int]) -> None:
    with caplog.at_level(logging.ERROR, logger="mistral_paged"), pytest.raises(InternalError):
        damaged.send_completion_request(CompletionRequest([5, BAD], "m", max_tokens=4, **options))
    assert [message.count("is NaN") for message in caplog.messages] == [1]


def test_http_says_so(tmp_path: Path) -> None:
    with serving("--dtype", "f32", model=with_a_bad_token(tmp_path)) as server:
        reply = server.complete(prompt=[5, BAD])
        assert (reply.status, reply.error["code"]) == (500, "internal_error")
        assert "is NaN" in reply.error["message"]
        body = {"messages": HELLO, "max_tokens": 5, "temperature": 0, "logit_bias": {str(BAD): 100}}
        frames = server.events("/v1/chat/completions", body)
        assert any("is NaN" in frame and "error" in json.loads(frame) for frame in frames if frame != "[DONE]")
        assert server.complete(prompt=[5, 6]).status == 200


def test_a_grammar_that_cannot_be_gone_on_with_is_the_requests_own_fault() -> None:
    """Each letter more may be read in more ways."""
    grammar = 'start: s\ns: s s | "a"'
    folder = str(GOLDEN / "text" / "llama")
    runner = Runner(which=Which.Plain(folder, dtype=F32), pa_ctxt_len=2048, num_threads=1)
    bias = {runner.tokenize_text("a", False)[0]: 100.0}
    request = CompletionRequest([5, 6], "m", max_tokens=600, grammar=grammar, grammar_type="lark", logit_bias=bias)
    with pytest.raises(InvalidArgumentError, match="too complex to go on") as caught:
        runner.send_completion_request(request)
    assert caught.value.response.choices[0].text.startswith("aaaa")
    with serving("--dtype", "f32", model=folder) as server:
        options = {"guided_grammar": grammar, "logit_bias": {str(token): value for token, value in bias.items()}}
        reply = server.complete(prompt=[5, 6], max_tokens=600, **options)
        assert (reply.status, reply.error["code"]) == (400, "grammar_too_complex")
        frames = server.events("/v1/completions", {"prompt": [5, 6], "max_tokens": 600, **options})
        errors = [json.loads(frame).get("error", {}) for frame in frames if frame != "[DONE]"]
        assert "grammar_too_complex" in [error.get("code") for error in errors]


PROGRAM = """
    import os
    import shutil
    import sys
    from mistral_paged import *

    source, copy, dtype, kept = sys.argv[1:]
    shutil.copytree(source, copy) if os.path.isdir(source) else shutil.copy(source, copy)
    file = os.path.join(copy, "model.safetensors") if os.path.isdir(copy) else copy
    select = Which.Plain if os.path.isdir(copy) else Which.GGUF
    which = select(copy, dtype=getattr(ModelDType, dtype))
    runner = Runner(which, pa_ctxt_len=256, num_threads=1)
    request = CompletionRequest([5, 6, 7], "m", max_tokens=8, temperature=0.0)
    text = runner.send_completion_request(request).choices[0].text
    runner.pause()
    stream = runner.send_chat_completion_request(ChatCompletionRequest("Hi", "m", stream=True, max_tokens=200, ignore_eos=True))
    os.truncate(file, int(kept))
    runner.resume()
    for call in (lambda: list(stream), lambda: runner.send_completion_request(request).choices[0].text):
        try:
            answer = call()
            print("served" if isinstance(answer, list) else "same" if answer == text else "other")
        except InternalError as error:
            print("named" if file in str(error) and "shortened" in str(error) else error)
"""


def shortened(source: Path, copy: Path, dtype: str, kept: int) -> list[str]:
    """What a stream and a request come to in a program whose model was cut to `kept` bytes."""
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(source), str(copy), dtype, str(kept)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.split()


@pytest.mark.parametrize("kept", [0, 4096, 100_000])
def test_a_shortened_file_ends_requests_with_an_error_that_names_it(tmp_path: Path, kept: int) -> None:
    assert shortened(GOLDEN / "text" / "llama", tmp_path / "model", "F32", kept) == ["named", "named"]
    assert shortened(GOLDEN / "gguf" / "llama.gguf", tmp_path / "model.gguf", "F32", kept) == ["named", "named"]


def test_packed_weights_need_no_file(tmp_path: Path, smollm2_path: Path) -> None:
    assert shortened(smollm2_path, tmp_path / "smollm2.gguf", "Auto", 0) == ["served", "same"]
