"""The documentation of the command line, from the table of flags: `python -m mistral_paged.reference > docs/command-line.md`."""

from __future__ import annotations

from collections.abc import Iterator

from mistral_paged.config import SECTIONS
from mistral_paged.flags import COMMANDS, GLOBAL, NO_COMMANDS, Flag, Group
from mistral_paged.older import GLOBALS, SELECTORS, SWITCH, Meaning

INTRODUCTION = """\
# The command line

<!-- Written by `python -m mistral_paged.reference` from the table of flags; do not edit. -->

`mistral-paged COMMAND [FLAGS]`, or `python -m mistral_paged`. A flag that takes a value has it behind a space or `=`; names are
not abbreviated. `-h` behind a command lists its flags.
"""

ARGUMENTS = {
    "run": ["[KIND]"],
    "serve": ["[KIND]"],
    "memory": ["naive|paged", "N"],
    "simulate": ["TRACE"],
    "completions": ["bash|zsh|tcsh|fish"],
}
"""What stands behind a command besides flags. KIND is `auto`, `text`, `multimodal` or, to serve, `embedding`."""

CONFIGURATION = """\
## Configuration files

`mistral-paged from-config -f FILE.toml` does what a file says. `command` is {commands}; sections are {sections} and `[[models]]`,
of which `"serve"` takes any number (docs/serving.md); `default_model_id` may name one by its `model_id` or `alias`. Keys are the
flags' names with underscores, as the tables above have them. In `[paged_attn]` the prefix `pa_` may be left out, and `mode` is
`paged_attn`. A model's keys may stand in tables of it: `[models.format]`, `[models.adapter]`, `[models.quantization]`,
`[models.device]`, `[models.multimodal]`, `[models.paged_attn]`. A model may have keys of `[runtime]` and `[paged_attn]` for
itself, and `lazy` and `idle_unload` of `[server]`, where they go before what all share; and of `[server]` `served_model_name` and
`kv_events*`. `kind` is `"auto"`, `"text"`,
`"multimodal"` or, to serve, `"embedding"`. A key that does not exist is an error that names the nearest one.

```toml
command = "serve"

[server]
port = 1234

[paged_attn]
memory_mb = 4096
block_size = 32

[[models]]
model_id = "path/or/hub-id"
```
"""

STATUSES = """\
## Exit status

| status | after |
| --- | --- |
| 0 | success; a server that has been drained after SIGTERM |
| 1 | an error, told in one line on standard error |
| 2 | wrong usage |
| 130 | Ctrl-C |
| 141 | the reader of the output has left |
| 143 | a server that was stopped before its requests were over |

## Environment

| variable | meaning |
| --- | --- |
| `MISTRAL_PAGED_API_KEY` | a key that clients of `serve` must send, besides those of flags |
| `KEEP_ALIVE_INTERVAL` | milliseconds between the comments that keep a silent stream open; 10000 |
| `MISTRALRS_CUDA_GRAPHS=0` | the same as `--cuda-graphs off` |
| `MISTRALRS_FLASHINFER_DECODE=0` | the same as `--attention-backend plain` on a GPU |
| `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`, `HF_HUB_OFFLINE` | those of huggingface_hub |
"""


def document() -> str:
    """The whole file."""
    return "\n".join(lines())


