"""The command line.

`run` answers or chats, `serve` serves HTTP, `bench` measures; `flags` has the table of all commands and flags.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from mistral_paged import (
    ChatCompletionRequest,
    Runner,
    Usage,
    Which,
    __version__,
    _core,
    completions,
    flags,
    logs,
    older,
)
from mistral_paged import doctor as doctor_report
from mistral_paged import memory as memory_experiment
from mistral_paged import serve as server
from mistral_paged.console import Lines, guarded, note
from mistral_paged.default_model import default_model
from mistral_paged.exceptions import MistralPagedError
from mistral_paged.flags import ARCHITECTURES, CACHE_TYPES, DTYPES, GRAPHS
from mistral_paged.flags import SAMPLING_DEFAULTS as SAMPLING
from mistral_paged.hub import find_local

Handler = Callable[[argparse.Namespace], "int | None"]
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

SETTINGS: dict[str, tuple[str, Callable[[str], float], Callable[[float], bool], str]] = {
    "/temperature": ("temperature", float, lambda number: 0 <= number < math.inf, "a number, 0 or more"),
    "/topk": ("top_k", int, lambda number: 0 <= number < 2**63, "a whole number, 0 (off) or more"),
    "/topp": ("top_p", float, lambda number: 0 < number <= 1, "a number above 0 and at most 1"),
}
"""Commands of the chat that set a field: the field, its type, what it can be, and that in words."""
CHAT_HELP = """\
/help              this text
/exit              leave (or Ctrl-D)
/system TEXT       start over with this system message
/clear             start over
/temperature X     0 is greedy
/topk N            the N likeliest tokens
/topp P            the likeliest tokens that have probability P together
Ctrl-C stops an answer; what there is of it stays in the conversation."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status.

    0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C, 141 when the reader of the output has left.
    """
    return guarded(lambda: handle(argv))


def handle(argv: Sequence[str] | None) -> int:
    """Runs the command line over open streams."""
    parser = build_parser()
    try:
        return perform(parser, sys.argv[1:] if argv is None else argv)
    except flags.Usage as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        note("")
        return 130
    except (ValueError, NotImplementedError) as error:
        note(f"error: {error}")
        return 1


def perform(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs a command line, an older one too."""
    words = flags.behind_the_command(older.translate(words))
    flags.check_command(words)
    options = parser.parse_args(words)
    flags.check_places(options)
    logs.begin(options)
    status: int | None = options.handler(options)
    return status or 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of all arguments."""
    parser = argparse.ArgumentParser(prog="mistral-paged", description="LLM inference over a paged KV cache.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, handler: Handler, under: Commands = commands) -> argparse.ArgumentParser:
        about, groups = flags.COMMANDS[name]
        command = under.add_parser(name.split()[-1], help=about, allow_abbrev=False)
        flags.add(command, groups)
        command.set_defaults(handler=handler, program=command.prog)
        return command

    add("run", run)
    server.describe(add("serve", serve))
    measuring = add("bench", bench)
    measuring.set_defaults(prefix_cache_n=0)
    add("bench serve", later("bench_serve", "run"), measuring.add_subparsers(metavar="serve"))
    memory_experiment.describe_command(add("memory", memory))
    add("from-config", lambda options: from_config(parser, options))
    cache = commands.add_parser("cache", help="the download cache").add_subparsers(required=True)
    add("cache list", later("hub_commands", "cache_list"), cache)
    add("cache delete", later("hub_commands", "cache_delete"), cache)
    add("login", later("hub_commands", "login"))
    completions.describe(add("completions", lambda options: print(completions.script(parser, options.shell))))
    add("doctor", doctor)
    return parser


def later(module: str, name: str) -> Handler:
    """A function of a module that is loaded when the function is called, so that other commands start without it."""

    def handler(options: argparse.Namespace) -> int | None:
        status: int | None = getattr(import_module(f"mistral_paged.{module}"), name)(options)
        return status

    return handler


def from_config(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Runs what a file says."""
    from mistral_paged import config

    return perform(parser, config.words(Path(options.file)))


def bench(options: argparse.Namespace) -> None:
    """Loads the model and measures it."""
    from mistral_paged import bench as benchmark

    benchmark.tests(options)
    benchmark.run(load(options), options)


def doctor(options: argparse.Namespace) -> None:
    """Prints what the machine and the build have."""
    print(json.dumps(_core.survey()) if options.json else doctor_report.text())


def memory(options: argparse.Namespace) -> None:
    """Runs the experiment and prints what it showed; an error if not all requests ran at once for want of memory."""
    report = memory_experiment.run(
        options.mode,
        options.requests,
        select(options),
        kv_mb=options.kv_mb,
        block_size=options.blk_size,
        num_threads=options.num_threads,
        chat_template=options.chat_template,
        jinja_explicit=options.jinja_explicit,
        token_source=options.token_source,
    )
    print(json.dumps(memory_experiment.as_json(report)) if options.json else memory_experiment.describe(report))
    if report.out_of_memory:
        raise MistralPagedError(memory_experiment.describe_shortage(report))


