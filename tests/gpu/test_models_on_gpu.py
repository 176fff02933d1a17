"""Models on a GPU: the goldens, and the same tokens in whatever way a request is computed.

`make test-gpu` runs them; without a GPU they are skipped. With `--device cpu` they run there, to see that they work themselves.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import AUTO, FAMILIES, GOLDEN, begun_together, cases, generate, gguf_model, score, text_model, wait_until_idle
from drawn import DRAWN, write_model
from test_exactness import NEW, prompts
from test_golden import LOGPROB, MARGIN, check_teacher_forced, models
from test_real_models import check_perplexity

from mistral_paged import LoraAdapter, ModelDType, PagedCacheType, Runner, Which, _core

sys.path.append(str(Path(__file__).resolve().parents[2] / "benches"))

import gpu_model

pytestmark = pytest.mark.gpu
# A short convolution, Mamba-2 and the gated delta rule, without mixtures of experts beside them.
RECURRENT = ["lfm2", "granitemoehybrid-dense", "qwen3_5"]
EXACT = ["llama", "mistral-window", "gemma3", *RECURRENT]
DRAWN_MODELS = sorted(folder.name for folder in DRAWN.iterdir())
ADAPTERS = ["llama-all-rslora", "llama-dora", "llama-embed-head", "llama-save", "llama-tokens", "qwen2-bias", "qwen3-moe-experts"]


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Where models run; skips where there is no such GPU."""
    name: str = request.config.getoption("--device")
    if name.startswith("cuda:"):
        facts, ordinal = _core.survey(), int(name.removeprefix("cuda:"))
        there = ordinal < len(facts["gpus"])
        problem = facts["gpus"][ordinal]["problem"] if there else facts["driver_error"] or "there is no such GPU"
        if problem:
            pytest.skip(f"{name}: {problem}")
    return name


def runner(name: str, device: str, **options: Any) -> Runner:
    if "memory_goal" not in options:
        options["pa_ctxt_len"] = 8192
    return Runner(which=text_model(name), device=device, prefix_cache_n=0, **options)


_alone: dict[str, list[list[tuple[int, float]]]] = {}


@pytest.fixture(params=EXACT)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def alone(name: str, device: str) -> list[list[tuple[int, float]]]:
    """Each prompt alone: tokens and their log probabilities."""
    if name not in _alone:
        one = runner(name, device)
        _alone[name] = [generate(one, prompt, NEW) for prompt in prompts(32)]
    return _alone[name]


@models()
def test_goldens(folder: str, name: str, device: str) -> None:
    which = text_model(name) if folder == "text" else gguf_model(name)
    golden_runner = Runner(which=which, device=device, pa_ctxt_len=16384)
    assert sum(check_teacher_forced(golden_runner, case, LOGPROB, MARGIN) for case in cases(f"text/{name}")) > 100


@models([("text", name) for name in FAMILIES])
def test_goldens_of_more_families(folder: str, name: str, device: str) -> None:
    """The shortest and the longest prompt of each; a bundle has not all of them."""
    if not (GOLDEN / folder / name).is_dir():
        pytest.skip(f"there is no golden of {name} here")
    golden_runner = Runner(which=text_model(name), device=device, pa_ctxt_len=16384)
    some = sorted(cases(f"{folder}/{name}"), key=lambda case: len(case["prompt_ids"]))
    assert sum(check_teacher_forced(golden_runner, case, LOGPROB, MARGIN) for case in (some[0], some[-1])) > 20


@pytest.mark.parametrize("name", DRAWN_MODELS)
def test_drawn_goldens(name: str, device: str, tmp_path: Path) -> None:
    write_model(name, tmp_path)
    golden_runner = Runner(which=Which.Plain(str(tmp_path), dtype=ModelDType.F32), device=device, pa_ctxt_len=2048)
    assert sum(check_teacher_forced(golden_runner, case, LOGPROB, MARGIN) for case in cases(f"drawn/{name}")) > 20


