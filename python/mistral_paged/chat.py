"""The `run` command: one answer, or a conversation."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mistral_paged import ChatCompletionRequest, RgbImage, Runner, Sound, Usage, Video
from mistral_paged.console import Lines, note
from mistral_paged.flags import SAMPLING_DEFAULTS as SAMPLING
from mistral_paged.flags import Usage as WrongUsage
from mistral_paged.loading import load

SETTINGS: dict[str, tuple[str, Callable[[str], float], Callable[[float], bool], str]] = {
    "/temperature": ("temperature", float, lambda number: 0 <= number < math.inf, "a number, 0 or more"),
    "/topk": ("top_k", int, lambda number: 0 <= number < 2**63, "a whole number, 0 (off) or more"),
    "/topp": ("top_p", float, lambda number: 0 < number <= 1, "a number above 0 and at most 1"),
}
"""Commands of the chat that set a field: the field, its type, what it can be, and that in words."""
KINDS = ("auto", "text", "multimodal")
"""What `run` says of the model. Of these, auto is text, or with `--image`, `--video` or `--audio` multimodal."""
PARTS: dict[str, Callable[[Path], Any]] = {"image": RgbImage, "video": Video, "audio": Sound}
"""What a message may have beside text."""
MULTIMODAL = "`run multimodal` sees images, hears sounds, or does both"
"""What takes what a model of text does not."""
CHAT_HELP = """\
/help              this text
/exit              leave (or Ctrl-D)
/system TEXT       start over with this system message
/clear             start over
/temperature X     0 is greedy
/topk N            the N likeliest tokens
/topp P            the likeliest tokens that have probability P together
/image FILE        an image for the next message; may be given again
/video FILE        a video for the next message; may be given again
/audio FILE        a sound for the next message; may be given again
/adapter ALIAS     the adapter that answers; without ALIAS none
Ctrl-C stops an answer; what there is of it stays in the conversation."""


def describe_command(command: argparse.ArgumentParser) -> None:
    """What the help of `run` says besides its flags."""
    # Without `choices`: the value of a flag that does not exist is taken for a kind, and the flag is what is to be named.
    command.add_argument(
        "kind", nargs="?", default="auto", metavar="KIND", help="auto, text or multimodal, which sees images or hears sounds"
    )


def check(options: argparse.Namespace) -> None:
    """Refuses a kind that cannot be run, and images, videos and sounds without an answer, before a model is loaded; `Usage`."""
    if options.kind not in KINDS:
        raise WrongUsage(f"argument KIND: invalid choice: {options.kind!r} (choose from {', '.join(map(repr, KINDS))})")
    for flag, given in [("image", options.image), ("video", options.video), ("audio", options.audio)]:
        if given is None:
            continue
        if options.input is None:
            raise WrongUsage(f"--{flag} goes with -i TEXT; in a chat, /{flag} FILE adds one to the next message")
        if options.kind == "text":
            raise WrongUsage(f"--{flag} cannot be used with a model of the kind 'text'; {MULTIMODAL}")
        options.kind = "multimodal"


def run(options: argparse.Namespace) -> None:
    """Loads the model, then answers once or chats."""
    check(options)
    media = [part_of("image", Path(file)) for file in options.image or []]
    media += [part_of("video", Path(file)) for file in options.video or []]
    media += [part_of("audio", Path(file)) for file in options.audio or []]
    runner = load(options)
    chat = Chat(runner, options)
    if options.input is not None:
        chat.media = media
        note(chat.answer(options.input))
        return
    lines = Lines()
    if lines.interactive:
        note("Chat with the model; /help lists the commands.")
    while True:
        try:
            text = lines.read().strip()
        except EOFError:
            if lines.interactive:
                note("")
            return
        if text == "/exit":
            return
        if text.startswith("/"):
            chat.command(text)
        elif text:
            try:
                note(chat.answer(text))
            except KeyboardInterrupt:
                note("\n(stopped)")
            except ValueError as error:
                note(f"error: {error}")


def part_of(kind: str, file: Path) -> dict[str, Any]:
    """The part of a message that an image, a video or a sound is; `ValueError` that names the file."""
    try:
        return {"type": kind, kind: PARTS[kind](file)}
    except ValueError as error:
        raise ValueError(str(error).removeprefix("`source`: ")) from None


class Chat:
    """A conversation, and how the answers are sampled."""

    def __init__(self, runner: Runner, options: argparse.Namespace) -> None:
        self.runner = runner
        self.options = options
        self.messages: list[dict[str, Any]] = []
        self.media: list[dict[str, Any]]
        self.model = runner.generation_config()
        self.clear()

    def clear(self) -> None:
        """Starts over, with the system message if there is one; what waits for the next message is forgotten."""
        self.media = []
        system = self.options.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def sampling(self, name: str) -> Any:
        """What a flag says; None where the model says something; else the default."""
        given = getattr(self.options, name)
        return SAMPLING[name] if given is None and self.model[name] is None else given

    def answer(self, text: str) -> str:
        """Streams the answer to standard output and remembers it; lines about how it ended and what it used.

        Of an answer that is stopped, question and text stay in the conversation; a question without any text of an answer does
        not.
        """
        question: dict[str, Any] = {"role": "user", "content": text}
        if self.media:
            question["content"] = [*self.media, {"type": "text", "text": text}]
        options = self.options
        request = ChatCompletionRequest(
            [*self.messages, question],
            "default",
            max_tokens=options.max_tokens,
            temperature=self.sampling("temperature"),
            top_p=self.sampling("top_p"),
            top_k=self.sampling("top_k"),
            min_p=self.sampling("min_p"),
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            repetition_penalty=self.sampling("repetition_penalty"),
            seed=options.seed,
            enable_thinking=options.thinking,
            reasoning_effort=options.reasoning_effort,
            adapter=options.adapter,
            stream=True,
        )
        texts = []
        reason = usage = None
        try:
            for chunk in self.runner.send_chat_completion_request(request):
                part = chunk.choices[0].delta.content or ""
                texts.append(part)
                print(part, end="", flush=True)
                reason, usage = chunk.choices[0].finish_reason, chunk.usage
            print()
        finally:
            said = "".join(texts)
            if said or reason is not None:
                self.media = []
                self.messages += [question, {"role": "assistant", "content": said}]
        return describe_cut(reason, usage, options.max_tokens) + describe(usage)

    def command(self, line: str) -> None:
        """Runs a slash command; an unknown one, or a wrong value, says what would work."""
        name, _, value = line.partition(" ")
        value = value.strip()
        if name in ("/help", "/clear") and value:
            note(f"error: {name} takes no value, got {value!r}")
        elif name == "/help":
            note(CHAT_HELP)
        elif name == "/clear":
            self.clear()
        elif name.removeprefix("/") in PARTS:
            self.add_media(name, value)
        elif name == "/adapter":
            self.options.adapter = value or None
        elif name == "/system":
            self.options.system = value or None
            self.clear()
        elif name in SETTINGS:
            attribute, convert, allows, allowed = SETTINGS[name]
            try:
                number = convert(value)
            except ValueError:
                number = math.nan
            if allows(number):
                setattr(self.options, attribute, number)
            else:
                note(f"error: {name} takes {allowed}, got {value!r}")
        else:
            note(f"error: unknown command {name}; /help lists the commands")

    def add_media(self, name: str, path: str) -> None:
        """An image, a video or a sound for the next message, or why there is none."""
        if self.options.kind != "multimodal":
            note(f"error: this model was loaded for text; {MULTIMODAL}")
        elif not path:
            note(f"error: {name} takes a file")
        else:
            try:
                self.media.append(part_of(name[1:], Path(path).expanduser()))
            except ValueError as error:
                note(f"error: {error}")


def describe_cut(reason: str | None, usage: Usage | None, max_tokens: int) -> str:
    """A line that says so when an answer was cut."""
    if reason != "length":
        return ""
    if usage is not None and usage.completion_tokens >= max_tokens:
        return f"(cut after {max_tokens} tokens; --max-tokens N allows more)\n"
    return "(cut: prompt and answer fill the model's context, or the KV pool)\n"


def describe(usage: Usage | None) -> str:
    """One line about what an answer used."""
    if usage is None:
        return ""
    return (
        f"[{usage.prompt_tokens} prompt tokens at {usage.avg_prompt_tok_per_sec:.1f}/s, "
        f"{usage.completion_tokens} generated at {usage.avg_compl_tok_per_sec:.1f}/s, {usage.total_time_sec:.2f} s in all]"
    )