def serve(options: argparse.Namespace) -> int:
    """Loads the model and serves it until a signal ends that; the exit status."""
    server.check(options)
    runner = load(options)
    return server.serve(options, runner, server.model_id(runner.list_models()[0]))


def run(options: argparse.Namespace) -> None:
    """Loads the model, then answers once or chats."""
    runner = load(options)
    chat = Chat(runner, options)
    if options.input is not None:
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


def load(options: argparse.Namespace) -> Runner:
    """The runner that the arguments ask for, with a progress bar on a terminal."""
    with ProgressBar() as bar:
        return Runner(
            which=select(options),
            max_seqs=options.max_seqs,
            no_kv_cache=options.no_kv_cache,
            prefix_cache_n=options.prefix_cache_n,
            token_source=options.token_source,
            chat_template=options.chat_template,
            jinja_explicit=options.jinja_explicit,
            pa_gpu_mem=options.pa_memory_mb,
            pa_gpu_mem_usage=options.pa_memory_fraction,
            pa_ctxt_len=options.pa_context_len,
            pa_blk_size=options.pa_block_size,
            pa_cache_type=CACHE_TYPES[options.pa_cache_type],
            paged_attn=options.paged_attn == "on",
            no_paged_attn=options.paged_attn == "off",
            max_num_batched_tokens=options.max_num_batched_tokens,
            device=options.device,
            deterministic=options.deterministic,
            cpu_tier=options.cpu_tier,
            num_threads=options.num_threads,
            cuda_graphs=GRAPHS[options.cuda_graphs],
            attention_backend=options.attention_backend,
            seed=options.seed,
            fairness=options.fairness,
            load_progress=bar.update,
        )


def select(options: argparse.Namespace) -> Which:
    """Which model: a GGUF file when one is named, else a folder or hub id."""
    dtype = DTYPES[options.dtype]
    model = options.model_id
    if model is None:
        if options.quantized_file is not None:
            raise ValueError("-f names a file in a model; name the model with -m")
        model = str(default_model())
    if options.quantized_file is None and not has_gguf(find_local(model)):
        if options.tok_model_id is not None:
            raise ValueError("--tok-model-id goes with a GGUF file; name it with -f")
        return Which.Plain(
            model,
            arch=ARCHITECTURES.get(options.arch),
            tokenizer_json=options.tokenizer,
            dtype=dtype,
            hf_cache_path=options.hf_cache,
        )
    if options.arch is not None:
        raise ValueError("--arch goes with a model in Hugging Face layout; a GGUF file names its own")
    return Which.GGUF(
        model,
        options.quantized_file.split(";") if options.quantized_file is not None else None,
        tok_model_id=options.tok_model_id,
        dtype=dtype,
        tokenizer_json=options.tokenizer,
        hf_cache_path=options.hf_cache,
    )


def has_gguf(path: Path | None) -> bool:
    """Whether a local model is a GGUF file, or a folder that has such files and is not in Hugging Face layout."""
    if path is None:
        return False
    return path.suffix == ".gguf" if path.is_file() else not (path / "config.json").exists() and any(path.glob("*.gguf"))


class Chat:
    """A conversation, and how the answers are sampled."""

    def __init__(self, runner: Runner, options: argparse.Namespace) -> None:
        self.runner = runner
        self.options = options
        self.messages: list[dict[str, str]] = []
        self.model = runner.generation_config()
        self.clear()

    def clear(self) -> None:
        """Starts over, with the system message if there is one."""
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
        question = {"role": "user", "content": text}
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
            stream=True,
        )
        parts = []
        reason = usage = None
        try:
            for chunk in self.runner.send_chat_completion_request(request):
                part = chunk.choices[0].delta.content or ""
                parts.append(part)
                print(part, end="", flush=True)
                reason, usage = chunk.choices[0].finish_reason, chunk.usage
            print()
        finally:
            said = "".join(parts)
            if said or reason is not None:
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


class ProgressBar:
    """Bytes of weights loaded, on standard error when that is a terminal."""

    WIDTH = 40

    def __init__(self) -> None:
        self.shown = sys.stderr.isatty()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def update(self, done: int, total: int) -> None:
        """Draws the bar."""
        if self.shown and total > 0:
            full = self.WIDTH * done // total
            bar = "#" * full + "." * (self.WIDTH - full)
            print(f"\rloading [{bar}] {done >> 20}/{total >> 20} MB", end="", file=sys.stderr, flush=True)


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


if __name__ == "__main__":
    raise SystemExit(main())
