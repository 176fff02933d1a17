"""Kept and running sequences are forked and gone on from, over shared blocks."""

from __future__ import annotations

import gc
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from conftest import complete, generate, in_threads, runner_of, text_model, tokens, wait_until_idle

from mistral_paged import ChatCompletionRequest, CompletionRequest, InternalError, InvalidArgumentError, Runner, Sequence, Which

PROMPT = [(index * 31) % 400 + 10 for index in range(60)]


def kept(runner: Runner, **options: Any) -> Sequence:
    sequence = complete(runner, PROMPT, **{"max_tokens": 10, "keep": True, **options}).choices[0].sequence
    assert sequence is not None
    return sequence


def chat(runner: Runner, **options: Any) -> Any:
    messages = [{"role": "user", "content": "What is a block table?"}]
    return runner.send_chat_completion_request(
        ChatCompletionRequest(messages, "default", temperature=0.0, ignore_eos=True, **options)
    )


def test_nothing_is_kept_unless_asked_for(llama: Runner) -> None:
    assert complete(llama, PROMPT, max_tokens=2).choices[0].sequence is None
    assert llama.kv_cache_stats()["requests_kept"] == 0


def test_forks_go_on_apart_and_give_what_a_prompt_gives(llama: Runner) -> None:
    with kept(llama) as root:
        assert root.tokens[:60] == PROMPT
        assert (len(root), root.num_prompt_tokens) == (70, 60)
        assert root.text == llama.detokenize_text(root.tokens[60:], skip_special_tokens=True)
        branches = root.fork(3)
        options = [{"max_tokens": 12, "temperature": 1.0, "seed": seed} for seed in range(3)]
        answers = in_threads(lambda at: branches[at].generate(logprobs=0, ignore_eos=True, **options[at]), 3)
        for branch, option, answer in zip(branches, options, answers, strict=True):
            expected = generate(llama, root.tokens, **option)
            assert [(token.token_id, token.logprob) for token in tokens(answer)] == expected
            assert branch.tokens == root.tokens + [token for token, _ in expected]
            assert branch.text.startswith(root.text)
            assert answer.usage.prompt_tokens_details.cached_tokens == 69
            branch.release()
        assert len({tuple(branch.tokens) for branch in branches}) == 3


def test_forks_share_blocks_and_give_them_back(llama: Runner) -> None:
    before = llama.kv_cache_stats()
    assert before["blocks_used"] == 0
    root = kept(llama)
    at_rest = llama.kv_cache_stats()
    assert (at_rest["requests_kept"], at_rest["blocks_kept"], at_rest["blocks_used"]) == (1, 3, 3)
    branches = root.fork(4)
    for seed, branch in enumerate(branches):
        branch.generate(max_tokens=30, temperature=1.0, seed=seed, ignore_eos=True)
    stats = llama.kv_cache_stats()
    # 60 + 10 + 30 tokens: the two full blocks of the root are everybody's, the third and what is behind it each one's own.
    assert (stats["blocks_shared"], stats["blocks_saved"]) == (2, 2 * 4)
    assert stats["blocks_used"] == 3 + 4 * 2
    branches[0].release()
    assert llama.kv_cache_stats()["requests_kept"] == 4
    with pytest.raises(InvalidArgumentError, match="released"):
        branches[0].generate()
    with pytest.raises(InvalidArgumentError, match="released"):
        branches[0].fork()
    assert len(branches[0].tokens) == 100
    del branch, branches, root
    gc.collect()
    assert llama.kv_cache_stats()["blocks_used"] == 0


def test_text_tokens_and_messages_come_behind(llama: Runner) -> None:
    with kept(llama) as sequence:
        before = sequence.tokens
        sequence.generate([5, 6, 7], max_tokens=2, temperature=0.0, ignore_eos=True)
        assert sequence.tokens[: len(before) + 3] == [*before, 5, 6, 7]
        before = sequence.tokens
        sequence.generate(iter([8, 9]), max_tokens=2, temperature=0.0, ignore_eos=True)
        assert sequence.tokens[: len(before) + 2] == [*before, 8, 9]
        before = sequence.tokens
        text = llama.tokenize_text(" and then", add_special_tokens=False)
        sequence.generate(" and then", max_tokens=2, temperature=0.0, ignore_eos=True)
        assert sequence.tokens[: len(before) + len(text)] == before + text
        with pytest.raises(InvalidArgumentError, match="began as a chat"):
            sequence.generate([{"role": "user", "content": "Go on."}])
        assert sequence.generate(max_tokens=1).usage.completion_tokens == 1
    with chat(llama, max_tokens=8, keep=True).choices[0].sequence as conversation:
        answer = conversation.text
        reply = conversation.generate(
            [{"role": "user", "content": "And a slot?"}], max_tokens=8, temperature=0.0, ignore_eos=True
        )
        messages = [
            {"role": "user", "content": "What is a block table?"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "And a slot?"},
        ]
        assert reply.usage.prompt_tokens == len(llama.tokenize_text(messages))
        request = ChatCompletionRequest(messages, "default", temperature=0.0, ignore_eos=True, max_tokens=8)
        assert llama.send_chat_completion_request(request).choices[0].message.content == reply.choices[0].text


def test_a_running_answer_is_forked(llama: Runner) -> None:
    # Enough to do that it runs for a while.
    stream = chat(llama, max_tokens=900, n_choices=16, stream=True)
    first = next(stream)
    llama.pause()
    with stream.sequence() as branch:
        llama.resume()
        so_far = branch.tokens
        assert branch.num_prompt_tokens < len(so_far)
        rest = branch.generate(max_tokens=5, temperature=0.0, ignore_eos=True)
        text = "".join(chunk.choices[0].delta.content for chunk in [first, *stream] if chunk.choices[0].index == 0)
        assert text.startswith(llama.detokenize_text(branch.tokens[branch.num_prompt_tokens :], skip_special_tokens=True))
        assert rest.usage.prompt_tokens == len(so_far)
    with pytest.raises(InvalidArgumentError, match="complete"):
        stream.sequence()


