"""Relations between a request and its answer, or between answers, that several peers ask for."""

from __future__ import annotations

from typing import Any

from .exchange import Exchange
from .form import Holds

MESSAGE_EVENTS = [
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
]


def both(*relations: Holds) -> Holds:
    return lambda x: all(relation(x) is not False for relation in relations)


def usage_counts(completion_tokens: int | None = None) -> Holds:
    """The usage has the prompt's own count, and all together."""

    def holds(x: Exchange) -> bool:
        usage = x.usage()
        assert usage["prompt_tokens"] == x.num_prompt_tokens()
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        return usage["completion_tokens"] > 0 if completion_tokens is None else usage["completion_tokens"] == completion_tokens

    return holds


def streams_the_same(x: Exchange) -> None:
    """A stream and a whole answer have the same choices."""
    streamed, whole = (x, x.again(stream=..., stream_options=...)) if x.send.streams else (x.again(stream=True), x)
    for choice in whole.answer["choices"]:
        index = choice["index"]
        assert streamed.text(index) == whole.text(index)
        assert streamed.finish(index) == whole.finish(index)


def role_comes_first(x: Exchange) -> None:
    """The first part of each choice has the role, no other has, and the last has no content."""
    for index in {choice["index"] for chunk in x.events for choice in chunk["choices"]}:
        parts = x.choices(index)
        assert parts[0]["delta"]["role"] == "assistant"
        assert not parts[0]["delta"].get("content")
        assert all("role" not in part["delta"] for part in parts[1:])
        assert "content" not in parts[-1]["delta"]
    assert len({chunk["id"] for chunk in x.events}) == 1


def repeats(times: int) -> Holds:
    """The same request has the same text each time."""
    return lambda x: all(x.again().text() == x.text() for _ in range(times - 1))


def same_together(times: int) -> Holds:
    """The same request has the same text however many run at once."""
    return lambda x: {other.text() for other in x.at_once(*[x.send] * times)} == {x.text()}


def same_as_of(**changes: Any) -> Holds:
    """The same text as of a request that differs in these keys."""
    return lambda x: x.again(**changes).text() == x.text()


def still_works(x: Exchange) -> None:
    """After a refusal the server answers."""
    assert x.again(stream=..., logprobs=..., top_logprobs=...).text()


def chat_logprobs(num_top: int) -> Holds:
    """Each token has a logarithm of a probability, bytes, and so many likeliest; together they are the text."""

    def holds(x: Exchange) -> None:
        if x.send.streams:
            tokens = [token for part in x.choices(0) for token in (part["logprobs"] or {"content": []})["content"]]
        else:
            tokens = x.answer["choices"][0]["logprobs"]["content"]
        assert tokens
        for token in tokens:
            assert token["logprob"] <= 0
            assert isinstance(token["bytes"], list)
            assert len(token["top_logprobs"]) == num_top
        assert b"".join(bytes(token["bytes"]) for token in tokens).decode(errors="replace").startswith(x.text().rstrip("\ufffd"))

    return holds


def text_logprobs(num_top: int) -> Holds:
    """The four lists of a completion have one length, and each position has its likeliest tokens."""

    def holds(x: Exchange) -> None:
        lists = x.answer["choices"][0]["logprobs"]
        assert len({len(values) for values in lists.values()}) == 1
        for own, token, top in zip(lists["token_logprobs"], lists["tokens"], lists["top_logprobs"], strict=True):
            assert own <= 0
            assert top[token] == own
            # Tokens that are no text of their own share one.
            assert 1 <= len(top) <= max(num_top, 1) + 1

    return holds


def choices_differ(count: int) -> Holds:
    def holds(x: Exchange) -> bool:
        texts = [x.text(index) for index in range(count)]
        return all(texts) and len(set(texts)) > 1

    return holds


def in_message_order(x: Exchange) -> None:
    """The events of a message, each in its place."""
    kinds = [event["type"] for event in x.events if event["type"] != "ping"]
    assert [kind for i, kind in enumerate(kinds) if kinds[:i].count(kind) == 0] == MESSAGE_EVENTS
    assert kinds[:2] == MESSAGE_EVENTS[:2]
    assert kinds[-3:] == MESSAGE_EVENTS[3:]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert x.text()


def in_response_order(x: Exchange) -> None:
    """The events of a response, whose ids agree and whose deltas are its text."""
    events = x.events
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    last = events[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == x.text()
    for event in events:
        if "response" in event:
            assert event["response"]["id"] == last["id"]
        if "item" in event:
            assert event["item"]["id"] == last["output"][0]["id"]
        if "item_id" in event:
            assert event["item_id"] == last["output"][0]["id"]


def adds_tokens(x: Exchange) -> bool:
    """A system prompt makes the prompt longer."""
    return bool(x.answer["input_tokens"] > x.again(system=...).answer["input_tokens"])


def token_texts(x: Exchange) -> list[str]:
    """Texts of the tokens of an answer with log probabilities."""
    logprobs = x.ok.answer["choices"][0]["logprobs"]
    return logprobs["tokens"] if "tokens" in logprobs else [token["token"] for token in logprobs["content"]]