@pytest.mark.parametrize("cache", ["F16", "BF16", "F8E4M3", "Int8"])
def test_wide_heads_round_as_on_the_cpu(cache: str, device: str, tmp_path: Path) -> None:
    """Heads of 256 beside such of 512, a prompt and what is decoded behind it."""
    write_model("gemma4-wide", tmp_path)
    ids = [10 + (7919 * i + i * i) % 490 for i in range(600)]
    options: dict[str, Any] = {"pa_cache_type": getattr(PagedCacheType, cache), "pa_ctxt_len": 2048}
    runners = [Runner(which=Which.Plain(str(tmp_path), dtype=ModelDType.F32), device=one, **options) for one in ("cpu", device)]
    want, got = ([token.logprob for token in score(one, ids)[1:]] for one in runners)
    assert got == pytest.approx(want, abs=0.05)
    want_new, got_new = (generate(one, ids[:300], NEW) for one in runners)
    same = next((i for i, (a, b) in enumerate(zip(want_new, got_new, strict=True)) if a[0] != b[0]), NEW)
    assert same >= NEW // 4
    assert [logprob for _, logprob in got_new[:same]] == pytest.approx([logprob for _, logprob in want_new[:same]], abs=0.05)


@pytest.mark.parametrize("graphs", [False, True])
def test_goldens_in_a_batch_of_bf16(graphs: bool, device: str) -> None:
    """Weights as they are stored, and more rows than kernels for few take: products of matrices, in graphs too."""
    options: dict[str, Any] = {} if device == "cpu" else {"cuda_graphs": graphs}
    which = text_model("llama", AUTO)
    batch = Runner(which=which, device=device, pa_ctxt_len=8192, prefix_cache_n=0, max_step_latency=3600, **options)
    some = cases("text/llama") * 4
    for case in some[:4]:
        check_teacher_forced(batch, case, 0.15, 0.3)
    made = begun_together(batch, lambda index: generate(batch, some[index]["prompt_ids"], NEW), len(some))
    for case, answer in zip(some, made, strict=True):
        # Past a near tie either way is right.
        sure = next((i for i, gap in enumerate(case["greedy_margins"]) if gap <= 0.3), NEW)
        assert [token for token, _ in answer[:sure]] == case["greedy_ids"][:sure]
        assert [logprob for _, logprob in answer[:sure]] == pytest.approx(case["greedy_logprobs"][:sure], abs=0.15)
    assert wait_until_idle(batch)["peak_running"] == len(some)


@pytest.fixture(scope="session")
def long_heads(tmp_path_factory: pytest.TempPathFactory) -> Which:
    """Random weights, with heads of a size that there are kernels of 16 and 8 bits for; those of the goldens are shorter."""
    folder = tmp_path_factory.mktemp("long-heads")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    gpu_model.write(folder, {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000, **heads})
    return Which.Plain(str(folder), dtype=ModelDType.F32)


@pytest.mark.parametrize("cache", ["F16", "BF16", "F8E4M3", "Int8"])
def test_caches_round_as_on_the_cpu(cache: str, device: str, long_heads: Which) -> None:
    ids = [(7919 * i + i * i) % 1000 for i in range(700)]
    options: dict[str, Any] = {"pa_cache_type": getattr(PagedCacheType, cache), "pa_ctxt_len": 4096}
    want, got = (score(Runner(which=long_heads, device=one, **options), ids) for one in ("cpu", device))
    # A last bit that differs may go to the next code.
    assert [token.logprob for token in got[1:]] == pytest.approx([token.logprob for token in want[1:]], abs=0.05)


@pytest.mark.parametrize("cache", ["BF16", "Int8"])
def test_decoding_goes_on_as_on_the_cpu(cache: str, device: str, long_heads: Which) -> None:
    """Keys that are cut into parts: the same tokens, up to a near tie."""
    options: dict[str, Any] = {"pa_cache_type": getattr(PagedCacheType, cache), "pa_ctxt_len": 4096}
    prompt = [(31 * i + i * i) % 1000 for i in range(1500)]
    want, got = (generate(Runner(which=long_heads, device=one, **options), prompt, NEW) for one in ("cpu", device))
    same = next((i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a[0] != b[0]), NEW)
    assert same >= NEW // 4
    assert [logprob for _, logprob in got[:same]] == pytest.approx([logprob for _, logprob in want[:same]], abs=0.05)


