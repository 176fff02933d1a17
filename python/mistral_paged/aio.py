"""Requests on an asyncio event loop: what `Runner.achat`, `Runner.acomplete`, `Runner.aembed` and `Runner.arerank` return.

The engine writes a byte to a socket of the loop once a step, so that the loop wakes once for all its requests that got tokens. No
thread waits for any of them.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

from mistral_paged._core import (
    ChatCompletionChunkResponse,
    ChatCompletionRequest,
    CompletionRequest,
    CompletionResponse,
    EmbeddingRequest,
    EventSignal,
    PendingRequest,
    RerankRequest,
    Runner,
    submit,
    submit_embeddings,
    submit_scores,
    takes_long,
)


class _Hub:
    """The requests of one event loop that wait; used on the loop's thread alone."""

    def __init__(self) -> None:
        self.signal = EventSignal()
        self.waiters: dict[int, asyncio.Future[None]] = {}

    async def wait(self, key: int) -> None:
        """Returns when the request has news, or may have."""
        if key in self.waiters:
            raise RuntimeError("another task waits for this stream already: one at a time iterates over it")
        loop = asyncio.get_running_loop()
        if not self.waiters:
            loop.add_reader(self.signal.fileno(), self.wake)
        waiter = self.waiters[key] = loop.create_future()
        try:
            await waiter
        finally:
            del self.waiters[key]
            if not self.waiters and not loop.is_closed():
                loop.remove_reader(self.signal.fileno())

    def wake(self) -> None:
        for key in self.signal.take():
            waiter = self.waiters.get(key)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)


_hubs: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Hub] = weakref.WeakKeyDictionary()


def _hub() -> _Hub:
    loop = asyncio.get_running_loop()
    hub = _hubs.get(loop)
    if hub is None:
        hub = _hubs[loop] = _Hub()
    return hub


class AsyncChatCompletionStreamer:
    """Iterates over the parts of a chat answer with `async for`.

    There is one for each token's text, and one with the `finish_reason` for each choice; the last has the usage. An error of the
    engine is raised from the iteration. A stream belongs to the loop that made it.

    Dropping it, `aclose()`, the end of `async with` and cancelling the task that waits for a chunk cancel the request and free
    its blocks; no chunks come after that.
    """

    def __init__(self, request: PendingRequest, hub: _Hub) -> None:
        self._request = request
        self._hub = hub

    def __aiter__(self) -> AsyncChatCompletionStreamer:
        return self

    async def __anext__(self) -> ChatCompletionChunkResponse:
        if _hub() is not self._hub:
            raise RuntimeError("the stream belongs to another event loop: iterate over it where it was made")
        while (chunk := self._request.poll()) is None:
            try:
                await self._hub.wait(self._request.key)
            except asyncio.CancelledError:
                self._request.close()
                raise
        assert isinstance(chunk, ChatCompletionChunkResponse)
        return chunk

    async def aclose(self) -> None:
        """Cancels the request, if it still runs, and frees its blocks."""
        self._request.close()

    async def __aenter__(self) -> AsyncChatCompletionStreamer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._request.close()


async def _submit(
    runner: Runner, request: ChatCompletionRequest | CompletionRequest, model_id: str | None
) -> tuple[PendingRequest, _Hub]:
    hub = await _loaded_hub(runner, model_id)
    if takes_long(request):
        # A task that is cancelled meanwhile drops what comes of it, which cancels the request.
        return await asyncio.to_thread(submit, runner, request, hub.signal, model_id), hub
    return submit(runner, request, hub.signal, model_id), hub


async def _loaded_hub(runner: Runner, model_id: str | None) -> _Hub:
    hub = _hub()
    while runner.list_unloaded_models():
        await asyncio.to_thread(runner.reload_model, model_id)
    return hub


async def _answer(pending: PendingRequest, hub: _Hub) -> Any:
    try:
        while (response := pending.poll()) is None:
            await hub.wait(pending.key)
        return response
    finally:
        pending.close()


async def chat(runner: Runner, request: ChatCompletionRequest, model_id: str | None) -> Any:
    """The `ChatCompletionResponse`, or an `AsyncChatCompletionStreamer` of a request with `stream=True`."""
    pending, hub = await _submit(runner, request, model_id)
    return AsyncChatCompletionStreamer(pending, hub) if request.stream else await _answer(pending, hub)


async def complete(runner: Runner, request: CompletionRequest, model_id: str | None) -> CompletionResponse:
    """The `CompletionResponse`."""
    response = await _answer(*await _submit(runner, request, model_id))
    assert isinstance(response, CompletionResponse)
    return response


async def embed(runner: Runner, request: EmbeddingRequest, model_id: str | None) -> list[list[float]]:
    """A vector for each input."""
    hub = await _loaded_hub(runner, model_id)
    return await _answers(submit_embeddings(runner, request, hub.signal, model_id), hub)


async def rerank(runner: Runner, request: RerankRequest, model_id: str | None) -> list[float]:
    """A score for each document."""
    hub = await _loaded_hub(runner, model_id)
    vectors = await _answers(submit_scores(runner, request, hub.signal, model_id), hub)
    return [score for (score,) in vectors]


async def _answers(pending: list[PendingRequest], hub: _Hub) -> list[Any]:
    """Those of all; leaving early ends what is left."""
    try:
        return [await _answer(one, hub) for one in pending]
    finally:
        for one in pending:
            one.close()
