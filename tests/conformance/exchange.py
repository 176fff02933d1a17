"""A request with its answer, and what the relations of cases ask of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from test_server import Reply, Server

from .form import Send


@dataclass
class Exchange:
    """A request that was sent, and what came back."""

    servers: Callable[[str], Server]
    server: Server
    send: Send
    reply: Reply

    @classmethod
    def of(cls, servers: Callable[[str], Server], server: Server, send: Send) -> Exchange:
        return cls(servers, server, send, server.send(send.method, send.path, send.body, dict(send.headers)))

    def again(self, **changes: Any) -> Exchange:
        """The same request with other keys."""
        return self.other(self.send.but(**changes))

    def other(self, send: Send, on: str | None = None) -> Exchange:
        """Another request, to this server or to another."""
        return Exchange.of(self.servers, self.servers(on) if on else self.server, send)

    def at_once(self, *sends: Send) -> list[Exchange]:
        """Requests that run together."""
        with ThreadPoolExecutor(len(sends)) as threads:
            return list(threads.map(self.other, sends))

    @property
    def events(self) -> list[Any]:
        """The parsed data of a stream, without OpenAI's mark of the end, which must be there."""
        kind = self.reply.headers["content-type"]
        assert kind.startswith("text/event-stream"), kind
        frames = self.reply.body.decode().split("\n\n")
        assert frames.pop() == ""
        lines = [line[6:] for frame in frames for line in frame.split("\n") if line.startswith("data: ")]
        if self.send.path in ("/v1/chat/completions", "/v1/completions"):
            assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    @property
    def answer(self) -> Any:
        """The JSON of an answer; the list of a stream's events; the text of a page."""
        if self.reply.status == 200 and self.send.streams:
            return self.events
        kind = self.reply.headers.get("content-type", "")
        return self.reply.json if kind.startswith("application/json") else self.reply.body.decode()

    @property
    def ok(self) -> Exchange:
        assert self.reply.status == 200, self.reply.body
        return self

    def text(self, index: int = 0) -> str:
        """The text of one choice, streamed or not, in any of the four forms."""
        answer = self.ok.answer
        if self.send.path == "/v1/messages":
            if not self.send.streams:
                return "".join(block["text"] for block in answer["content"])
            return "".join(event["delta"]["text"] for event in answer if event["type"] == "content_block_delta")
        if self.send.path == "/v1/responses":
            if not self.send.streams:
                return "".join(part["text"] for item in answer["output"] for part in item["content"])
            return "".join(event["delta"] for event in answer if event["type"] == "response.output_text.delta")
        if not self.send.streams:
            choice = answer["choices"][index]
            return choice["text"] if "text" in choice else choice["message"]["content"]
        parts = self.choices(index)
        return "".join(part["text"] if "text" in part else part["delta"].get("content") or "" for part in parts)

    def choices(self, index: int) -> list[Any]:
        """The parts of one choice in a stream."""
        return [choice for chunk in self.events for choice in chunk["choices"] if choice["index"] == index]

    def finish(self, index: int = 0) -> str:
        """Why a choice ended; in a stream exactly one part says it, the last."""
        if not self.send.streams:
            return str(self.answer["choices"][index]["finish_reason"])
        reasons = [part["finish_reason"] for part in self.choices(index)]
        assert all(reason is None for reason in reasons[:-1]), reasons
        return str(reasons[-1])

    def usage(self) -> Any:
        """The usage, of a stream its last chunk's, whose list of choices is empty."""
        if not self.send.streams:
            return self.answer["usage"]
        last = self.events[-1]
        assert last["choices"] == []
        return last["usage"]

    def num_prompt_tokens(self) -> int:
        """Tokens of the chat's or the text's prompt, by the routes that count them."""
        body = self.send.body
        if "messages" in body:
            return int(self.other(Send("POST", "/apply-template", {"messages": body["messages"]})).ok.answer["count"])
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        if isinstance(prompts[0], int):
            return len(prompts)
        ids = [
            prompt if isinstance(prompt, list) else self.other(Send("POST", "/tokenize", {"prompt": prompt})).ok.answer["tokens"]
            for prompt in prompts
        ]
        return sum(map(len, ids))
