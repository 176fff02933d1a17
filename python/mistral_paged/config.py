"""The `from-config` command: a TOML file with the flags of `serve` or `run`, by section."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mistral_paged.flags import COMMANDS, LATER_TOOLS, Flag, Usage

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KINDS: dict[Any, tuple[tuple[type, ...], str]] = {int: ((int,), "a whole number"), float: ((int, float), "a number")}
"""What a value must be, where it is not a text, and that in words."""
SECTIONS = {"serve": ("global", "runtime", "server", "paged_attn"), "run": ("global", "runtime", "paged_attn", "request")}
SUBSECTIONS = ("format", "adapter", "quantization", "device", "multimodal")
"""Tables within a model that only set its keys in order."""
ALIASES = {"in_situ_quant": "isq"}
ANYWHERE = ("cpu", "device", "num_threads")
"""Flags of `[runtime]` that a model may have as well."""


def read_toml(path: Path) -> dict[str, Any]:
    """The file's content; `ValueError` where there is none."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def words(path: Path) -> list[str]:
    """The command line that a file means.

    `ValueError` for a file that cannot be read; `Usage`, with the key and the nearest one that there is, for what no flag does.
    """
    content = read_toml(path)
    try:
        return list(translate(content))
    except Usage as error:
        raise Usage(f"{path}: {error}") from None


def translate(content: dict[str, Any]) -> Iterator[str]:
    """The words of a command line, the command first."""
    command = content.pop("command", None)
    if command not in SECTIONS:
        raise Usage(f"command is {command!r}; it must be 'serve' or 'run'")
    yield command
    default = content.pop("default_model_id", None)
    model = one_model(content.pop("models", []))
    if default is not None and default != model.get("model_id"):
        raise Usage(f"default_model_id is {default!r}, which is no model_id of [[models]]")
    kind = model.pop("kind", "auto")
    if not isinstance(kind, str) or (command == "run" and kind not in ("auto", "text", "multimodal")):
        raise Usage(f"kind is {kind!r}; it must be 'auto', 'text' or 'multimodal'")
    flags = [flag for group in COMMANDS[command][1] for flag in group.flags]
    yield kind
    for section, table in content.items():
        if section == "sandbox":
            raise Usage(f"[sandbox] is not supported yet; {LATER_TOOLS}")
        if section not in SECTIONS[command] and any(section in sections for sections in SECTIONS.values()):
            raise Usage(f"[{section}] does not go with command = '{command}'")
        if section not in SECTIONS[command]:
            raise Usage(f"unknown key '{section}'{nearest(section, [*SECTIONS[command], 'models', 'command'])}")
        yield from in_section(section, table, flags)
    yield from in_section("models", model, flags)


def one_model(models: Any) -> dict[str, Any]:
    """The model's keys, those of its tables too."""
    if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        raise Usage("models must be [[models]]")
    if len(models) > 1:
        raise Usage(f"there are {len(models)} of [[models]]; a process has one model, so start a second one with the others")
    found: dict[str, Any] = {}
    for key, value in (models[0] if models else {}).items():
        inner = value if key in SUBSECTIONS and isinstance(value, dict) else {key: value}
        if double := set(inner) & set(found):
            raise Usage(f"[[models]] has '{min(double)}' twice")
        found |= inner
    return found


def in_section(section: str, table: object, flags: list[Flag]) -> Iterator[str]:
    """The words of a section."""
    if not isinstance(table, dict):
        raise Usage(f"{section} must be a table, [{section}]")
    own = {key: flag for flag in flags if is_in(flag, section) for key in flag.keys}
    for key, value in table.items():
        flag = own.get(ALIASES.get(str(key), str(key)))
        if flag is None:
            other = next((flag for flag in flags if flag.section is not None and key in flag.keys), None)
            hint = nearest(key, list(own)) if other is None else f"; it belongs to [{section_of(other)}]"
            raise Usage(f"unknown key '{key}' in [{section}]{hint}")
        yield from of_flag(flag, value, f"{key} in [{section}]")


def is_in(flag: Flag, section: str) -> bool:
    """Whether a section may have a flag."""
    if section == "models":
        return flag.section == "model" or flag.keys[0] in ANYWHERE
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