def lines() -> Iterator[str]:
    """The file's parts."""
    groups = merged()
    yield INTRODUCTION
    yield from table("command", "does", "flags")
    for command, (about, own) in COMMANDS.items():
        yield row(
            f"`{' '.join([command, *ARGUMENTS.get(command, ())])}`",
            about,
            ", ".join(f"[{group.title}](#{group.title.replace(' ', '-')})" for group in own),
        )
    yield ""
    yield f"{spoken([f'`{flag.name}`' for flag in GLOBAL])} may stand before the command as well."
    yield ""
    for group in groups.values():
        yield f"## {group.title.capitalize()}"
        yield ""
        if group.about is not None:
            yield f"{group.about}\n"
        there = [flag for flag in group.flags if flag.status == "works"]
        columns = 3 if any(flag.section for flag in there) else 2
        yield from table(*("flag", "meaning", "key in a file")[:columns])
        for flag in there:
            yield row(*(signature(flag), flag.help, key(flag))[:columns])
        yield ""
    yield from not_there()
    yield from older()
    sections = dict.fromkeys(section for sections in SECTIONS.values() for section in sections)
    yield CONFIGURATION.format(
        commands=spoken([f'`"{command}"`' for command in SECTIONS], "or"), sections=", ".join(f"`[{name}]`" for name in sections)
    )
    yield STATUSES.rstrip("\n") + "\n"


def merged() -> dict[str, Group]:
    """The groups by title, each with the flags that any command has in it."""
    found: dict[str, Group] = {}
    for group in (group for _, own in COMMANDS.values() for group in own):
        before = found.get(group.title, Group(group.title, ()))
        more = tuple(flag for flag in group.flags if flag.name not in {known.name for known in before.flags})
        found[group.title] = Group(group.title, before.flags + more, before.about or group.about)
    return found


def not_there() -> Iterator[str]:
    """What is known and does not work."""
    yield "## Not there\n"
    yield "These are known from mistral.rs. They end with status 2 and say what works instead.\n"
    yield from table("flag or command", "", "instead")
    every = [flag for group in merged().values() for flag in group.flags]
    working = {flag.name for flag in every if flag.status == "works"}
    for flag in {flag.name: flag for flag in every}.values():
        if flag.name not in working:
            yield row(f"`{flag.name}`", flag.status, flag.planned or flag.left_out or "")
    for command, message in NO_COMMANDS.items():
        status, _, instead = message.partition("; ")
        yield row(f"`{command}`", "planned" if "yet" in status else "left out", instead)
    yield ""


def older() -> Iterator[str]:
    """The older command line."""
    yield "## The older command line\n"
    yield "`mistral-paged FLAGS SELECTOR OPTIONS` is understood as `mistralrs-server` understood it. Flags stand before the"
    yield "selector. `-i` begins a chat, `-p PORT` a server.\n"
    yield from table("older", "newer")
    for names, entry in GLOBALS.items():
        yield row(", ".join(f"`{name}`" for name in names), newer(entry))
    for selector, options in SELECTORS.items():
        if isinstance(options, str):
            yield row(f"`{selector}`", f"not there; {options}")
            continue
        for names, entry in options.items():
            yield row(", ".join(f"`{selector} {name}`" for name in names), newer(entry))
    yield ""


def newer(entry: tuple[str | None, Meaning]) -> str:
    """What an older flag means."""
    metavar, meaning = entry
    if isinstance(meaning, str):
        return f"not there; {meaning}"
    return f"`{' '.join(meaning)}`" if metavar is SWITCH else f"`{' '.join(meaning)} {metavar}`"


def signature(flag: Flag) -> str:
    """A flag's names and value."""
    value = "" if flag.metavar is None else f" {flag.metavar}" if flag.alone is None else f" [{flag.metavar}]"
    value += "..." if flag.several else ""
    return ", ".join(f"`{name}{value}`" for name in flag.names)


def key(flag: Flag) -> str:
    """Where a configuration file has a flag."""
    if flag.section is None:
        return ""
    section = "[models]" if flag.section == "model" else flag.section
    name = flag.keys[0].removeprefix("pa_")
    return f"`[{section}] {'mode' if name == 'paged_attn' else name}`"


def spoken(words: list[str], last: str = "and") -> str:
    """Words as a sentence lists them."""
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def table(*titles: str) -> Iterator[str]:
    """A table's head."""
    yield row(*titles)
    yield row(*("---" for _ in titles))


def row(*cells: str) -> str:
    """A table's row."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    print(document(), end="")