def test_real_models(smollm2_path: Path, gemma3_path: Path, device: str) -> None:
    """A text of known perplexity, by quantized weights."""
    for name, path in (("smollm2", smollm2_path), ("gemma3", gemma3_path)):
        check_perplexity(Runner(which=Which.GGUF(str(path)), device=device, pa_ctxt_len=4096), name, device, 768)


def test_a_batch(name: str, device: str, alone: list[Any]) -> None:
    batch = runner(name, device, max_step_latency=3600)
    assert begun_together(batch, lambda index: generate(batch, prompts(32)[index], NEW), 32) == alone
    assert wait_until_idle(batch)["peak_running"] == 32


@pytest.mark.parametrize("chunk", [33, 4096])
def test_chunks(name: str, chunk: int, device: str, alone: list[Any]) -> None:
    chunked = runner(name, device, max_num_batched_tokens=chunk)
    assert begun_together(chunked, lambda index: generate(chunked, prompts(32)[index], NEW), 32) == alone


def test_preemption(name: str, device: str, alone: list[Any]) -> None:
    tiny = runner(name, device, memory_goal="128tokens", pa_blk_size=8)
    # Whether requests outgrow the pool depends on the order in which their threads sent them; in a few rounds some do.
    for _ in range(20):
        assert begun_together(tiny, lambda index: generate(tiny, prompts(32)[index], NEW), 32) == alone
        if wait_until_idle(tiny)["preemptions"] > 0:
            return
    pytest.fail("no request was ever preempted")


@pytest.mark.parametrize("graphs", [False, True])
def test_graphs(name: str, graphs: bool, device: str, alone: list[Any]) -> None:
    if device == "cpu":
        pytest.skip("graphs are of a GPU")
    either = runner(name, device, cuda_graphs=graphs)
    assert begun_together(either, lambda index: generate(either, prompts(32)[index], NEW), 32) == alone


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_drafts(name: str, device: str, alone: list[Any]) -> None:
    """A model that is its own draft model is right about itself, and changes no token."""
    drafted = runner(name, device, which_draft=text_model(name), speculative="draft_model", speculative_gamma=3)
    assert generate(drafted, prompts(32)[0], NEW) == alone[0]
    assert begun_together(drafted, lambda index: generate(drafted, prompts(32)[index], NEW), 32) == alone
    stats = drafted.kv_cache_stats()
    assert stats["accepted_draft_tokens"] > 0.9 * stats["draft_tokens"] > 0


def test_weights_that_are_quantized_anew(device: str) -> None:
    prompt = prompts(1)[0]
    changed, loaded = runner("llama", device), runner("llama", device, in_situ_quant="Q8_0")
    changed.send_re_isq("Q8_0")
    assert generate(changed, prompt, NEW) == generate(loaded, prompt, NEW) != generate(runner("llama", device), prompt, NEW)


@pytest.mark.parametrize("name", ADAPTERS)
def test_goldens_of_adapters(name: str, device: str) -> None:
    if not (GOLDEN / "lora").is_dir():
        pytest.skip("there are no adapters here, as in a bundle")
    base = next(base for base in ("llama", "qwen2", "qwen3-moe") if name.startswith(base))
    which = Which.Lora(str(GOLDEN / "text" / base), [LoraAdapter("it", str(GOLDEN / "lora" / name))], dtype=ModelDType.F32)
    adapted = Runner(which=which, device=device, pa_ctxt_len=8192)
    for case in cases(f"lora/{name}"):
        made = generate(adapted, case["prompt_ids"], len(case["greedy_ids"]), adapter="it")
        sure = next((i for i, gap in enumerate(case["greedy_margins"]) if gap <= MARGIN), len(made))
        assert [token for token, _ in made[:sure]] == case["greedy_ids"][:sure]


