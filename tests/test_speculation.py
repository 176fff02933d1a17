"""Speculation from Python, over HTTP and from the command line. rust/engine/tests/drafts.rs compares the bits of answers."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import mtp
import pytest
from conftest import GOLDEN, complete, text_model, tokens
from test_server import COMMAND, serving

from mistral_paged import InvalidArgumentError, ModelDType, Runner, Which

LLAMA = str(GOLDEN / "text" / "llama")
REPEATING = [list(range(40 + start, 60 + start)) * 3 for start in range(4)]
"""Prompts that say everything three times, which these random models go on with now and then."""


def load(model: str = "llama", **options: Any) -> Runner:
    return Runner(which=text_model(model), pa_gpu_mem=16, num_threads=1, **options)


def answers(runner: Runner) -> tuple[list[list[tuple[int, float | None]]], int, int]:
    """Tokens with their log probabilities, and how many were guessed, and how many of these were right."""
    said, guessed, right = [], 0, 0
    for prompt in REPEATING:
        response = complete(runner, prompt, max_tokens=60, temperature=0, ignore_eos=True, logprobs=0)
        said.append([(token.token_id, token.logprob) for token in tokens(response)])
        guessed += response.usage.draft_tokens
        right += response.usage.accepted_draft_tokens
    return said, guessed, right


def test_answers_are_the_same_and_the_usage_tells_of_guesses() -> None:
    with load() as runner:
        expected, guessed, _ = answers(runner)
        assert guessed == 0
        plain = runner.kv_cache_stats()
        assert (plain["draft_rows"], plain["accepted_draft_tokens_at"]) == (0, [0] * 16)
    for options in ({"speculative": "auto"}, {"speculative": "prompt_lookup"}):
        with load(**options) as runner:
            said, guessed, right = answers(runner)
            stats = runner.kv_cache_stats()
        assert said == expected, options
        assert guessed > 0, options
        assert (stats["draft_tokens"], stats["accepted_draft_tokens"]) == (guessed, right), options
        assert sum(stats["accepted_draft_tokens_at"]) == right
        # The first token of an answer comes from the step that ends its prompt; each guess has one token that is no draft.
        assert stats["steps"] == plain["steps"] - right, options
        assert right > 0 or options["speculative"] == "auto"


def test_a_draft_model_changes_no_token_and_is_always_right_about_itself() -> None:
    with load() as runner:
        expected, _, _ = answers(runner)
        plain = runner.memory_ledger()
    for name, options in (("qwen3", {"speculative": "draft_model"}), ("llama", {"speculative": "draft_model"}), ("llama", {})):
        with load(which_draft=text_model(name), **options) as runner:
            said, guessed, right = answers(runner)
            assert said == expected, name
            ledger = runner.memory_ledger()
            planned = Runner.memory_plan(text_model("llama"), pa_gpu_mem=16, which_draft=text_model(name))
        assert ledger.weights_bytes == planned.weights_bytes > plain.weights_bytes
        assert ledger.bytes_per_block > plain.bytes_per_block
        if options:
            assert guessed > 100
            assert name != "llama" or right > guessed * 0.9, "it is wrong only where it would end"


def test_a_draft_model_that_does_not_go_with_the_rest_is_named(smollm2_path: Path) -> None:
    draft = text_model("qwen3")
    for options, words in (
        ({"which_draft": draft, "speculative": "prompt_lookup"}, "which_draft.*draft_model"),
        ({"which_draft": draft, "speculative": "off"}, "which_draft.*draft_model"),
        ({"speculative": "draft_model"}, "which_draft"),
        ({"which_draft": Which.Embedding(LLAMA)}, "has embeddings"),
        ({"which_draft": Which.Plain(LLAMA, dtype=ModelDType.BF16)}, "has another dtype"),
        ({"which_draft": Which.GGUF(str(smollm2_path))}, "must have the vocabulary of its model"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            load(**options)
    with pytest.raises(TypeError, match="which_draft"):
        load(which_draft="model")
    with pytest.raises(NotImplementedError, match="draft model for a model that sees"):
        Runner(which=Which.MultimodalPlain(str(GOLDEN / "vision" / "llava")), which_draft=Which.Plain(LLAMA), pa_gpu_mem=16)


def test_a_request_guesses_no_more_tokens_in_a_step_than_gamma() -> None:
    with load(speculative="prompt_lookup", speculative_gamma=2) as runner:
        said, guessed, _ = answers(runner)
        stats = runner.kv_cache_stats()
    assert stats["draft_rows"] * 2 >= guessed > stats["draft_rows"]
    assert stats["accepted_draft_tokens_at"][2:] == [0] * 14
    with load() as runner:
        assert answers(runner)[0] == said


def test_what_cannot_be_honoured_is_refused() -> None:
    for options, words in (
        ({"speculative": "eagle"}, '`speculative` is "eagle".*"off", "auto", "prompt_lookup", "draft_model" or "mtp"'),
        ({"speculative_gamma": 4}, "`speculative_gamma`.*speculative=.auto."),
        ({"speculative": "off", "speculative_gamma": 4}, "`speculative_gamma`"),
        ({"speculative": "auto", "speculative_gamma": 0}, "`speculative_gamma`"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            load(**options)


@pytest.mark.parametrize("model", ["lfm2", "qwen3-next"])
def test_a_model_with_states_says_the_same_with_guesses(model: str) -> None:
    with load(model) as runner:
        expected, guessed, _ = answers(runner)
        assert guessed == 0
        steps, without = runner.kv_cache_stats()["steps"], runner.memory_ledger()
    with load(model, speculative="prompt_lookup") as runner:
        said, guessed, right = answers(runner)
        stats, ledger = runner.kv_cache_stats(), runner.memory_ledger()
    assert said == expected
    assert guessed > right
    # Going back behind a wrong guess takes rows, and no step.
    assert stats["steps"] == steps - right
    assert ledger.states_bytes > without.states_bytes
    assert Runner.memory_plan(text_model(model), pa_gpu_mem=16, speculative="prompt_lookup").states_bytes == ledger.states_bytes


def test_a_head_of_the_model_changes_no_token(tmp_path: Path) -> None:
    plain, model = text_model("glm4-moe"), mtp.checkpoint("glm4-moe", tmp_path / "model")
    with Runner(which=plain, pa_gpu_mem=16, num_threads=1) as runner:
        expected, guessed, _ = answers(runner)
        assert guessed == 0
        without = runner.memory_ledger()
    own, other = Which.Plain(model, dtype=ModelDType.F32), {"mtp_model": model}
    for which, options, most in (
        (own, {"mtp_n_predict": 3, "speculative": "mtp"}, 3),
        (own, {"mtp_n_predict": 1}, 1),
        (plain, {**other, "speculative": "mtp"}, 2),
    ):
        with Runner(which=which, pa_gpu_mem=16, num_threads=1, **options) as runner:
            said, guessed, right = answers(runner)
            stats, ledger = runner.kv_cache_stats(), runner.memory_ledger()
        assert said == expected, options
        assert guessed > 0 or "speculative" not in options
        assert sum(stats["accepted_draft_tokens_at"]) == right
        assert stats["accepted_draft_tokens_at"][most:] == [0] * (16 - most)
        assert ledger.weights_bytes > without.weights_bytes
        drafts = {key: value for key, value in options.items() if key != "speculative"}
        assert Runner.memory_plan(which, pa_gpu_mem=16, **drafts).weights_bytes == ledger.weights_bytes


def test_what_does_not_go_with_a_head_is_named(tmp_path: Path) -> None:
    model = mtp.checkpoint("glm4-moe", tmp_path / "model")
    own = Which.Plain(model, dtype=ModelDType.F32)
    for which, options, error, words in (
        (own, {"mtp_n_predict": 0}, InvalidArgumentError, "mtp_n_predict"),
        (own, {"mtp_n_predict": 2, "speculative_gamma": 2}, InvalidArgumentError, "speculative_gamma.*mtp_n_predict"),
        (own, {"mtp_n_predict": 2, "speculative": "prompt_lookup"}, InvalidArgumentError, '"auto" or "mtp"'),
        (own, {"speculative": "mtp"}, InvalidArgumentError, "mtp_n_predict"),
        (own, {"mtp_n_predict": 2, "no_kv_cache": True}, InvalidArgumentError, "no_kv_cache"),
        (own, {"mtp_n_predict": 2, "which_draft": text_model("llama")}, InvalidArgumentError, "leave one out"),
        (own, {"mtp_model": "/nowhere/at/all"}, ValueError, "does not exist"),
        (own, {"mtp_model": LLAMA}, NotImplementedError, "this llama has no heads"),
        (own, {"mtp_model": 3}, TypeError, "mtp_model"),
        (text_model("llama"), {"mtp_n_predict": 2}, NotImplementedError, "this llama has no heads.*which_draft"),
        (text_model("qwen3-next"), {"mtp_n_predict": 2}, NotImplementedError, "the head.*was left out.*which_draft"),
    ):
        with pytest.raises(error, match=words):
            Runner(which=which, pa_gpu_mem=16, **options)


def test_the_command_line_has_a_head_guess(tmp_path: Path) -> None:
    model = mtp.checkpoint("glm4-moe", tmp_path / "model")
    with serving("--dtype", "f32", "--mtp", "--speculative", "mtp", model=model) as server:
        server.complete(prompt=REPEATING[0], max_tokens=40, ignore_eos=True)
        assert server.metric("vllm:spec_decode_num_draft_tokens_total") > 20
    command = [str(COMMAND), "run", "-m", model, "--mtp", "--mtp-model", model, "-i", "Hello"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "--mtp-model" in done.stderr) == (2, True), done.stderr


def test_a_server_tells_of_guesses() -> None:
    with serving("--dtype", "f32", "--speculative", "prompt_lookup", "--speculative-gamma", "5", model=LLAMA) as server:
        right = wrong = 0
        for prompt in REPEATING:
            reply = server.complete(prompt=prompt, max_tokens=60, ignore_eos=True)
            details = reply.json["usage"]["completion_tokens_details"]
            right += details["accepted_prediction_tokens"]
            wrong += details["rejected_prediction_tokens"]
        assert right > 0
        assert server.metric("vllm:spec_decode_num_draft_tokens_total") == right + wrong
        assert server.metric("vllm:spec_decode_num_accepted_tokens_total") == right
        places = [server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(n)) for n in range(16)]
        assert sum(places) == right
        assert places[5:] == [0] * 11
        drafts = server.metric("vllm:spec_decode_num_drafts_total")
        assert (right + wrong) / 5 <= drafts <= right + wrong


def test_the_command_line_refuses_gamma_alone() -> None:
    command = [str(COMMAND), "run", "-m", LLAMA, "--speculative-gamma", "3", "-i", "Hello"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "speculative_gamma" in done.stderr
