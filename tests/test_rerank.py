"""Scores of pairs of texts from Python and over HTTP, and vectors of encoders, compared with those of sentence-transformers."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN, runner_of, wait_until_idle
from drawn import write_weights
from test_server import Server, serving

from mistral_paged import EmbeddingRequest, ModelDType, RerankRequest, Runner, Which


def golden(name: str) -> Any:
    return json.loads((GOLDEN / "encoders" / name / "golden.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two encoders and a decoder with their weights, which are drawn from their names."""
    place = tmp_path_factory.mktemp("encoders")
    for name in ("bert", "bert-rerank", "qwen3-logit-rerank"):
        copy = place / name
        shutil.copytree(GOLDEN / "encoders" / name, copy, ignore=shutil.ignore_patterns("*.safetensors"))
        write_weights(copy, copy, str.lower)
    return place


@pytest.fixture(scope="module")
def scorer(folder: Path) -> Iterator[Runner]:
    with Runner(
        which=Which.Embedding(str(folder / "bert-rerank"), dtype=ModelDType.F32), pa_ctxt_len=1024, num_threads=2
    ) as runner:
        yield runner


def request(**options: Any) -> RerankRequest:
    case = golden("bert-rerank")
    return RerankRequest(case["query"], case["documents"], **options)


def near(got: list[float], expected: list[float]) -> bool:
    return len(got) == len(expected) and all(abs(a - b) <= 2e-5 for a, b in zip(got, expected, strict=True))


def test_scores_are_those_of_sentence_transformers(scorer: Runner) -> None:
    expected = golden("bert-rerank")["logits"]
    scores = scorer.send_rerank_request(request())
    assert near(scores, expected)
    assert asyncio.run(scorer.arerank(request())) == scores
    assert scorer.send_rerank_request(RerankRequest("x", [])) == []
    wait_until_idle(scorer)


def test_a_decoder_scores_by_the_logits_of_two_tokens(folder: Path) -> None:
    case = golden("qwen3-logit-rerank")
    which = Which.Embedding(str(folder / "qwen3-logit-rerank"), dtype=ModelDType.F32)
    with Runner(which=which, pa_ctxt_len=1024, num_threads=2) as runner:
        scores = runner.send_rerank_request(RerankRequest(case["query"], case["documents"], truncate_sequence=True))
        assert near(scores, case["logits"])
    with serving("embedding", "--dtype", "f32", model=str(folder / "qwen3-logit-rerank")) as server:
        body = {"query": case["query"], "documents": case["documents"], "truncate_sequence": True}
        results = {result["index"]: result["relevance_score"] for result in server.post("/v1/rerank", body).json["results"]}
        assert near([results[index] for index in range(4)], case["logits"])


def test_an_encoder_makes_vectors(folder: Path) -> None:
    cases = golden("bert")
    with Runner(which=Which.Embedding(str(folder / "bert"), dtype=ModelDType.F32), pa_ctxt_len=1024, num_threads=2) as runner:
        vectors = runner.send_embedding_request(EmbeddingRequest([case["input"] for case in cases]))
        assert all(near(vector, case["vector"]) for vector, case in zip(vectors, cases, strict=True))
        with pytest.raises(ValueError, match="does not score pairs"):
            runner.send_rerank_request(request())
    with pytest.raises(ValueError, match=r"Which\.Embedding"):
        Runner(which=Which.Plain(str(folder / "bert")))


def test_a_request_gives_back_its_fields_and_is_copied_and_pickled() -> None:
    given = request(truncate_sequence=True, priority=-1, deadline=5.0, tenant="t")
    assert (given.query, given.documents, given.truncate_sequence) == (
        *map(golden("bert-rerank").get, ("query", "documents")),
        True,
    )
    assert (given.priority, given.deadline, given.tenant) == (-1, 5.0, "t")
    assert pickle.loads(pickle.dumps(given)) == given != request()
    assert repr(RerankRequest("q", ("a", "b"))) == "RerankRequest(query='q', documents=['a', 'b'], truncate_sequence=False)"
    assert RerankRequest("q", (text for text in "ab")).documents == ["a", "b"]


@pytest.mark.parametrize("documents", [5, None, "a", b"a", {"a"}, {"a": 1}, [1], ["a", None]])
def test_what_are_no_documents_is_a_type_error(documents: Any) -> None:
    with pytest.raises(TypeError, match="`documents` must be"):
        RerankRequest("q", documents)


def test_what_cannot_be_honoured_says_so(scorer: Runner) -> None:
    long = RerankRequest("A crab.", ["x", "crab " * 300])
    with pytest.raises(ValueError, match=r"documents\[1\] and the query have \d+ tokens, and this model takes 150 at most"):
        scorer.send_rerank_request(long)
    assert len(scorer.send_rerank_request(RerankRequest(long.query, long.documents, truncate_sequence=True))) == 2
    with pytest.raises(ValueError, match="scores pairs of texts"):
        scorer.send_embedding_request(EmbeddingRequest("x"))
    with pytest.raises(ValueError, match="does not score pairs"):
        runner_of("text", "llama").send_rerank_request(request())
    with pytest.raises(ValueError, match="deadline"):
        request(deadline=0.0)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving("embedding", "--dtype", "f32", model=str(folder / "bert-rerank")) as server:
        yield server


def test_the_route_gives_the_best_first(server: Server) -> None:
    case = golden("bert-rerank")
    body = {"query": case["query"], "documents": case["documents"]}
    reply = server.post("/v1/rerank", body).json
    order = sorted(range(4), key=lambda index: -case["logits"][index])
    assert [result["index"] for result in reply["results"]] == order
    assert near([result["relevance_score"] for result in reply["results"]], [case["logits"][index] for index in order])
    assert [result["document"]["text"] for result in reply["results"]] == [case["documents"][index] for index in order]
    tokens = sum(map(len, case["ids"]))
    assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    for path in ("/rerank", "/v2/rerank"):
        objects = [{"text": text} for text in case["documents"]]
        reply = server.post(path, {**body, "documents": objects, "top_n": 2, "return_documents": False}).json
        assert [(result["index"], result.get("document")) for result in reply["results"]] == [
            (index, None) for index in order[:2]
        ]
    assert server.get("/v1/models").json["data"][0]["kind"] == "rerank"


def test_the_route_refuses_by_name(server: Server) -> None:
    for body, code, param in [
        ({"documents": ["a"]}, "missing_required_parameter", "query"),
        ({"query": "q", "documents": []}, "invalid_value", "documents"),
        ({"query": "q", "documents": ["a"], "rank_fields": ["x"]}, "unsupported_parameter", "rank_fields"),
        ({"query": "q", "documents": ["a"], "top_k": 1}, "unknown_parameter", "top_k"),
        ({"query": "q", "documents": ["crab " * 300]}, "context_length_exceeded", "documents"),
    ]:
        reply = server.post("/v1/rerank", body)
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, code, param), reply.body
    cut = server.post("/v1/rerank", {"query": "q", "documents": ["crab " * 300], "truncate_prompt_tokens": -1}).json
    assert cut["usage"]["prompt_tokens"] == 150
    for path, body in [("/v1/embeddings", {"input": "x"}), ("/v1/completions", {"prompt": "x"})]:
        reply = server.post(path, body)
        assert (reply.status, "POST /v1/rerank" in reply.error["message"]) == (400, True), reply.body
    paths = server.get("/openapi.json").json["paths"]
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        body = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert {"query", "documents", "top_n"} <= set(body["properties"])
