"""The `from-config` command: a TOML file with the flags of `serve` or `run`, by section."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from mistral_paged.flags import COMMANDS, LATER_TOOLS, Flag, Usage

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KINDS: dict[Any, tuple[tuple[type, ...], str]] = {int: ((int,), "a whole number"), float: ((int, float), "a number")}
"""What a value must be, where it is not a text, and that in words."""
SECTIONS = {"serve": ("global", "runtime", "server", "paged_attn"), "run": ("global", "runtime", "paged_attn", "request")}
SUBSECTIONS = ("format", "adapter", "quantization", "device", "multimodal", "paged_attn")
"""Tables within a model that only set its keys in order."""
ALIASES = {"in_situ_quant": "isq"}
OF_MODELS = ("model", "runtime", "paged_attn")
"""Sections whose flags a model may have for itself."""
OF_A_MODEL = ("served_model_name", "kv_events", "kv_events_replay", "kv_events_topic")
"""Flags of `[server]` that are of one model: where there are several, only those have them."""
OF_EACH_MODEL = ("lazy", "idle_unload")
"""Flags of `[server]` that a model may have for itself, where they go before what all share."""
Words: TypeAlias = tuple[Flag, list[str]]
"""A flag, and the words by which it is given."""


def read_toml(path: Path) -> dict[str, Any]:
    """The file's content; `ValueError` where there is none."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


@dataclass(frozen=True)
class Meaning:
    """What a file means."""

    lines: list[list[str]]
    """A command line for each of its models, all of one command."""
    default: int = 0
    """Which of them is the default model's."""


def meaning(path: Path) -> Meaning:
    """The command lines that a file means.

    `ValueError` for a file that cannot be read; `Usage`, with the key and the nearest one that there is, for what no flag does.
    """
    content = read_toml(path)
    try:
        return translate(content)
    except Usage as error:
        raise Usage(f"{path}: {error}") from None


def translate(content: dict[str, Any]) -> Meaning:
    """The command lines of a file's content."""
    command = content.pop("command", None)
    if command not in SECTIONS:
        raise Usage(f"command is {command!r}; it must be 'serve' or 'run'")
    default_id = content.pop("default_model_id", None)
    models = all_models(content.pop("models", []))
    if command == "run" and len(models) > 1:
        raise Usage(f"there are {len(models)} of [[models]]; command = 'run' has one model, and 'serve' any number")
    default = next((number for number, model in enumerate(models) if default_id in called(model)), None)
    if default_id is not None and default is None:
        raise Usage(f"default_model_id is {default_id!r}, which is no model_id of [[models]], and no alias")
    flags = [flag for group in COMMANDS[command][1] for flag in group.flags]
    shared: list[Words] = []
    for section, table in content.items():
        if section == "sandbox":
            raise Usage(f"[sandbox] is not supported yet; {LATER_TOOLS}")
        if section not in SECTIONS[command] and any(section in sections for sections in SECTIONS.values()):
            raise Usage(f"[{section}] does not go with command = '{command}'")
        if section not in SECTIONS[command]:
            raise Usage(f"unknown key '{section}'{nearest(section, [*SECTIONS[command], 'models', 'command'])}")
        shared += in_section(section, table, flags)
    if len(models) > 1 and (of_one := [flag for flag, _ in shared if flag.section == "server" and flag.keys[0] in OF_A_MODEL]):
        raise Usage(f"{of_one[0].keys[0]} in [server] is of one model, and there are {len(models)}: it belongs to [[models]]")
    return Meaning([list(line_of(command, model, flags, shared)) for model in models], default or 0)


def called(model: dict[str, Any]) -> tuple[object, ...]:
    """What `default_model_id` may call a model."""
    return tuple(model[key] for key in ("model_id", "alias") if key in model)


def line_of(command: str, model: dict[str, Any], flags: list[Flag], shared: list[Words]) -> Iterator[str]:
    """The command line of a model: its own keys go before those that all models share."""
    kind = model.pop("kind", "auto")
    if not isinstance(kind, str) or (command == "run" and kind not in ("auto", "text", "multimodal")):
        raise Usage(f"kind is {kind!r}; it must be 'auto', 'text' or 'multimodal'")
    own = list(in_section("models", model, flags))
    yield from (command, kind)
    for flag, line in shared:
        if not any(excludes(mine, flag) for mine, _ in own):
            yield from line
    for _, line in own:
        yield from line


def excludes(one: Flag, other: Flag) -> bool:
    """Whether only one of two flags can be given."""
    return one.name == other.name or one.name in other.conflicts or other.name in one.conflicts


def all_models(models: Any) -> list[dict[str, Any]]:
    """The keys of each model, those of its tables too; of a file without models those of one, the default model."""
    if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        raise Usage("models must be [[models]]")
    return [keys_of(model) for model in models] or [{}]


def keys_of(model: dict[str, Any]) -> dict[str, Any]:
    """The keys of a model, those of its tables too."""
    found: dict[str, Any] = {}
    for key, value in model.items():
        inner = value if key in SUBSECTIONS and isinstance(value, dict) else {key: value}
        if double := set(inner) & set(found):
            raise Usage(f"[[models]] has '{min(double)}' twice")
        found |= inner
    return found


def in_section(section: str, table: object, flags: list[Flag]) -> Iterator[Words]:
    """The words of a section's flags."""
    if not isinstance(table, dict):
        raise Usage(f"{section} must be a table, [{section}]")
    own = {key: flag for flag in flags if is_in(flag, section) for key in flag.keys}
    for key, value in table.items():
        flag = own.get(ALIASES.get(str(key), str(key)))
        if flag is None:
            other = next((flag for flag in flags if flag.section is not None and key in flag.keys), None)
            hint = nearest(key, list(own)) if other is None else f"; it belongs to [{section_of(other)}]"
            raise Usage(f"unknown key '{key}' in [{section}]{hint}")
        yield flag, list(of_flag(flag, value, f"{key} in [{section}]"))


def is_in(flag: Flag, section: str) -> bool:
    """Whether a section may have a flag."""
    if section == "models":
        return flag.section in OF_MODELS or flag.keys[0] in OF_A_MODEL + OF_EACH_MODEL
    return flag.section == section


def section_of(flag: Flag) -> str:
    """Where a flag belongs."""
    return "[models]" if flag.section == "model" else str(flag.section)


def nearest(key: str, known: list[str]) -> str:
    """What may have been meant."""
    close = difflib.get_close_matches(key, known, 1, 0.6)
    return f"; did you mean '{close[0]}'?" if close else f"; there are {', '.join(sorted(set(known)))}"


def of_flag(flag: Flag, value: Any, where: str) -> Iterator[str]:
    """The words of one key."""
    if flag.metavar is None or flag.alone is not None:
        if not isinstance(value, bool):
            raise Usage(f"{where} must be true or false, got {value!r}")
        if flag.alone is not None:
            yield f"{flag.name}={str(value).lower()}"
        elif value:
            yield flag.name
        return
    if isinstance(value, list) and flag.name == "--quantized-file":
        value = ";".join(text(part, flag, where) for part in value)
    if flag.several and isinstance(value, list):
        yield from (flag.name, *(text(one, flag, where) for one in value))
        return
    for one in value if flag.repeated and isinstance(value, list) else [value]:
        yield f"{flag.name}={text(one, flag, where)}"


def text(value: Any, flag: Flag, where: str) -> str:
    """A value as the command line has it."""
    types, words = KINDS.get(flag.kind, ((str,), "a text"))
    if not isinstance(value, types) or isinstance(value, bool):
        raise Usage(f"{where} must be {words}, got {value!r}")
    return str(value)
