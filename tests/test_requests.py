"""Every field of a request does what it says."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN, complete, generate, golden, runner_of, score, text_model, tokens

from mistral_paged import ChatCompletionRequest, CompletionRequest, ModelDType, Runner, Which

PROMPT = [318, 460, 90, 413, 206, 64, 86, 92]


def chat(runner: Runner, **options: Any) -> Any:
    options = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **options}
    messages = options.pop("messages", [{"role": "user", "content": "What is a block table?"}])
    return runner.send_chat_completion_request(ChatCompletionRequest(messages, "default", **options))


def test_the_answer_has_the_documented_shape(llama: Runner) -> None:
    response = chat(llama)
    assert response.object == "chat.completion"
    assert response.system_fingerprint == "local"
    assert response.model == llama.list_models()[0] == llama.get_default_model_id()
    assert response.created > 1_700_000_000
    choice = response.choices[0]
    assert (choice.index, choice.finish_reason, choice.stop_sequence, choice.logprobs) == (0, "length", None, None)
    assert choice.message.role == "assistant"
    assert isinstance(choice.message.content, str)
    usage = response.usage
    assert usage.completion_tokens == 16
    assert usage.total_tokens == usage.prompt_tokens + 16
    assert 0 < usage.total_prompt_time_sec <= usage.total_time_sec
    assert usage.avg_compl_tok_per_sec > 0
    assert f"completion_tokens={usage.completion_tokens}" in repr(usage)
    assert repr(choice.message.content) in repr(response)
    assert chat(llama).id != response.id
    with pytest.raises(AttributeError):
        response.id = "other"


def test_completion_has_the_documented_shape(llama: Runner) -> None:
    response = complete(llama, PROMPT, max_tokens=4)
    assert response.object == "text_completion"
    assert (response.choices[0].index, response.choices[0].finish_reason) == (0, "length")
    assert response.choices[0].logprobs is None
    assert response.usage.prompt_tokens == len(PROMPT)


def test_streamed_text_is_the_whole_text(llama: Runner) -> None:
    whole = chat(llama, max_tokens=32, logprobs=True)
    chunks = list(chat(llama, max_tokens=32, logprobs=True, stream=True))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.choices[0].message.content
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk.choices[0].delta.role for chunk in chunks} == {"assistant"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None and chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 32
    streamed = [token.token_id for chunk in chunks for token in chunk.choices[0].logprobs.content]
    assert streamed == [token.token_id for token in whole.choices[0].logprobs.content]


def test_streamed_choices(llama: Runner) -> None:
    chunks = list(chat(llama, n_choices=3, temperature=1.0, seed=5, stream=True))
    whole = chat(llama, n_choices=3, temperature=1.0, seed=5)
    for index in range(3):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.delta.content for choice in own) == whole.choices[index].message.content
        assert [choice.finish_reason for choice in own][-1] == "length"
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_an_exhausted_stream_stays_exhausted(llama: Runner) -> None:
    stream = chat(llama, max_tokens=2, stream=True)
    assert iter(stream) is stream
    list(stream)
    assert list(stream) == []


def test_seed(llama: Runner) -> None:
    def text(seed: int | None) -> str:
        return chat(llama, temperature=1.0, max_tokens=24, seed=seed).choices[0].message.content

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert len({text(None) for _ in range(3)}) > 1


def test_engine_seed_repeats_a_session() -> None:
    def session() -> list[Any]:
        runner = Runner(which=text_model("llama"), seed=11, pa_ctxt_len=512)
        return [generate(runner, PROMPT, 8, temperature=1.0) for _ in range(3)]

    first = session()
    assert first == session()
    assert first[0] != first[1]


def test_unset_temperature_samples(llama: Runner) -> None:
    texts = {complete(llama, PROMPT, temperature=None, max_tokens=16).choices[0].text for _ in range(3)}
    assert len(texts) > 1


def test_greedy_spellings_agree(llama: Runner) -> None:
    greedy = generate(llama, PROMPT, 16)
    assert generate(llama, PROMPT, 16, temperature=1.0, top_k=1) == greedy
    assert [token for token, _ in generate(llama, PROMPT, 16, temperature=1.0, top_p=1e-6)] == [token for token, _ in greedy]
    assert [token for token, _ in generate(llama, PROMPT, 16, temperature=1.0, min_p=1.0)] == [token for token, _ in greedy]


def test_sampling_follows_the_probabilities(llama: Runner) -> None:
    top = tokens(complete(llama, PROMPT, max_tokens=1, logprobs=3))[0].top_logprobs
    response = complete(llama, PROMPT, max_tokens=1, temperature=1.0, top_k=3, n_choices=400, logprobs=0, seed=3)
    drawn = Counter(tokens(response, index)[0].token_id for index in range(400))
    total = sum(math.exp(entry.logprob) for entry in top)
    assert set(drawn) == {entry.token_id for entry in top}
    for entry in top:
        share = math.exp(entry.logprob) / total
        assert abs(drawn[entry.token_id] / 400 - share) < 4.5 * math.sqrt(share * (1 - share) / 400)


def test_logprobs(llama: Runner) -> None:
    for token in tokens(complete(llama, PROMPT, max_tokens=6, logprobs=4)):
        assert len(token.top_logprobs) == 4
        assert token.top_logprobs == sorted(token.top_logprobs, key=lambda entry: -entry.logprob)
        assert (token.top_logprobs[0].token_id, token.top_logprobs[0].logprob) == (token.token_id, token.logprob)
        assert isinstance(token.bytes, bytes)
        assert isinstance(token.top_logprobs[0].bytes, bytes)
    response = chat(llama, logprobs=True, top_logprobs=2)
    assert all(len(token.top_logprobs) == 2 for token in response.choices[0].logprobs.content)
    response = chat(llama, logprobs=True)
    assert all(token.top_logprobs == [] for token in response.choices[0].logprobs.content)


def test_token_bytes_join_to_the_text(llama: Runner) -> None:
    response = complete(llama, PROMPT, max_tokens=24, logprobs=0)
    assert b"".join(token.bytes for token in tokens(response)).decode(errors="replace") == response.choices[0].text


def test_echo_with_log_probabilities(llama: Runner) -> None:
    case = golden("text/llama")["completions"][1]
    response = complete(llama, case["prompt"], max_tokens=2, echo_prompt=True, logprobs=0)
    assert response.choices[0].text.startswith(case["prompt"])
    content = tokens(response)
    assert [token.token_id for token in content[:-2]] == case["prompt_ids"]
    assert content[0].logprob is None
    assert response.usage.completion_tokens == 2
    plain = complete(llama, case["prompt"], max_tokens=2)
    assert response.choices[0].text == case["prompt"] + plain.choices[0].text


def test_logit_bias(llama: Runner) -> None:
    assert {token for token, _ in generate(llama, PROMPT, 8, logit_bias={77: 100.0})} == {77}
    banned = generate(llama, PROMPT, 1)[0][0]
    assert generate(llama, PROMPT, 1, logit_bias={banned: -100.0})[0][0] != banned


@pytest.mark.parametrize("penalty", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 4.0}])
def test_penalties_lessen_repetition(llama: Runner, penalty: dict[str, float]) -> None:
    boost = dict.fromkeys((70, 71), 3.0)

    def repeats(**options: Any) -> int:
        ids = [token for token, _ in generate(llama, PROMPT, 40, logit_bias=boost, **options)]
        return len(ids) - len(set(ids))

    assert repeats(**penalty) < repeats()


def test_dry_breaks_a_loop(llama: Runner) -> None:
    loop = [70, 71, 72, 73] * 6
    bias = {70: 12.0}
    assert generate(llama, loop, 1, logit_bias=bias)[0][0] == 70
    assert generate(llama, loop, 1, logit_bias=bias, dry_multiplier=5.0, dry_sequence_breakers=["\n"])[0][0] != 70


def test_stop_string_ends_the_text_and_is_not_part_of_it(llama: Runner) -> None:
    text = complete(llama, PROMPT, max_tokens=24).choices[0].text
    middle = next(i for i in range(4, len(text) - 1) if text[i : i + 2].isascii() and text.index(text[i : i + 2]) == i)
    stop = text[middle : middle + 2]
    choice = complete(llama, PROMPT, max_tokens=24, stop_seqs=["never there", stop]).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_sequence) == (text[:middle], "stop", stop)
    assert complete(llama, PROMPT, max_tokens=24, stop_seqs=stop).choices[0].text == text[:middle]


def test_stop_string_is_never_streamed(llama: Runner) -> None:
    text = chat(llama, max_tokens=24).choices[0].message.content
    middle = next(i for i in range(4, len(text) - 2) if text[i : i + 3].isascii() and text.index(text[i : i + 3]) == i)
    chunks = list(chat(llama, max_tokens=24, stop_seqs=[text[middle : middle + 3]], stream=True))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == text[:middle]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_end_of_sequence(llama: Runner) -> None:
    eos = 2
    biased = {eos: 100.0}
    ended = complete(llama, PROMPT, max_tokens=8, ignore_eos=False, logit_bias=biased)
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")
    assert complete(llama, PROMPT, max_tokens=8, logit_bias=biased).choices[0].finish_reason == "length"


def test_n_choices(llama: Runner) -> None:
    response = complete(llama, PROMPT, max_tokens=12, n_choices=4, temperature=1.0, seed=9)
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in response.choices}) > 1
    assert response.usage.completion_tokens == 48
    assert response.usage.prompt_tokens == len(PROMPT)


def test_best_of_returns_the_likeliest(llama: Runner) -> None:
    def mean(response: Any, index: int) -> float:
        content = tokens(response, index)
        return sum(token.logprob for token in content) / len(content)

    options = {"max_tokens": 8, "temperature": 1.0, "seed": 4, "logprobs": 0}
    every = complete(llama, PROMPT, n_choices=6, **options)
    best = complete(llama, PROMPT, best_of=6, n_choices=2, **options)
    assert len(best.choices) == 2
    likeliest = sorted((mean(every, index) for index in range(6)), reverse=True)[:2]
    assert sorted((mean(best, index) for index in range(2)), reverse=True) == pytest.approx(likeliest)


def test_suffix(llama: Runner) -> None:
    plain = complete(llama, PROMPT, max_tokens=4).choices[0].text
    assert complete(llama, PROMPT, max_tokens=4, suffix=" the end").choices[0].text == plain + " the end"


def test_a_gap_between_two_texts_is_filled(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    shutil.copytree(GOLDEN / "text/llama", folder)
    file = folder / "tokenizer.json"
    text = file.read_text()
    specials = {"<image>": "<|fim_prefix|>", "<pad>": "<|fim_suffix|>", "<fake>": "<|fim_middle|>"}
    for old, new in specials.items():
        text = text.replace(f'"{old}"', f'"{new}"')
    file.write_text(text)
    runner = Runner(which=Which.Plain(str(folder), dtype=ModelDType.F32), pa_ctxt_len=512, num_threads=2)
    ids = [runner.tokenize_text(text, False) for text in ["a block", "of <pad> keys"]]
    expected = complete(runner, [5, *ids[0], 6, *ids[1], 7], max_tokens=6)
    filled = complete(runner, "a block", max_tokens=6, suffix="of <pad> keys", fill_in_middle=True)
    assert filled.choices[0].text == expected.choices[0].text
    assert filled.usage.prompt_tokens == expected.usage.prompt_tokens
    echoed = complete(runner, "a block", max_tokens=6, suffix="of <pad> keys", fill_in_middle=True, echo_prompt=True)
    assert echoed.choices[0].text == "a block" + expected.choices[0].text
    with pytest.raises(ValueError, match="truncate_sequence"):
        complete(runner, "a", suffix="b", fill_in_middle=True, truncate_sequence=True)


def test_a_gap_needs_two_texts_and_tokens_for_it(llama: Runner) -> None:
    for prompt, options in [("a", {}), ([1, 2], {"suffix": "b"})]:
        with pytest.raises(ValueError, match="`fill_in_middle` needs a `prompt` that is a str, and a `suffix`"):
            CompletionRequest(prompt, "default", fill_in_middle=True, **options)
    with pytest.raises(ValueError, match=r"fim_prefix.*suffix"):
        complete(llama, "a", suffix="b", fill_in_middle=True)


def test_prompt_as_text_ids_tuple_and_array(llama: Runner) -> None:
    import array

    case = golden("text/llama")["completions"][0]
    expected = generate(llama, case["prompt_ids"], 4)
    for prompt in (case["prompt"], tuple(case["prompt_ids"]), array.array("l", case["prompt_ids"])):
        assert generate(llama, prompt, 4) == expected


def test_messages_as_text_and_as_parts(llama: Runner) -> None:
    text = "What is a block table?"
    expected = chat(llama).choices[0].message.content
    assert chat(llama, messages=text).choices[0].message.content == expected
    parts = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    assert chat(llama, messages=parts).choices[0].message.content == expected


def test_truncate_sequence_drops_the_start(llama: Runner) -> None:
    length = llama.max_sequence_length()
    ids = [8 + i % 500 for i in range(length + 40)]
    response = complete(llama, ids, max_tokens=16, truncate_sequence=True, logprobs=0)
    kept = ids[-(length - 16) :]
    assert response.usage.prompt_tokens == len(kept)
    assert response.choices[0].text == complete(llama, kept, max_tokens=16).choices[0].text


def test_generation_stops_at_the_models_length(llama: Runner) -> None:
    length = llama.max_sequence_length()
    response = complete(llama, [8 + i % 500 for i in range(length - 5)])
    assert response.usage.completion_tokens == 5
    assert response.choices[0].finish_reason == "length"


def test_tokenize_and_detokenize(llama: Runner) -> None:
    text = "A block table, naïvely: 日本語 🙂"
    ids = llama.tokenize_text(text, False)
    assert llama.detokenize_text(ids) == text
    special = llama.tokenize_text("<|im_start|>", False)
    assert len(special) == 1
    assert llama.detokenize_text([*special, *ids], skip_special_tokens=True) == text


def test_scores_do_not_depend_on_what_follows(llama: Runner) -> None:
    ids = golden("text/llama")["chat"]["prompt_ids"]
    long = [token.logprob for token in score(llama, ids)]
    assert [token.logprob for token in score(llama, ids[:20])] == long[:20]


def test_explicit_chat_template(tmp_path: Any) -> None:
    jinja = tmp_path / "own.jinja"
    jinja.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    runner = Runner(which=text_model("llama"), chat_template=str(jinja), pa_ctxt_len=256)
    assert runner.detokenize_text(runner.tokenize_text([{"role": "user", "content": "abc"}])) == "[abc]"
    json = tmp_path / "own.json"
    json.write_text('{"chat_template": "<{{ messages[0][\'content\'] }}>"}')
    runner = Runner(which=text_model("llama"), chat_template=str(jinja), jinja_explicit=str(json), pa_ctxt_len=256)
    assert runner.detokenize_text(runner.tokenize_text([{"role": "user", "content": "abc"}])) == "<abc>"


def test_extra_fields_and_thinking_reach_the_template(tmp_path: Any) -> None:
    jinja = tmp_path / "own.jinja"
    jinja.write_text("{{ messages[0]['name'] }} {{ enable_thinking }}")
    runner = Runner(which=text_model("llama"), jinja_explicit=str(jinja), pa_ctxt_len=256)
    ids = runner.tokenize_text([{"role": "user", "content": "abc", "name": "Ada"}], enable_thinking=True)
    assert runner.detokenize_text(ids).lower() == "ada true"


def test_models_by_id() -> None:
    runner = runner_of("text", "llama")
    (own,) = runner.list_models()
    request = CompletionRequest(PROMPT, "default", max_tokens=1)
    assert runner.send_completion_request(request, own).model == own
    assert runner.send_completion_request_to_model(request, own).model == own
    assert runner.is_model_loaded(own)
    assert runner.get_model_status(own) == "loaded"
    assert runner.list_models_with_status() == [(own, "loaded")]
    for call in (
        lambda: runner.send_completion_request(request, "nope"),
        lambda: runner.tokenize_text("x", model_id="nope"),
        lambda: runner.set_default_model_id("nope"),
    ):
        with pytest.raises(ValueError, match="model `nope` was not found"):
            call()


def test_the_figures_of_the_pool_are_the_documented_ones(llama: Runner) -> None:
    assert set(llama.kv_cache_stats()) == {
        "blocks_total",
        "blocks_used",
        "peak_blocks_used",
        "blocks_cached",
        "blocks_free",
        "kv_event_blocks",
        "state_snapshots_total",
        "state_snapshots_used",
        "state_snapshots_taken",
        "state_snapshots_evicted",
        "block_size",
        "block_bytes",
        "tokens_total",
        "prefix_queried_tokens",
        "prefix_hit_tokens",
        "preemptions",
        "requests_running",
        "requests_waiting",
        "slots_held",
        "slots_live",
        "steps",
        "slots_held_sum",
        "slots_live_sum",
        "peak_running",
        "peak_running_before_preemption",
        "tier_blocks",
        "tier_block_bytes",
        "tier_hit_tokens",
        "tier_declined_tokens",
        "tier_swapped_out_blocks",
        "tier_swapped_in_blocks",
        "tier_failed_blocks",
        "tier_dropped_blocks",
        "blocks_shared",
        "blocks_saved",
        "blocks_kept",
        "prefix_missed_tokens",
        "resumed_queried_tokens",
        "resumed_hit_tokens",
        "recomputed_tokens",
        "deadlines_missed",
        "paused",
        "draining",
        "requests_kept",
        "draft_rows",
        "draft_tokens",
        "accepted_draft_tokens",
        "accepted_draft_tokens_at",
    }
    stats = llama.kv_cache_stats()
    missed = stats.pop("prefix_missed_tokens")
    reasons = {"cold", "evicted", "salt", "identity", "partial_tail", "window_evicted", "no_snapshot", "disabled", "skipped"}
    assert set(missed) == reasons
    places = stats.pop("accepted_draft_tokens_at")
    assert (len(places), sum(places)) == (16, stats["accepted_draft_tokens"])
    assert (stats.pop("paused"), stats.pop("draining")) == (False, False)
    assert all(type(value) is int for value in [*stats.values(), *missed.values()])