def write_adapter(folder: Path, modules: str, rank: int, seed: int, dora: bool = False, saved: str = "") -> LoraAdapter:
    """An adapter of the golden llama with random weights: of modules that match, and of `saved` another weight."""
    generator = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray[Any, np.dtype[np.float32]]] = {}
    config = json.loads((GOLDEN / "text" / "llama" / "config.json").read_text())
    for name, shape in gpu_model.shapes(config):
        module = "base_model.model." + name.removesuffix(".weight")
        if saved and name.endswith(f"{saved}.weight"):
            tensors[f"{module}.weight"] = generator.normal(0, 0.1, shape).astype(np.float32)
        elif len(shape) == 2 and re.search(modules, name):
            tensors[f"{module}.lora_A.weight"] = generator.normal(0, 0.1, (rank, shape[1])).astype(np.float32)
            tensors[f"{module}.lora_B.weight"] = generator.normal(0, 0.1, (shape[0], rank)).astype(np.float32)
            if dora:
                tensors[f"{module}.lora_magnitude_vector"] = generator.uniform(0.5, 2, shape[:1]).astype(np.float32)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank, "use_dora": dora})
    )
    header, end = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [end, end + values.nbytes]}
        end += values.nbytes
    text = json.dumps(header).encode()
    data = b"".join(values.tobytes() for values in tensors.values())
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return LoraAdapter(folder.name, str(folder))


@pytest.mark.parametrize("graphs", [False, True])
def test_a_mixture_of_adapters(graphs: bool, device: str, tmp_path: Path) -> None:
    """Requests get what they get alone, with any adapter; those without what a model without adapters gives."""
    options: dict[str, Any] = {} if device == "cpu" else {"cuda_graphs": graphs}
    linear = "(self_attn|mlp)"
    adapters = [
        write_adapter(tmp_path / "attention", "[qv]_proj", 4, 1),
        write_adapter(tmp_path / "all", f"{linear}|lm_head", 16, 2),
        write_adapter(tmp_path / "dora", linear, 8, 3, dora=True),
        write_adapter(tmp_path / "saved", "k_proj", 8, 4, saved="mlp.down_proj"),
    ]
    later = write_adapter(tmp_path / "later", linear, 32, 5)
    choices = [*(adapter.alias for adapter in adapters), None]
    wishes = [(prompt, choices[i % len(choices)]) for i, prompt in enumerate(prompts(24))]

    def ask(one: Runner, index: int) -> list[tuple[int, float]]:
        prompt, alias = wishes[index]
        return generate(one, prompt, NEW, **({"adapter": alias} if alias else {}))

    which = Which.Lora(str(GOLDEN / "text" / "llama"), adapters, dtype=ModelDType.F32)
    mixed = Runner(which=which, device=device, prefix_cache_n=0, pa_ctxt_len=8192, max_step_latency=3600, **options)
    plain = runner("llama", device)
    alone = [ask(mixed if alias else plain, index) for index, (_, alias) in enumerate(wishes)]
    answers = [generate(plain, wishes[0][0], NEW), *(generate(mixed, wishes[0][0], NEW, adapter=one.alias) for one in adapters)]
    assert len(set(map(str, answers))) == len(answers)
    assert begun_together(mixed, lambda index: ask(mixed, index), len(wishes)) == alone
    # Another one in the place of an alias.
    mixed.load_lora_adapter("all", later.source, load_inplace=True)
    again = begun_together(mixed, lambda index: ask(mixed, index), len(wishes))
    assert [index for index, answer in enumerate(again) if answer != alone[index]] == list(range(1, len(wishes), len(choices)))


@pytest.mark.parametrize("chunk", [7, 4096])
def test_deterministic(chunk: int, device: str) -> None:
    """Weights as they are stored: the same bits alone and in a batch, in chunks of any size."""

    def deterministic(**options: Any) -> Runner:
        return Runner(which=text_model("llama", AUTO), device=device, pa_ctxt_len=8192, deterministic=True, **options)

    one = deterministic(prefix_cache_n=0)
    want = [generate(one, prompt, NEW) for prompt in prompts(16)]
    many = deterministic(max_num_batched_tokens=chunk)
    for _ in range(2):
        assert begun_together(many, lambda index: generate(many, prompts(16)[index], NEW), 16) == want
