"""Adapters from Python, over HTTP and from the command line. rust/engine/tests/lora.rs compares what they compute with PEFT."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mmproj
import mtp
import pytest
from conftest import GOLDEN
from test_server import COMMAND, Server, serving

from mistral_paged import (
    ChatCompletionRequest,
    CompletionRequest,
    LoraAdapter,
    LoraAdapterError,
    LoraAdapterGeneration,
    LoraRuntimeStatus,
    ModelDType,
    Runner,
    Which,
)

LLAMA = str(GOLDEN / "text" / "llama")
LORA = GOLDEN / "lora"
ATTN, LAYERS = str(LORA / "llama-attn"), str(LORA / "llama-layers")
IDS = list(range(40, 70))


def golden(name: str) -> dict[str, Any]:
    case: dict[str, Any] = json.loads((LORA / name / "golden.json").read_text())["completions"][1]
    return case


def tokens(runner: Runner, ids: list[int], **fields: Any) -> list[int]:
    request = CompletionRequest(ids, "m", max_tokens=16, temperature=0, ignore_eos=True, logprobs=0, **fields)
    content = runner.send_completion_request(request).choices[0].logprobs
    assert content is not None
    return [token.token_id for token in content.content]


def runner_with(adapters: list[LoraAdapter], **limits: Any) -> Runner:
    return Runner(which=Which.Lora(LLAMA, adapters, dtype=ModelDType.F32, **limits), pa_gpu_mem=16, num_threads=1)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with runner_with([LoraAdapter("attn", ATTN), LoraAdapter("layers", LAYERS)]) as runner:
        yield runner


def test_a_request_runs_with_the_adapter_it_names(runner: Runner) -> None:
    for alias, name in (("attn", "llama-attn"), ("layers", "llama-layers")):
        case = golden(name)
        assert tokens(runner, case["prompt_ids"], adapter=alias) == case["greedy_ids"][:16]
        assert tokens(runner, case["prompt_ids"], adapters=[alias]) == case["greedy_ids"][:16]
    plain = json.loads((GOLDEN / "text" / "llama" / "golden.json").read_text())["completions"][1]
    assert tokens(runner, plain["prompt_ids"]) == plain["greedy_ids"][:16]


def test_an_answer_tells_the_generation(runner: Runner) -> None:
    info = next(info for info in runner.list_lora_adapters() if info.alias == "attn")
    for adapter in ("attn", LoraAdapterGeneration(info.generation)):
        request = ChatCompletionRequest("Hello", "m", max_tokens=2, adapter=adapter)
        answer = runner.send_chat_completion_request(request)
        assert answer.adapter_generation == info.generation
        assert request.adapter == adapter
    assert runner.send_chat_completion_request(ChatCompletionRequest("Hello", "m", max_tokens=2)).adapter_generation is None


def test_what_is_loaded(runner: Runner) -> None:
    infos = runner.list_lora_adapters()
    assert [info.alias for info in infos] == ["attn", "layers"]
    assert all(len(info.generation) == 64 and info.rank == 4 for info in infos)
    assert infos[0].source == ATTN
    total = sum(info.bytes for info in infos)
    assert runner.lora_adapter_status() == LoraRuntimeStatus(2, 16, 256, total, 8 << 30)
    assert runner.memory_ledger().adapter_bytes >= total


def test_loading_and_unloading_while_it_runs() -> None:
    with runner_with([], max_adapters=1) as runner:
        with pytest.raises(LoraAdapterError) as error:
            tokens(runner, IDS, adapter="it")
        assert error.value.code == "lora_adapter_not_found"
        first = runner.load_lora_adapter("it", ATTN)
        was = tokens(runner, IDS, adapter="it")
        with pytest.raises(LoraAdapterError, match="max_adapters") as error:
            runner.load_lora_adapter("other", LAYERS)
        assert error.value.code == "lora_adapter_limit_exceeded"
        second = runner.load_lora_adapter("it", Path(LAYERS), load_inplace=True, expected_generation=first.generation)
        assert second.generation != first.generation
        assert tokens(runner, IDS, adapter="it") != was
        assert runner.unload_lora_adapter("it") == second
        assert runner.list_lora_adapters() == []


def test_the_older_names(tmp_path: Path) -> None:
    order = tmp_path / "order.json"
    which = Which.Lora(LLAMA, adapters_model_id=str(LORA), order=str(order), dtype=ModelDType.F32)
    order.write_text(json.dumps({"order": ["llama-attn", "llama-layers"], "layers": None}))
    with Runner(which=which, pa_gpu_mem=16, num_threads=1) as runner:
        plain = tokens(runner, IDS)
        runner.activate_adapters(["llama-attn"])
        assert tokens(runner, IDS) == tokens(runner, IDS, adapter="llama-attn") != plain
        assert tokens(runner, IDS, adapter="llama-layers") not in (plain, tokens(runner, IDS))
        assert tokens(runner, IDS, adapters=[]) == plain
        runner.activate_adapters([])
        assert tokens(runner, IDS) == plain
        with pytest.raises(ValueError, match="one adapter"):
            runner.activate_adapters(["llama-attn", "llama-layers"])
        with pytest.raises(LoraAdapterError, match="there are llama-attn, llama-layers"):
            runner.activate_adapters(["x"])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"adapters": ["a"], "adapter": "a"}, "older name"),
        ({"adapters": ["a", "b"]}, "one adapter"),
        ({"adapter": 3}, "`adapter` must be"),
        ({"adapters": "a"}, "`adapters` must be a list"),
    ],
)
def test_wrong_wishes_are_named(fields: dict[str, Any], why: str) -> None:
    with pytest.raises((ValueError, TypeError), match=why):
        ChatCompletionRequest("Hello", "m", **fields)


def test_wrong_adapters_are_named() -> None:
    with pytest.raises(TypeError, match="list of LoraAdapter"):
        runner_with(["x"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="`max_rank` must be an integer"):
        runner_with([], max_rank=0)
    with pytest.raises(LoraAdapterError, match="max_rank"):
        runner_with([LoraAdapter("it", ATTN)], max_rank=2)
    with pytest.raises(ValueError, match="go together"):
        Runner(which=Which.Lora(LLAMA, order="x"))
    with pytest.raises(ValueError, match="does not exist"):
        runner_with([LoraAdapter("it", "/nowhere/at/all")])
    with Runner(which=Which.Plain(LLAMA), pa_gpu_mem=16) as plain, pytest.raises(LoraAdapterError) as error:
        plain.load_lora_adapter("it", ATTN)
    assert error.value.code == "lora_runtime_unavailable"
    again = pickle.loads(pickle.dumps(error.value))
    assert (str(again), again.code) == (str(error.value), error.value.code)


def test_what_names_adapters_can_be_copied() -> None:
    adapter = LoraAdapter("a", "b", revision="main")
    which = Which.Lora("m", [adapter], max_rank=8)
    for same in (copy.deepcopy(which), pickle.loads(pickle.dumps(which))):
        assert same == which
        assert (
            repr(same) == "Which.Lora(model_id='m', adapters=[LoraAdapter(alias='a', source='b', revision='main')], max_rank=8)"
        )
    assert which != Which.Lora("m", [LoraAdapter("a", "b")], max_rank=8)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ["--lora", f"attn={ATTN}", "--lora", f"layers={LAYERS}", "--dtype", "f32", "--disable-access-log"]
    with serving(*options, MISTRAL_PAGED_LORA_ROOT=str(LORA)) as server:
        yield server


def test_an_adapter_is_a_model_of_the_server(server: Server) -> None:
    cards = {card["id"]: card for card in server.get("/v1/models").json["data"]}
    assert cards["attn"]["parent"] == "llama"
    assert cards["attn"]["root"] == "attn"
    assert cards["llama"]["parent"] is None
    assert server.get("/v1/models/layers").json["parent"] == "llama"
    for alias, name in (("attn", "llama-attn"), ("layers", "llama-layers")):
        case = golden(name)
        ask = {"prompt": case["prompt_ids"], "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
        for wish in ({"model": alias}, {"adapter": alias}, {"model": "default", "adapter": alias}):
            answer = server.complete(**ask, **wish)
            assert answer.status == 200, answer.body
            assert answer.json["choices"][0]["token_ids"] == case["greedy_ids"][:16], (alias, wish)
    assert server.complete(model="none").status == 404
    assert server.complete(adapter="none").error["code"] == "lora_adapter_not_found"
    assert server.complete(adapters=["attn"]).error["code"] == "unsupported_parameter"


def test_adapters_come_and_go_over_http(server: Server) -> None:
    loaded = server.post("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "llama-patterns"})
    assert loaded.status == 200, loaded.body
    listed = server.get("/v1/lora_adapters").json
    assert [card["id"] for card in listed["data"]] == ["attn", "layers", "new"]
    assert loaded.json in listed["data"]
    assert listed["status"]["num_adapters"] == 3
    assert server.complete(model="new").status == 200
    again = server.post("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "llama-patterns"})
    assert (again.status, again.error["code"]) == (409, "lora_adapter_already_loaded")
    wrong = server.post("/v1/unload_lora_adapter", {"lora_name": "new", "expected_generation": "0" * 64})
    assert (wrong.status, wrong.error["code"]) == (409, "lora_generation_mismatch")
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "new"}).status == 200
    assert server.complete(model="new").status == 404


@pytest.mark.parametrize("path", ["../text/llama", "/etc", "..", ".", "none", "llama-attn/../../text/llama", ""])
def test_only_what_is_below_the_root_is_loaded(server: Server, path: str) -> None:
    reply = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
    assert (reply.status, reply.error["code"]) == (404, "adapter_file_not_found")
    assert str(GOLDEN) not in reply.body.decode()


def test_a_file_that_is_wrong_is_told_without_its_place(server: Server) -> None:
    reply = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "qwen3-moe-experts"})
    assert reply.status == 400
    assert reply.error["message"].startswith("qwen3-moe-experts: it changes `model.layers.0.mlp.experts.0.down_proj`")
    assert server.post("/v1/load_lora_adapter", {"lora_name": "llama", "lora_path": "llama-attn"}).status == 400
    assert server.post("/v1/load_lora_adapter", {"lora_name": "x"}).error["code"] == "invalid_body"
    assert server.post("/v1/load_lora_adapter", b"{").error["code"] == "invalid_body"


def test_loading_over_http_must_be_allowed() -> None:
    with serving("--enable-lora", "--disable-access-log") as server:
        reply = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "llama-attn"})
        assert (reply.status, reply.error["code"]) == (403, "lora_updates_not_allowed")
        assert "MISTRAL_PAGED_LORA_ROOT" in reply.error["message"]
        assert server.get("/v1/lora_adapters").json["data"] == []
    with serving("--disable-access-log") as server:
        assert server.get("/v1/lora_adapters").error["code"] == "lora_runtime_unavailable"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=120)


def test_the_command_line_names_adapters(tmp_path: Path) -> None:
    options = ["--pa-memory-mb", "16", "--max-tokens", "12", "--temperature", "0", "--dtype", "f32", "-i", "Hello"]
    plain, attn = [run("run", "-m", LLAMA, *options, *more) for more in ([], ["--lora", f"it={ATTN}", "--adapter", "it"])]
    assert (plain.returncode, attn.returncode) == (0, 0), plain.stderr + attn.stderr
    assert plain.stdout != attn.stdout
    modules = run("run", "-m", LLAMA, *options, "--lora-modules", f"a={LAYERS}", f"it={ATTN}", "--adapter", "it")
    assert modules.stdout == attn.stdout, modules.stderr
    wrong = run("run", "-m", LLAMA, "-i", "x", "--lora", "it")
    assert (wrong.returncode, "ALIAS=SRC" in wrong.stderr) == (2, True), wrong.stderr
    order = tmp_path / "order.json"
    order.write_text(json.dumps({"order": ["llama-attn"]}))
    # The older form, with the flags of paged attention before its selector.
    older = ["--pa-gpu-mem", "16", "--pa-blk-size", "32", "-i", "lora", "-m", LLAMA, "-a", str(LORA), "-o", str(order)]
    chat = subprocess.run([COMMAND, *older], input="/adapter llama-attn\nHello\n", capture_output=True, text=True, timeout=120)
    assert chat.returncode == 0, chat.stderr
    assert chat.stdout
    assert "X-LoRA" in run("-i", "x-lora", "-m", LLAMA).stderr


def first_layer(adapter: str, folder: Path) -> None:
    """Of an adapter what is of the first layer."""
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((LORA / adapter / "adapter_config.json").read_bytes())
    parts = mtp.read(LORA / adapter / "adapter_model.safetensors")
    mtp.save({name: part for name, part in parts.items() if ".layers.0." in name}, folder / "adapter_model.safetensors")


def test_the_older_form_goes_on_files_of_one_piece(tmp_path: Path) -> None:
    order = tmp_path / "order.json"
    order.write_text(json.dumps({"order": ["llama-attn"]}))
    # The older file has one layer.
    first_layer("llama-attn", tmp_path / "llama-attn")
    file, older = GOLDEN / "gguf" / "llama.gguf", GOLDEN / "containers" / "ggml" / "llama-gqa2-f16.bin"
    f32: dict[str, Any] = {"dtype": ModelDType.F32}
    of_gguf = Which.LoraGGUF(str(file), None, str(LORA), str(order), **f32)
    of_ggml = Which.LoraGGML(str(older), None, str(tmp_path), str(order), gqa=2, **f32)
    assert of_gguf == Which.GGUF(str(file), adapters_model_id=str(LORA), order=str(order), **f32)
    assert of_ggml == Which.GGML(str(older), adapters_model_id=str(tmp_path), order=str(order), gqa=2, **f32)
    case = golden("llama-attn")
    for which, source in ((of_gguf, LORA), (of_ggml, tmp_path)):
        assert pickle.loads(pickle.dumps(which)) == which
        with Runner(which=which, pa_gpu_mem=16, num_threads=1) as runner:
            adapted = tokens(runner, case["prompt_ids"], adapter="llama-attn")
            assert adapted != tokens(runner, case["prompt_ids"])
            assert which is of_ggml or adapted == case["greedy_ids"][:16]
            runner.load_lora_adapter("again", source / "llama-attn")
            assert tokens(runner, case["prompt_ids"], adapter="again") == adapted
    for selector, path, source in (("lora-gguf", [file], LORA), ("lora-ggml", [older, "-g", 2], tmp_path)):
        line = ["--pa-gpu-mem", 16, "--pa-blk-size", 32, "-i", selector, "-m", *path, "-a", source, "-o", order]
        words = "/adapter llama-attn\nHello\n"
        chat = subprocess.run([COMMAND, *map(str, line)], input=words, capture_output=True, text=True, timeout=120)
        assert chat.returncode == 0, chat.stderr
        assert chat.stdout


def test_an_adapter_on_a_gguf_file() -> None:
    which = Which.GGUF(
        str(GOLDEN / "gguf" / "llama.gguf"),
        adapters=[LoraAdapter("it", str(LORA / "llama-gguf" / "llama-gguf.gguf"))],
        dtype=ModelDType.F32,
    )
    with Runner(which=which, pa_gpu_mem=16, num_threads=1) as runner:
        case = golden("llama-gguf")
        assert tokens(runner, case["prompt_ids"], adapter="it") == case["greedy_ids"][:16]


def test_an_adapter_of_llama_cpp_s_changes_convolutions(tmp_path: Path) -> None:
    folder = LORA / "lfm2-conv"
    config = json.loads((folder / "adapter_config.json").read_text())
    names = {
        "base_model.model.model.layers.": "blk.",
        "conv.in_proj": "shortconv.in_proj",
        "conv.out_proj": "shortconv.out_proj",
        "feed_forward.w1": "ffn_gate",
        "self_attn.out_proj": "attn_output",
        "lora_A.weight": "weight.lora_a",
        "lora_B.weight": "weight.lora_b",
    }
    entries = {
        "general.architecture": "lfm2",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(config["lora_alpha"]),
    }
    tensors = mmproj.read(folder, "adapter_model.safetensors")
    file = tmp_path / "adapter.gguf"
    mmproj.write(file, entries, {mmproj.renamed(name, names): values for name, values in tensors.items()})
    base = str(GOLDEN / "gguf" / "lfm2.gguf")
    which = Which.GGUF(base, dtype=ModelDType.F32, adapters=[LoraAdapter("conv", str(file))])
    with Runner(which=which, pa_gpu_mem=16, num_threads=1) as runner:
        case = golden("lfm2-conv")
        assert tokens(runner, case["prompt_ids"], adapter="conv")[:12] == case["greedy_ids"]