def test_a_continuation_is_served_as_it_asks(llama: Runner) -> None:
    with kept(llama) as sequence:
        llama.pause()
        try:
            late = sequence.generate(max_tokens=4, deadline=0.05, tenant="a", priority=-1)
        finally:
            llama.resume()
        assert (late.choices[0].finish_reason, late.usage.completion_tokens) == ("timeout", 0)
        for options, says in (({"priority": 2**31}, "priority"), ({"deadline": 0}, "deadline"), ({"tenant": "\ud800"}, "tenant")):
            with pytest.raises(InvalidArgumentError, match=says):
                sequence.generate(max_tokens=1, **options)
        assert sequence.generate(max_tokens=1, deadline=600, priority=1).usage.completion_tokens == 1


def test_a_streamed_sequence_becomes_its_answer_at_the_end(llama: Runner) -> None:
    with kept(llama) as sequence:
        before = sequence.tokens
        stream = sequence.generate(max_tokens=400, temperature=0.0, ignore_eos=True, stream=True)
        next(stream)
        with pytest.raises(InvalidArgumentError, match="already"):
            sequence.generate(max_tokens=1)
        stream.close()
        assert sequence.tokens == before
        chunks = list(sequence.generate(max_tokens=4, temperature=0.0, ignore_eos=True, stream=True))
        assert chunks[-1].usage.completion_tokens == 4
        assert len(sequence) == len(before) + 4


def test_every_choice_and_the_last_chunk_have_one(llama: Runner) -> None:
    response = complete(llama, PROMPT, max_tokens=4, n_choices=3, temperature=1.0, seed=1, keep=True)
    ends = [choice.sequence for choice in response.choices]
    assert [len(end) for end in ends] == [64] * 3
    assert "Sequence(tokens=64, released=False)" in repr(response.choices[0])
    for end in ends:
        end.release()
    chunks = list(chat(llama, max_tokens=4, stream=True, keep=True))
    assert [chunk.choices[0].sequence is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    chunks[-1].choices[0].sequence.release()


def test_blocks_at_rest_are_taken_when_needed_and_the_sequence_goes_on() -> None:
    runner = Runner(which=text_model("llama"), memory_goal="128tokens", pa_blk_size=8, num_threads=2)
    sequence = kept(runner)
    forks = sequence.fork(2)
    options = {"max_tokens": 8, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    expected = forks[0].generate(**options).choices[0].text
    forks[0].release()
    assert len(generate(runner, PROMPT[::-1] + PROMPT[:40], 20)) == 20
    assert runner.kv_cache_stats()["blocks_kept"] == 0
    assert forks[1].generate(**options).choices[0].text == expected


def test_choices_are_the_same_however_they_are_served_on_the_fast_path(smollm2_path: Path) -> None:
    prompt = [(index * 31) % 20_000 + 100 for index in range(150)]
    options = {"max_tokens": 24, "n_choices": 4, "temperature": 1.0, "seed": 11, "logprobs": 0}

    def outcome(**limits: Any) -> list[list[tuple[int, float]]]:
        runner = Runner(which=Which.GGUF(str(smollm2_path)), pa_gpu_mem=64, **limits)
        response = complete(runner, prompt, **options)
        wait_until_idle(runner)
        return [[(token.token_id, token.logprob) for token in tokens(response, choice)] for choice in range(4)]

    alone = outcome(max_seqs=1, prefix_cache_n=0)
    assert len({tuple(choice) for choice in alone}) == 4
    assert outcome() == alone
    assert outcome(prefix_cache_n=0) == alone
    assert outcome(max_seqs=3, max_num_batched_tokens=64) == alone


def test_a_sequence_outlives_its_runner() -> None:
    runner = Runner(which=text_model("llama"), pa_ctxt_len=1024, num_threads=1)
    sequence = kept(runner)
    del runner
    gc.collect()
    assert sequence.generate(max_tokens=3, ignore_eos=True).usage.completion_tokens == 3


def use_in_child(sequence: Sequence, results: Any) -> None:
    for use in (lambda: sequence.tokens, sequence.fork, sequence.generate, sequence.release):
        try:
            use()
        except InternalError:
            results.put("refused")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_refused() -> None:
    with kept(runner_of("text", "llama")) as sequence:
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        child = context.Process(target=use_in_child, args=(sequence, results))
        child.start()
        assert [results.get(timeout=20) for _ in range(4)] == ["refused"] * 4
        child.join()
        assert sequence.generate(max_tokens=1).usage.completion_tokens == 1
    wait_until_idle(runner_of("text", "llama"))


@pytest.mark.parametrize("n", [0, -1, 1025, True, "2"])
def test_a_number_of_forks_out_of_range_is_refused(llama: Runner, n: Any) -> None:
    with kept(llama) as sequence:
        if n is True:
            assert len(sequence.fork(n)) == 1
        else:
            with pytest.raises((InvalidArgumentError, TypeError)):
                sequence.fork(n)


@pytest.mark.parametrize("then", [5, 1.5, b"text", {}, {1: 2}, [None], ["text"]])
def test_what_cannot_come_behind_is_refused_by_name(llama: Runner, then: Any) -> None:
    with kept(llama) as sequence, pytest.raises(TypeError, match="`then` must be a str, token ids"):
        sequence.generate(then, max_tokens=1)


def test_bytes_are_no_token_ids() -> None:
    with pytest.raises(TypeError, match="`prompt` must be a str or token ids"):
        CompletionRequest(b"text", "m")
