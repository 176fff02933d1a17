"""Prompts of a Ray Data dataset, answered by a pool of actors with an engine each; a run that was cut off can be gone on with."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from mistral_paged import ChatCompletionRequest, CompletionRequest, loading
from mistral_paged.exceptions import InvalidArgumentError, MistralPagedError
from mistral_paged.flags import LOADING, LOGGING
from mistral_paged.ray.application import parse, words_of

if TYPE_CHECKING:
    import pyarrow
    from ray.data import Dataset

Row = dict[str, Any]


def map_batches(
    dataset: Dataset,
    output: str | os.PathLike[str],
    *,
    key: str = "id",
    column: str = "prompt",
    request: Mapping[str, Any] | None = None,
    concurrency: int = 1,
    batch_size: int = 64,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    **flags: Any,
) -> Dataset:
    """Answers each row of a dataset, and returns the answers as a dataset, in any order.

    :param dataset: rows with a `key`, a text or whole number that no other row has, and a `column` with the prompt: a text for a
        completion, or a list of messages for a chat.
    :param output: folder for the answers, on a file system that all nodes have. Each batch is a file, which comes under its name
        when it is whole. Rows that have an answer there are not asked again. Rows have `key`, `text`, `finish_reason`,
        `prompt_tokens`, `completion_tokens`, and `error`, which is empty unless the row was refused; a row with an error is done.
    :param request: keyword arguments of a `CompletionRequest` or a `ChatCompletionRequest`: `max_tokens`, `temperature`, ...
    :param concurrency: actors, each with an engine.
    :param batch_size: rows that an engine is given at once.
    :param num_cpus: cores of an actor; its engine has as many threads, unless `num_threads` says otherwise.
    :param num_gpus: GPUs of an actor.
    :param flags: the engine's flags of the command line: `model`, `isq`, `pa_memory_mb`, ...
    :raises InvalidArgumentError: naming the argument, the key that comes twice, or what of the folder is of other prompts or
        another model.
    """
    if concurrency < 1 or batch_size < 1:
        raise InvalidArgumentError(f"`concurrency` is {concurrency} and `batch_size` {batch_size}; both must be at least 1")
    asked = dict(request or {})
    asked_of("", asked)
    words = list(command_line(flags))
    if "num_threads" not in flags and num_gpus == 0:
        words.append(f"--num-threads={max(1, int(num_cpus))}")
    parse(words)
    folder = Path(output)
    settle(folder, {"key": key, "column": column, "request": asked, "flags": {name: str(flags[name]) for name in sorted(flags)}})
    check_keys(dataset, key, column)
    known = ray.put({row["key"]: row["digest"] for row in answers(folder)})
    waiting = dataset.map_batches(
        _without_done,
        fn_args=(known, key, column, str(folder)),
        batch_format="pyarrow",
        batch_size=batch_size,
        zero_copy_batch=True,
    )
    answered = waiting.map_batches(
        _Answerer,
        fn_constructor_args=(words, str(folder), key, column, asked),
        batch_format="pyarrow",
        batch_size=batch_size,
        compute=ray.data.ActorPoolStrategy(size=concurrency),
        num_cpus=num_cpus,
        num_gpus=num_gpus,
    )
    for _ in answered.iter_batches(batch_size=None):
        pass
    found = sorted(str(path) for path in folder.glob("*.jsonl"))
    return ray.data.read_json(found).drop_columns(["digest"]) if found else ray.data.from_items([])


def command_line(flags: Mapping[str, Any]) -> Iterator[str]:
    """The words of a command line that load the model that the flags name."""
    known = {key: flag for group in LOADING if group.flags is not LOGGING for flag in group.flags for key in flag.keys}
    yield "run"
    for name, value in flags.items():
        if name not in known:
            raise InvalidArgumentError(f"there is no argument `{name}` of an engine; there are {', '.join(sorted(known))}")
        yield from words_of(known[name], name, value)


def asked_of(prompt: Any, request: Mapping[str, Any]) -> CompletionRequest | ChatCompletionRequest:
    """The request for a prompt: a chat for a list of messages, else a completion."""
    if request.get("stream"):
        raise InvalidArgumentError("`stream` has no use here: answers are written when they are whole")
    if isinstance(prompt, list):
        # A column of messages has all keys that any of them has, with nulls.
        messages = [{name: value for name, value in message.items() if value is not None} for message in prompt]
        return ChatCompletionRequest(messages, "default", **request)
    return CompletionRequest(prompt, "default", **request)


def settle(folder: Path, settings: dict[str, Any]) -> None:
    """Keeps what decides the answers beside them, and refuses a folder with answers to something else."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        file, text = folder / "settings.json", json.dumps(settings, sort_keys=True)
    except TypeError as error:
        raise InvalidArgumentError(f"`request` must be plain data, as JSON has it: {error}") from None
    if not file.exists():
        write(file, text)
        return
    before = json.loads(file.read_text())
    for name, value in json.loads(text).items():
        if before.get(name) != value:
            raise InvalidArgumentError(
                f"{folder} has answers with {name} = {before.get(name)!r}, and now it is {value!r}: name another folder"
            )


