"""The command line: its parser, and what each command begins.

`run` answers or chats, `serve` serves HTTP, `bench` measures; `flags` has the table of all commands and flags.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from mistral_paged import __version__, _core, chat, completions, flags, logs, older
from mistral_paged import doctor as doctor_report
from mistral_paged import memory as memory_experiment
from mistral_paged import serve as server
from mistral_paged.console import guarded, note
from mistral_paged.exceptions import AddressError, MistralPagedError
from mistral_paged.loading import load, select

if TYPE_CHECKING:
    _Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

Handler = Callable[[argparse.Namespace], "int | None"]


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
    options = parsed(parser, words)
    logs.begin(options)
    status: int | None = options.handler(options)
    return status or 0


def parsed(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """What a command line says, an older one too."""
    words = flags.behind_the_command(older.translate(words))
    flags.check_command(words)
    options = parser.parse_args(words)
    flags.check_places(options)
    return options


def build_parser() -> argparse.ArgumentParser:
    """The parser of all arguments."""
    parser = argparse.ArgumentParser(prog="mistral-paged", description="LLM inference over a paged KV cache.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, handler: Handler, under: _Commands = commands) -> argparse.ArgumentParser:
        about, groups = flags.COMMANDS[name]
        command = under.add_parser(name.split()[-1], help=about, allow_abbrev=False)
        flags.add(command, groups)
        command.set_defaults(handler=handler, program=command.prog)
        return command

    chat.describe_command(add("run", chat.run))
    server.describe(add("serve", serve))
    measuring = add("bench", bench)
    measuring.set_defaults(prefix_cache_n=0, state_snapshot_mb=None)
    add("bench serve", later("bench_serve", "run"), measuring.add_subparsers(metavar="serve"))
    add("tune", later("tune", "run"))
    memory_experiment.describe_command(add("memory", memory))
    add("simulate", later("simulating", "run")).add_argument("trace", metavar="TRACE", help="CSV file of requests")
    add("quantize", later("quantizing", "run"))
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

    meaning = config.meaning(Path(options.file))
    if len(meaning.lines) == 1:
        return perform(parser, meaning.lines[0])
    models = [parsed(parser, words) for words in meaning.lines]
    logs.begin(models[0])
    return serve_all(models, meaning.default)


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
    """Loads the model and serves it until a signal ends that, or the models of a folder; the exit status."""
    return serve_all(server.models_of(options), 0)


def serve_all(models: Sequence[argparse.Namespace], default: int) -> int:
    """Loads models, each by its own options, and serves them by those that they share; the exit status."""
    config = server.settings(models, default)
    server.check(models, config)
    runners = []
    for options, model in zip(models, config["models"], strict=True):
        whose = f"{model['model_id']}: " if len(models) > 1 else ""
        try:
            runners.append(load(options))
        except AddressError as error:
            raise flags.Usage(f"{whose}{error}") from None
        except (ValueError, NotImplementedError) as error:
            if not whose:
                raise
            raise ValueError(f"{whose}{error}") from error
    return server.serve(models[0], runners, config)


if __name__ == "__main__":
    raise SystemExit(main())
