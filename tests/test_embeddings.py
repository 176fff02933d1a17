"""Embeddings from Python, over HTTP and from the command line, compared with those of sentence-transformers."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import pickle
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest
from conftest import GOLDEN, runner_of, text_model, wait_until_idle
from test_server import COMMAND, Server, serving

from mistral_paged import CompletionRequest, EmbeddingArchitecture, EmbeddingRequest, ModelDType, Runner, Which, cli, loading

MODELS = ["embeddinggemma", "qwen3-embedding"]


def folder(model: str) -> Path:
    return GOLDEN / "embed" / model


@cache
def golden(model: str) -> list[dict[str, Any]]:
    return json.loads((folder(model) / "golden.json").read_text())["embeddings"]


@cache
def embedder(model: str) -> Runner:
    return Runner(which=Which.Embedding(str(folder(model)), dtype=ModelDType.F32), pa_ctxt_len=4096, num_threads=2)


def embed(model: str, given: Any, **options: Any) -> list[list[float]]:
    return embedder(model).send_embedding_request(EmbeddingRequest(given, **options))


def assert_close(vector: Sequence[float], expected: Sequence[float]) -> None:
    assert len(vector) == len(expected)
    assert max(abs(a - b) for a, b in zip(vector, expected, strict=True)) <= 5e-4


@pytest.mark.parametrize("model", MODELS)
def test_vectors_are_those_of_sentence_transformers(model: str) -> None:
    texts = [case["input"] for case in golden(model)]
    vectors = embed(model, texts)
    for case, vector in zip(golden(model), vectors, strict=True):
        assert_close(vector, case["vector"])
        assert embed(model, case["input"]) == [vector], "alone"
        assert embed(model, case["ids"]) == [vector], "from token ids"
        for key, expected in case.items():
            if key.startswith("vector_"):
                assert_close(embed(model, case["input"], dimensions=len(expected))[0], expected)
    assert embed(model, [case["ids"] for case in golden(model)]) == vectors
    assert embed(model, (case["ids"] for case in golden(model))) == vectors, "a generator"
    wait_until_idle(embedder(model))


def test_asyncio_gives_the_same_and_a_cancelled_task_frees_its_blocks() -> None:
    runner = embedder("qwen3-embedding")
    texts = [case["input"] for case in golden("qwen3-embedding")]

    async def both() -> list[list[float]]:
        task = asyncio.create_task(runner.aembed(EmbeddingRequest(texts * 20)))
        # The task runs until it waits for the engine, and has no news before the loop turns again.
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ValueError, match="dimensions is 65"):
            await runner.aembed(EmbeddingRequest("x", dimensions=65))
        return await runner.aembed(EmbeddingRequest(texts, dimensions=32))

    assert asyncio.run(both()) == embed("qwen3-embedding", texts, dimensions=32)
    wait_until_idle(runner)


def test_a_request_gives_back_its_fields_and_is_copied_and_pickled() -> None:
    options = {"truncate_sequence": True, "dimensions": 8, "prompt_name": "query", "priority": -1, "cache_salt": "s"}
    for given in ("a", ["a", "b"], [1, 2], [[1, 2], [3]], ["a"], [[1]]):
        request = EmbeddingRequest(given, **options)
        assert request.input == given
        assert (request.truncate_sequence, request.dimensions, request.prompt_name) == (True, 8, "query")
        assert pickle.loads(pickle.dumps(request)) == request
        assert request != EmbeddingRequest(given)
    assert repr(EmbeddingRequest("a", dimensions=8)) == "EmbeddingRequest(input='a', truncate_sequence=False, dimensions=8)"


def test_which_gives_back_its_fields() -> None:
    which = Which.Embedding("model", EmbeddingArchitecture.Qwen3Embedding, pooling="mean")
    assert (which.model_id, which.arch, which.pooling) == ("model", EmbeddingArchitecture.Qwen3Embedding, "mean")
    assert pickle.loads(pickle.dumps(which)) == which
    assert which != Which.Embedding("model", pooling="last")


@pytest.mark.parametrize("given", [5, None, {"a": 1}, {"a"}, b"a", [1.5], [["a"]], [1, "a"], ["a", 1]])
def test_what_is_no_input_is_a_type_error(given: Any) -> None:
    with pytest.raises(TypeError, match="`input` must be"):
        EmbeddingRequest(given)


def test_what_cannot_be_honoured_says_so() -> None:
    model = "embeddinggemma"
    for options, message in [
        ({"dimensions": 65}, "dimensions is 65; vectors of this model have 64"),
        ({"prompt_name": "title"}, 'the model\'s prompts are "query", "document"'),
    ]:
        with pytest.raises(ValueError, match=message):
            embed(model, "x", **options)
    with pytest.raises(ValueError, match="dimensions"):
        EmbeddingRequest("x", dimensions=0)
    with pytest.raises(ValueError, match=r"input\[1\] has .* tokens, and this model takes 512 at most"):
        embed(model, ["x", "sand " * 500])
    assert len(embed(model, "sand " * 500, truncate_sequence=True)[0]) == 64
    with pytest.raises(ValueError, match="input is empty"):
        embed(model, [[]])
    assert embed(model, []) == []
    with pytest.raises(ValueError, match="pooling"):
        Which.Embedding("x", pooling="max")
    with pytest.raises(NotImplementedError, match="imatrix"):
        Runner(which=Which.Embedding(str(folder(model)), imatrix="x"))
    with pytest.raises(ValueError, match="contradicts"):
        Runner(which=Which.Embedding(str(folder(model)), EmbeddingArchitecture.Qwen3Embedding))
    with pytest.raises(ValueError, match="loaded to make embeddings"):
        embedder(model).send_completion_request(CompletionRequest("x", "default"))


def test_a_model_of_text_says_how_it_makes_embeddings() -> None:
    with pytest.raises(ValueError, match=r"Which\.Embedding"):
        runner_of("text", "llama").send_embedding_request(EmbeddingRequest("x"))
    path = str(GOLDEN / "text" / "llama")
    with pytest.raises(ValueError, match="pooling"):
        Runner(which=Which.Embedding(path))
    with Runner(which=Which.Embedding(path, pooling="last"), pa_ctxt_len=512) as runner:
        vector = runner.send_embedding_request(EmbeddingRequest("x"))[0]
        assert math.isclose(sum(value * value for value in vector), 1, rel_tol=1e-5)
        assert runner.memory_ledger().weights_bytes > 0
    with pytest.raises(ValueError, match="serve embedding"):
        Runner(which=Which.Plain(str(folder("embeddinggemma"))))
    with Runner(which=Which.Embedding(str(GOLDEN / "gguf" / "qwen3.gguf"), pooling="mean"), pa_ctxt_len=512) as runner:
        assert len(runner.send_embedding_request(EmbeddingRequest(["x", "a longer one"]))) == 2


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("embedding", "--dtype", "f32", model=str(folder("embeddinggemma"))) as server:
        yield server


def test_the_route_answers_as_openai_does(server: Server) -> None:
    cases = golden("embeddinggemma")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none") as client:
        answer = client.embeddings.create(model="default", input=[case["input"] for case in cases])
        cut = client.embeddings.create(model="default", input=cases[1]["ids"], dimensions=16, encoding_format="float")
    for number, (case, item) in enumerate(zip(cases, answer.data, strict=True)):
        assert (item.index, item.object) == (number, "embedding")
        assert_close(item.embedding, case["vector"])
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(case["ids"]) for case in cases)
    assert_close(cut.data[0].embedding, cases[1]["vector_16"])
    body = {"input": cases[0]["input"], "encoding_format": "base64"}
    raw = base64.b64decode(server.post("/v1/embeddings", body).json["data"][0]["embedding"])
    plain = server.post("/v1/embeddings", {"input": cases[0]["input"]}).json["data"][0]["embedding"]
    assert struct.unpack("<64f", raw) == struct.unpack("<64f", struct.pack("<64f", *plain))
    named = server.post("/v1/embeddings", {"input": "Crabs walk sideways on the warm sand.", "prompt_name": "query"})
    assert_close(named.json["data"][0]["embedding"], cases[4]["vector"])


def test_the_route_refuses_by_name(server: Server) -> None:
    long = ["x", "sand " * 500]
    for body, code, param in [
        ({}, "missing_required_parameter", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": "x", "dimensions": 65}, "invalid_value", "dimensions"),
        ({"input": "x", "prompt_name": "title"}, "invalid_value", "prompt_name"),
        ({"input": "x", "encoding_format": "int8"}, "invalid_value", "encoding_format"),
        ({"input": "x", "input_type": "query"}, "unsupported_parameter", "input_type"),
        ({"input": "x", "top_k": 1}, "unknown_parameter", "top_k"),
        ({"input": long}, "context_length_exceeded", "input"),
        ({"input": "x", "truncate_prompt_tokens": 600}, "invalid_value", "truncate_prompt_tokens"),
    ]:
        reply = server.post("/v1/embeddings", body)
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, code, param), reply.body
    assert server.post("/v1/embeddings", {"input": "x", "model": "other"}).status == 404
    usage = server.post("/v1/embeddings", {"input": long, "truncate_prompt_tokens": -1}).json["usage"]
    assert usage["prompt_tokens"] == 512 + 3
    assert server.post("/v1/embeddings", {"input": long, "truncate_prompt_tokens": 20}).json["usage"]["prompt_tokens"] == 23
    text = server.complete()
    assert (text.status, "POST /v1/embeddings" in text.error["message"]) == (400, True)
    assert server.chat().status == 400


def test_the_routes_metrics_and_its_place_in_the_document(server: Server) -> None:
    before = int(server.metric("vllm:prompt_tokens_total"))
    tokens = server.post("/v1/embeddings", {"input": ["x", "y"]}).json["usage"]["prompt_tokens"]
    assert int(server.metric("vllm:prompt_tokens_total")) == before + tokens
    document = server.get("/openapi.json").json["paths"]["/v1/embeddings"]["post"]
    assert "dimensions" in document["requestBody"]["content"]["application/json"]["schema"]["properties"]


def test_a_server_of_text_says_how_embeddings_are_served() -> None:
    with serving(model=str(GOLDEN / "text" / "llama")) as server:
        reply = server.post("/v1/embeddings", {"input": "x"})
        assert reply.status == 400
        assert "serve embedding" in reply.error["message"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "embedding", "--lora", "a=b"], "adapters with embeddings"),
        (["serve", "embedding", "--arch", "llama"], "--arch llama"),
        (["serve", "--pooling", "mean"], "--pooling is about embeddings"),
        (["serve", "--arch", "embeddinggemma"], "serve embedding"),
        (["run", "--pooling", "mean"], "--pooling is about embeddings"),
    ],
)
def test_flags_that_do_not_go_together_say_so(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loading.select(cli.build_parser().parse_args(arguments))


def test_the_command_chooses_the_model() -> None:
    def select(*arguments: str) -> Which:
        return loading.select(cli.build_parser().parse_args(["serve", "embedding", *arguments]))

    model = str(folder("embeddinggemma"))
    assert select("-m", model) == Which.Embedding(model)
    assert select("-m", model, "--arch", "embeddinggemma") == Which.Embedding(model, EmbeddingArchitecture.EmbeddingGemma)
    gguf = str(GOLDEN / "gguf" / "qwen3.gguf")
    assert select("-m", gguf, "--pooling", "last") == Which.Embedding(gguf, pooling="last")
    file = select("-m", str(GOLDEN / "gguf"), "-f", "qwen3.gguf", "--pooling", "last")
    assert file == Which.Embedding(str(GOLDEN / "gguf"), pooling="last", quantized_filename=["qwen3.gguf"])
    assert text_model("llama") != Which.Embedding(str(GOLDEN / "text" / "llama"))
    assert COMMAND.exists()