def check_keys(dataset: Dataset, key: str, column: str) -> None:
    """Refuses a dataset that lacks a column, and two rows with one key, one of whose answers would be lost."""
    names = dataset.columns() or []
    for name in (key, column):
        if names and name not in names:
            raise InvalidArgumentError(f"the dataset has no column {name!r}; it has {', '.join(names)}")
    seen = set()
    for row in dataset.select_columns([key]).iter_rows() if names else ():
        if not isinstance(row[key], (str, int)):
            raise InvalidArgumentError(f"the key {row[key]!r} is neither a text nor a whole number")
        if row[key] in seen:
            raise InvalidArgumentError(f"two rows have the key {row[key]!r}: each needs its own")
        seen.add(row[key])


def answers(folder: Path) -> Iterator[Row]:
    """The answers that a folder has."""
    for path in sorted(folder.glob("*.jsonl")):
        yield from map(json.loads, path.read_text().splitlines())


def digest_of(prompt: Any) -> str:
    """What tells prompts apart."""
    return hashlib.blake2b(json.dumps(prompt, sort_keys=True).encode(), digest_size=16).hexdigest()


def write(file: Path, text: str) -> None:
    """Writes a file that is whole or not there."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    with part.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)


def _without_done(table: pyarrow.Table, known: ray.ObjectRef, key: str, column: str, folder: str) -> pyarrow.Table:
    """The rows that have no answer yet; `known` has the digests of those that have one, by key."""
    done: dict[Any, str] = ray.get(known)
    rows = table.select([key, column]).to_pylist()
    for row in rows:
        if done.get(row[key], "") not in ("", digest_of(row[column])):
            raise InvalidArgumentError(f"{folder} has the answer to another prompt for the key {row[key]!r}: name another folder")
    return table.filter([row[key] not in done for row in rows])


class _Answerer:
    """An actor with an engine."""

    def __init__(self, words: list[str], folder: str, key: str, column: str, request: Row) -> None:
        self.runner = loading.load(parse(words))
        self.folder, self.key, self.column, self.request = Path(folder), key, column, request

    async def __call__(self, table: pyarrow.Table) -> AsyncIterator[pyarrow.Table]:
        """Answers a batch and writes a file whose name follows from the batch, so that one that is tried again is one file."""
        rows = table.select([self.key, self.column]).to_pylist()
        if rows:
            lines = await asyncio.gather(*map(self.answer, rows))
            name = digest_of([row[self.key] for row in rows])
            write(self.folder / f"{name}.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))
        yield table.select([self.key])

    async def answer(self, row: Row) -> Row:
        """The answer to one row."""
        prompt = row[self.column]
        line = {"key": row[self.key], "digest": digest_of(prompt), "text": "", "finish_reason": "error"}
        counts = {"prompt_tokens": 0, "completion_tokens": 0, "error": ""}
        try:
            request = asked_of(prompt, self.request)
            response: Any
            if isinstance(request, ChatCompletionRequest):
                response = await self.runner.achat(request)
                text = response.choices[0].message.content or ""
            else:
                response = await self.runner.acomplete(request)
                text = response.choices[0].text
        except (MistralPagedError, TypeError) as error:
            return line | counts | {"error": str(error) or type(error).__name__}
        usage = response.usage
        counts |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        return line | counts | {"text": text, "finish_reason": response.choices[0].finish_reason}
