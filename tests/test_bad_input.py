"""What cannot be honoured is refused by an exception that names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN, complete, generate, runner_of, text_model, wait_until_idle

from mistral_paged import (
    Architecture,
    ChatCompletionRequest,
    CompletionRequest,
    DiffusionArchitecture,
    InvalidArgumentError,
    MistralPagedError,
    Runner,
    SpeechLoaderType,
    ToolChoice,
    Which,
)

USER = [{"role": "user", "content": "Hello"}]
NAN = float("nan")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"messages": []}, "`messages` is empty"),
        ({"messages": [{"role": "user"}]}, r"`messages\[0\]` has no 'content'"),
        ({"messages": [{"content": "x"}]}, r"`messages\[0\]` has no 'role'"),
        ({"messages": [{"role": "user", "content": None}]}, "content.*null"),
        ({"messages": [{"role": 1, "content": "x"}]}, "role.*got 1"),
        ({"messages": [{"role": "user", "content": []}]}, "empty list"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "unknown type 'smell'"),
        ({"messages": ["x"]}, r"`messages\[0\]` must be a dict"),
        ({"max_tokens": 0}, r"max_tokens must be at least 1\."),
        ({"max_tokens": -1}, "max_tokens.*-1"),
        ({"n_choices": 0}, r"Number of choices must be greater than 0\."),
        ({"temperature": NAN}, "temperature.*NaN"),
        ({"temperature": -1.0}, "temperature.*-1"),
        ({"temperature": float("inf")}, "temperature.*inf"),
        ({"top_p": 0.0}, "top_p.*0"),
        ({"top_p": 1.5}, r"top_p.*1\.5"),
        ({"top_p": NAN}, "top_p.*NaN"),
        ({"top_k": -3}, "top_k.*-3"),
        ({"min_p": 2.0}, "min_p.*2"),
        ({"presence_penalty": NAN}, "presence_penalty.*NaN"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty.*inf"),
        ({"repetition_penalty": 0.0}, "repetition_penalty.*0"),
        ({"dry_multiplier": NAN}, "dry_multiplier.*NaN"),
        ({"dry_multiplier": 1.0, "dry_base": 0.1}, r"dry_base.*0\.1"),
        ({"dry_base": 1.5}, "dry_base.*need.*dry_multiplier"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias.*-1"),
        ({"logit_bias": {512: 1.0}}, "logit_bias.*512"),
        ({"logit_bias": {1: NAN}}, "logit_bias.*NaN"),
        ({"top_logprobs": 3}, "top_logprobs.*logprobs=True"),
        ({"top_logprobs": -3, "logprobs": True}, "top_logprobs.*-3"),
        ({"top_logprobs": 100_000, "logprobs": True}, "top_logprobs.*100000.*at most 512"),
        (
            {"top_logprobs": 500, "logprobs": True, "max_tokens": 400, "n_choices": 40},
            "500.*1048576 log probabilities.*max_tokens",
        ),
        ({"n_choices": 1025}, "n_choices.*from 1 to 1024"),
        ({"max_tokens": 10**5000}, "max_tokens.*from 0 to"),
        ({"model": "\ud800"}, "lone surrogate"),
        ({"stop_seqs": [""]}, "stop_seqs.*empty string"),
        ({"reasoning_effort": "much"}, 'reasoning_effort.*"much"'),
        ({"reasoning_effort": "off", "enable_thinking": True}, "reasoning_effort.*enable_thinking"),
    ],
)
def test_request_values(llama: Runner, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llama.send_chat_completion_request(ChatCompletionRequest(**{"messages": USER, "model": "m", "max_tokens": 1, **options}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "prompt is empty|`prompt` is empty"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": [5], "model": "\ud800"}, "lone surrogate"),
        ({"prompt": [1, 512]}, "512"),
        ({"prompt": [-1]}, "-1"),
        ({"prompt": [2**40]}, str(2**40)),
        ({"best_of": 2, "n_choices": 3}, "best_of.*2.*3"),
        ({"best_of": 1, "n_choices": 3}, "best_of.*1.*3"),
        ({"n_choices": 2**62}, f"n_choices.*{2**62}"),
        ({"best_of": 2**62}, f"best_of.*{2**62}"),
        ({"best_of": 0}, "best_of"),
        ({"logprobs": -1}, "logprobs.*-1"),
    ],
)
def test_completion_values(llama: Runner, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llama.send_completion_request(CompletionRequest(**{"prompt": [5], "model": "m", "max_tokens": 1, **options}))


@pytest.mark.parametrize(
    "options",
    [{"unknown": 1}, {"messages": 5}, {"messages": {"role": "user"}}, {"temperature": "hot"}, {"model": 3}, {"stop_seqs": 5}],
)
def test_request_types(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        ChatCompletionRequest(**{"messages": USER, "model": "m", **options})
    if "messages" not in options:
        with pytest.raises(TypeError):
            CompletionRequest(**{"prompt": "x", "model": "m", **options})


def test_prompt_of_a_wrong_type() -> None:
    for prompt in (5, ["a"], [1.5], None):
        with pytest.raises(TypeError, match="`prompt` must be a str or token ids"):
            CompletionRequest(prompt, "m")


@pytest.mark.parametrize(
    "options",
    [
        {"web_search_options": {}},
        {"max_tool_rounds": 1},
        {"enable_code_execution": True},
        {"enable_shell": True},
        {"session_id": "x"},
        {"files": []},
    ],
)
def test_later_request_fields_say_so(options: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"`{next(iter(options))}"):
        ChatCompletionRequest(USER, "m", **options)


def test_later_message_parts_say_so() -> None:
    with pytest.raises(ValueError, match=r"tool_calls.*function\.name"):
        ChatCompletionRequest([{"role": "assistant", "content": "", "tool_calls": [{}]}], "m")
    with pytest.raises(NotImplementedError, match="tool_choice"):
        CompletionRequest("x", "m", tool_choice=ToolChoice.Auto)
    with pytest.raises(NotImplementedError, match="tool_schemas"):
        CompletionRequest("x", "m", tool_schemas=["{}"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pa_blk_size": 7}, r"Block size must be in \[8, 16, 32\], got 7"),
        ({"max_seqs": 0}, "max_seqs.*0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens.*0"),
        ({"prompt_batchsize": 0}, "prompt_batchsize.*0"),
        ({"prefix_cache_n": -1}, "prefix_cache_n.*-1"),
        ({"num_threads": 0}, "num_threads.*0"),
        ({"cpu_tier": "avx9000"}, "avx9000"),
        ({"cuda_graphs": True, "device": "cpu"}, 'device="cuda:0"'),
        ({"attention_backend": "plain", "device": "cpu"}, 'device="cuda:0"'),
        ({"attention_backend": "flash"}, '"split" or "plain"'),
        ({"attention_backend": "split", "deterministic": True, "device": "cuda:0"}, "leave one out"),
        *[
            ({"device": name}, f'^`device` must be "auto", "cpu" or an NVIDIA GPU such as "cuda:0", got "{name}"$')
            for name in ("metal", "mps", "cuda", "cuda:-1", "gpu", "")
        ],
        ({"paged_attn": True, "no_paged_attn": True}, "paged_attn and no_paged_attn are mutually exclusive"),
        ({"pa_gpu_mem": 64, "pa_gpu_mem_usage": 0.5}, "`pa_gpu_mem` and `pa_gpu_mem_usage`"),
        ({"pa_gpu_mem": 64, "pa_ctxt_len": 100}, "`pa_gpu_mem` and `pa_ctxt_len`"),
        ({"pa_gpu_mem_usage": 0.5, "memory_goal": "1GiB"}, "`pa_gpu_mem_usage` and `memory_goal`"),
        ({"pa_gpu_mem": 0}, "pa_gpu_mem.*0"),
        ({"pa_gpu_mem_usage": NAN}, r"must be finite and in \(0, 1\]"),
        ({"pa_gpu_mem_usage": 1e-320}, r"must be finite and in \(0, 1\].*pa_gpu_mem_usage"),
        ({"pa_gpu_mem_usage": 1.5}, r"must be finite and in \(0, 1\]"),
        ({"pa_ctxt_len": -5}, "pa_ctxt_len.*-5"),
        ({"max_step_latency": 0.0}, "`max_step_latency` must be a finite number of seconds above 0, got 0"),
        ({"max_step_latency": float("nan")}, "`max_step_latency` must be a finite number of seconds above 0, got NaN"),
        ({"memory_goal": 2.0}, r"must be finite and in \(0, 1\]"),
        ({"memory_goal": "lots"}, "KV capacity must start with a positive integer"),
        ({"memory_goal": "0GiB"}, "KV capacity must start with a positive integer"),
        ({"memory_goal": "5parsecs"}, "unknown unit"),
        ({"token_source": "nonsense"}, "Invalid token source format"),
        ({"token_source": "env:NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE"),
        ({"chat_template": "/nowhere/own.jinja"}, "/nowhere/own.jinja"),
        ({"pa_gpu_mem": 1 << 40}, r"asked to take \d+ bytes.* has \d+ bytes"),
    ],
)
def test_runner_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MistralPagedError, match=message):
        Runner(which=text_model("llama"), **options)


def test_a_pool_beyond_the_machine_names_both_figures() -> None:
    with pytest.raises(ValueError, match=r"\d+.*\d+") as caught:
        Runner(which=text_model("llama"), pa_gpu_mem=1 << 32)
    assert "MB" in str(caught.value) or "bytes" in str(caught.value)


def test_asking_for_much_memory_costs_nothing_until_it_is_needed() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    runner = Runner(which=text_model("llama"), pa_gpu_mem=4096)
    generate(runner, [5, 6, 7], 4)
    assert runner.kv_cache_stats()["tokens_total"] > 1_000_000
    assert resident() - before < 512 << 20


@pytest.mark.parametrize("options", [{"unknown": 1}, {"memory_goal": True}, {"memory_goal": []}, {"max_seqs": "many"}])
def test_runner_types(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        Runner(which=text_model("llama"), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"num_device_layers": ["0:10"]},
        {"enable_search": True},
        {"tool_callbacks": {}},
    ],
)
def test_later_runner_arguments_say_so(options: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"`{next(iter(options))}"):
        Runner(which=text_model("llama"), **options)


@pytest.mark.parametrize(
    ("kind", "arguments", "options"),
    [
        ("XLora", ("adapters", "order"), {"tgt_non_granular_index": 1, "write_uqff": "x", "hf_cache_path": "x"}),
        ("XLoraGGUF", ("model", "file", "adapters", "order"), {"tgt_non_granular_index": 1}),
        ("XLoraGGML", ("model", "file", "adapters", "order"), {}),
        ("DiffusionPlain", ("model", DiffusionArchitecture.Flux), {}),
        ("Speech", ("model", SpeechLoaderType.Dia), {"dac_model_id": "x"}),
    ],
)
def test_later_kinds_of_model_say_so(kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=rf"Which\.{kind} is not supported yet"):
        getattr(Which, kind)(*arguments, **options)


EITHER = [
    "topology",
    "organization",
    "write_uqff",
    "from_uqff",
    "matformer_config_path",
    "matformer_slice_name",
    "auto_map_params",
]


@pytest.mark.parametrize("field", EITHER)
def test_later_fields_of_which_say_so(field: str) -> None:
    with pytest.raises(NotImplementedError, match=f"`{field}`"):
        Runner(which=Which.Plain(str(GOLDEN / "text" / "llama"), **{field: "x"}))


@pytest.mark.parametrize("field", EITHER)
def test_later_fields_of_gguf_say_so(field: str) -> None:
    for value in ("x", 16, ["x"]):
        with pytest.raises(NotImplementedError, match=f"`{field}`"):
            Runner(which=Which.GGUF(str(GOLDEN / "gguf" / "llama.gguf"), **{field: value}))


def test_which_refuses_unknown_fields() -> None:
    with pytest.raises(TypeError, match="unknown"):
        Which.Plain("model", unknown=1)
    with pytest.raises(TypeError, match="unknown"):
        Which.GGUF("model", unknown=1)
    with pytest.raises(TypeError, match="quantized_filename"):
        Which.GGUF("model", 5)


FAR = [-(2**200), 10**30, 2**70]


@pytest.mark.parametrize("value", [-1, *FAR])
@pytest.mark.parametrize("name", ["seed", "max_tokens", "n_choices", "top_k", "dry_allowed_length", "top_logprobs"])
def test_integers_out_of_range_are_named(llama: Runner, name: str, value: int) -> None:
    options = {"max_tokens": 1, "dry_multiplier": 1.0, "logprobs": True, name: value}
    with pytest.raises(InvalidArgumentError, match=rf"`{name}`.* {value}\b"):
        llama.send_chat_completion_request(ChatCompletionRequest(USER, "m", **options))


@pytest.mark.parametrize("value", [-1, *FAR])
def test_integers_of_completions_out_of_range_are_named(llama: Runner, value: int) -> None:
    for name in ("best_of", "logprobs"):
        with pytest.raises(InvalidArgumentError, match=rf"`{name}`.* {value}\b"):
            CompletionRequest([5], "m", **{name: value})
    with pytest.raises(InvalidArgumentError, match=rf"`logit_bias`.* {value};"):
        CompletionRequest([5], "m", logit_bias={value: 1.0})
    with pytest.raises(InvalidArgumentError, match=rf"`prompt`.* {value};"):
        CompletionRequest([5, value], "m")
    with pytest.raises(InvalidArgumentError, match=rf"`tokens`.* {value};"):
        llama.detokenize_text([value])


@pytest.mark.parametrize("value", [-1, *FAR])
@pytest.mark.parametrize(
    "name",
    [
        "max_seqs",
        "prefix_cache_n",
        "state_snapshot_mb",
        "pa_gpu_mem",
        "pa_ctxt_len",
        "pa_blk_size",
        "seed",
        "max_num_batched_tokens",
        "prompt_batchsize",
        "num_threads",
    ],
)
def test_integers_of_runners_out_of_range_are_named(name: str, value: int) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"`{name}`.* {value}\b"):
        Runner(which=text_model("llama"), **{name: value})


def test_the_largest_seed_is_taken(llama: Runner) -> None:
    generate(llama, [5], 1, seed=2**64 - 1)
    with pytest.raises(InvalidArgumentError, match=rf"`seed`.*{2**64 - 1}.*{2**64}"):
        generate(llama, [5], 1, seed=2**64)


def test_an_integer_of_thousands_of_digits_is_named(llama: Runner) -> None:
    with pytest.raises(InvalidArgumentError, match=r"`max_tokens`.*thousands of digits"):
        generate(llama, [5], 1 << 100_000)
    for value in (10**400, -(10**400)):
        with pytest.raises(InvalidArgumentError, match=r"temperature.*inf"):
            generate(llama, [5], 1, temperature=value)


@pytest.mark.parametrize("text", ["\ud800", "a\udfff" + "b" * 1000])
def test_a_lone_surrogate_is_named(llama: Runner, text: str) -> None:
    for call in (
        lambda: CompletionRequest(text, "m"),
        lambda: CompletionRequest("x", "m", suffix=text),
        lambda: CompletionRequest("x", "m", stop_seqs=text),
        lambda: CompletionRequest("x", "m", stop_seqs=["y", text]),
        lambda: ChatCompletionRequest(text, "m"),
        lambda: ChatCompletionRequest([{"role": "user", "content": text}], "m"),
        lambda: llama.tokenize_text(text),
    ):
        with pytest.raises(InvalidArgumentError, match=r"lone surrogate.*\\ud[8f]") as caught:
            call()
        assert len(str(caught.value)) < 400
    for call, argument in (
        (lambda: CompletionRequest("x", "m", suffix=text), "suffix"),
        (lambda: CompletionRequest("x", "m", tenant=text), "tenant"),
        (lambda: ChatCompletionRequest("x", "m", cache_salt=text), "cache_salt"),
        *(
            (lambda name=name: Runner(text_model("llama"), **{name: text}), name)
            for name in ("admission", "victim", "fairness", "speculative")
        ),
    ):
        with pytest.raises(InvalidArgumentError, match=rf"^`{argument}`: .*lone surrogate"):
            call()


def test_two_spellings_of_one_option_are_refused() -> None:
    with pytest.raises(ValueError, match="`prompt_batchsize` and `max_num_batched_tokens` are the same"):
        Runner(which=text_model("llama"), prompt_batchsize=64, max_num_batched_tokens=4096)


def test_both_chat_templates_must_be_readable(tmp_path: Path) -> None:
    good = tmp_path / "own.jinja"
    good.write_text("x")
    for options in (
        {"chat_template": "/nowhere/own.jinja", "jinja_explicit": str(good)},
        {"chat_template": str(good), "jinja_explicit": "/nowhere/own.jinja"},
    ):
        with pytest.raises(ValueError, match=r"/nowhere/own\.jinja"):
            Runner(which=text_model("llama"), **options)


def test_add_special_tokens_needs_a_text(llama: Runner) -> None:
    for value in (True, False):
        with pytest.raises(ValueError, match="add_special_tokens"):
            llama.tokenize_text(USER, value)


def test_later_methods_say_so() -> None:
    runner = runner_of("text", "llama")
    for method in ("generate_image", "begin_calibration", "export_session"):
        with pytest.raises(NotImplementedError, match=method):
            getattr(runner, method)("x")


def test_architectures() -> None:
    folder = str(GOLDEN / "text" / "mistral")
    with pytest.raises(ValueError, match=r"mistral.*contradicts.*llama.*implemented: .*qwen3"):
        Runner(which=Which.Plain(folder, arch=Architecture.Llama))
    with pytest.raises(
        ValueError, match=r"mistral.*contradicts.*gpt_oss.*mixtures of experts: .*gpt_oss.*recurrent layers: lfm2"
    ):
        Runner(which=Which.Plain(folder, arch=Architecture.GptOss))
    Runner(which=Which.Plain(folder, arch=Architecture.Mistral), pa_ctxt_len=256)


def test_every_documented_architecture_is_there() -> None:
    names = """Mistral Gemma Mixtral Llama Phi2 Phi3 Qwen2 Gemma2 Starcoder2 Phi3_5MoE DeepseekV2 DeepseekV3 Qwen3 GLM4 GLM4Moe
    GLM4MoeLite Qwen3Moe SmolLm3 GraniteMoeHybrid GptOss Qwen3Next Lfm2 Lfm2Moe HunYuanDenseV1 HunYuanMoEV1"""
    assert len({getattr(Architecture, name) for name in names.split()}) == 25


def test_a_prompt_longer_than_the_context(llama: Runner) -> None:
    length = llama.context_length()
    with pytest.raises(ValueError, match=rf"Prompt sequence length is greater than \d+.*{length + 7}"):
        complete(llama, [5] * (length + 7), max_tokens=1)


def test_a_prompt_longer_than_the_pool() -> None:
    runner = Runner(which=text_model("llama"), memory_goal="64tokens")
    with pytest.raises(ValueError, match=r"100.*64"):
        complete(runner, [5] * 100, max_tokens=1)
    assert len(generate(runner, [5] * 20, 4)) == 4
    wait_until_idle(runner)


def test_a_sequence_that_outgrows_the_pool_keeps_its_text() -> None:
    roomy = generate(runner_of("text", "llama"), [5] * 20, 200)
    runner = Runner(which=text_model("llama"), memory_goal="64tokens")
    response = complete(runner, [5] * 20, max_tokens=200, logprobs=0)
    assert response.choices[0].finish_reason == "length"
    assert response.choices[0].text
    ids = [token.token_id for token in response.choices[0].logprobs.content]
    assert 40 <= len(ids) <= 50
    assert ids == [token for token, _ in roomy[: len(ids)]]
    wait_until_idle(runner)


def test_enable_thinking_needs_messages(llama: Runner) -> None:
    with pytest.raises(ValueError, match="enable_thinking"):
        llama.tokenize_text("text", True, True)


def test_token_ids_out_of_range(llama: Runner) -> None:
    for ids in ([-1], [2**33]):
        with pytest.raises(ValueError, match=str(ids[-1])):
            llama.detokenize_text(ids)


def test_a_set_is_no_prompt(llama: Runner) -> None:
    for prompt in ({5, 6}, frozenset({5})):
        with pytest.raises(TypeError, match="in order"):
            CompletionRequest(prompt, "m")
        with pytest.raises(TypeError, match="no order"):
            llama.detokenize_text(prompt)


SURROGATE = "a\ud800"


@pytest.mark.parametrize(
    "name",
    ["token_source", "chat_template", "jinja_explicit", "device", "cpu_tier", "attention_backend", "memory_goal", "kv_tier"],
)
def test_a_lone_surrogate_in_an_argument_of_a_runner_is_named(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^`{name}`: .*surrogate"):
        Runner(text_model("llama"), **{name: SURROGATE})
    if name in ("token_source", "device", "cpu_tier", "memory_goal"):
        with pytest.raises(InvalidArgumentError, match=rf"^`{name}`: .*surrogate"):
            Runner.memory_plan(text_model("llama"), **{name: SURROGATE})


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("model_id", lambda text: Which.Plain(text)),
        ("tokenizer_json", lambda text: Which.Plain("m", tokenizer_json=text)),
        ("hf_cache_path", lambda text: Which.Plain("m", hf_cache_path=text)),
        ("quantized_model_id", lambda text: Which.GGUF(text)),
        ("quantized_filename", lambda text: Which.GGUF("m", text)),
        ("quantized_filename", lambda text: Which.GGUF("m", ["f", text])),
        ("tok_model_id", lambda text: Which.GGUF("m", tok_model_id=text)),
        ("model", lambda text: CompletionRequest("x", text)),
        ("prompt", lambda text: CompletionRequest(text, "m")),
        ("stop_seqs", lambda text: CompletionRequest("x", "m", stop_seqs=["y", text])),
        ("dry_sequence_breakers", lambda text: CompletionRequest("x", "m", dry_sequence_breakers=[text])),
        ("messages", lambda text: ChatCompletionRequest(text, "m")),
        ("messages", lambda text: ChatCompletionRequest([{"role": "user", "content": text}], "m")),
        ("reasoning_effort", lambda text: ChatCompletionRequest("x", "m", reasoning_effort=text)),
    ],
)
def test_a_lone_surrogate_in_an_object_is_named(name: str, make: Callable[[str], Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^`{name}`: .*lone surrogate"):
        make(SURROGATE)


def test_a_lone_surrogate_in_an_argument_of_a_method_is_named(llama: Runner) -> None:
    request = CompletionRequest([5], "m", max_tokens=1)
    for name, call in (
        ("model_id", lambda: llama.send_completion_request(request, model_id=SURROGATE)),
        ("model_id", lambda: llama.get_model_status(SURROGATE)),
        ("text", lambda: llama.tokenize_text(SURROGATE)),
    ):
        with pytest.raises(InvalidArgumentError, match=rf"^`{name}`: .*lone surrogate"):
            call()


def test_what_is_no_json_is_said_of_the_messages() -> None:
    for messages in (object(), b"a", [{"role": "user", "content": b"a"}], range(3)):
        with pytest.raises(TypeError, match=r"^`messages`: .*not JSON serializable"):
            ChatCompletionRequest(messages, "m")


def test_a_public_prefix_without_a_salt_is_named(llama: Runner) -> None:
    with pytest.raises(InvalidArgumentError, match=r"public_messages.*public_prefix_len.*cache_salt"):
        complete(llama, [5, 6], max_tokens=1, public_prefix_len=1)


def test_long_and_short_times(llama: Runner) -> None:
    assert complete(llama, [5], max_tokens=1, deadline=1e300).choices[0].finish_reason == "length"
    runner = Runner(which=text_model("llama"), memory_goal="64tokens")
    assert runner.drain(timeout=0)
    runner.resume()
    for timeout in (-1, NAN):
        with pytest.raises(ValueError, match="timeout"):
            runner.drain(timeout=timeout)


def test_what_a_request_can_have_is_not_what_the_model_could(llama: Runner) -> None:
    runner = Runner(which=text_model("llama"), memory_goal="128tokens")
    assert runner.max_sequence_length() == 128 < runner.context_length() == llama.context_length()
    assert complete(runner, [5] * 100, max_tokens=28, ignore_eos=True).usage.total_tokens == 128
    assert "1 groups" not in str(runner.memory_ledger())
