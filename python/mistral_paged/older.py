"""The older command line: `mistral-paged [FLAGS] SELECTOR [OPTIONS]`, as `mistralrs-server` had it, becomes the newer one."""

from __future__ import annotations

from collections.abc import Sequence

from mistral_paged.flags import LATER_MEDIA, LATER_TOOLS, NO_XLORA, Usage

SWITCH = None

Meaning = tuple[str, ...] | str
"""What a flag becomes: the newer flags, or why it cannot be honoured."""

GLOBALS: dict[tuple[str, ...], tuple[str | None, Meaning]] = {
    ("-i", "--interactive-mode"): (SWITCH, ("run",)),
    ("--vi",): (SWITCH, ("run",)),
    ("-p", "--port"): ("PORT", ("serve", "--port")),
    ("--serve-ip",): ("IP", ("--host",)),
    ("-l", "--log"): ("FILE", ("--log",)),
    ("-t", "--truncate-sequence"): (SWITCH, "send truncate_sequence with a request"),
    ("--max-seqs",): ("N", ("--max-seqs",)),
    ("--no-kv-cache",): (SWITCH, ("--no-kv-cache",)),
    ("--prefix-cache-n",): ("N", ("--prefix-cache-n",)),
    ("-c", "--chat-template"): ("FILE", ("--chat-template",)),
    ("-j", "--jinja-explicit"): ("FILE", ("--jinja-explicit",)),
    ("--token-source",): ("SOURCE", ("--token-source",)),
    ("-s", "--seed"): ("N", ("--seed",)),
    ("-n", "--num-device-layers"): ("LIST", "a model runs on one device"),
    ("--isq",): ("TYPE", ("--isq",)),
    ("--pa-gpu-mem",): ("MB", ("--pa-memory-mb",)),
    ("--pa-gpu-mem-usage",): ("F", ("--pa-memory-fraction",)),
    ("--pa-ctxt-len",): ("N", ("--pa-context-len",)),
    ("--pa-blk-size",): ("N", ("--pa-block-size",)),
    ("--pa-cache-type",): ("TYPE", ("--pa-cache-type",)),
    ("--no-paged-attn",): (SWITCH, ("--paged-attn", "off")),
    ("--paged-attn",): (SWITCH, ("--paged-attn", "on")),
    ("--throughput",): (SWITCH, "read /metrics"),
    ("--prompt-batchsize",): ("N", ("--max-num-batched-tokens",)),
    ("--cpu",): (SWITCH, ("--cpu",)),
    ("--enable-search",): (SWITCH, LATER_TOOLS),
    ("--enable-thinking",): (SWITCH, ("--thinking",)),
    ("--mcp-port",): ("N", LATER_TOOLS),
    ("--mcp-config",): ("FILE", LATER_TOOLS),
}

ADAPTERS: dict[tuple[str, ...], tuple[str | None, Meaning]] = {
    ("-a", "--adapters-model-id"): ("MODEL", ("--legacy-lora",)),
    ("-o", "--order"): ("FILE", ("--legacy-lora-order",)),
}

SELECTORS: dict[str, dict[tuple[str, ...], tuple[str | None, Meaning]] | str] = {
    "plain": {
        ("-m", "--model-id"): ("MODEL", ("--model-id",)),
        ("-t", "--tokenizer-json"): ("FILE", ("--tokenizer",)),
        ("-a", "--arch"): ("NAME", ("--arch",)),
        ("-d", "--dtype"): ("TYPE", ("--dtype",)),
        ("--topology",): ("FILE", "leave it out"),
    },
    "gguf": {
        ("-m", "--quantized-model-id"): ("MODEL", ("--model-id",)),
        ("-f", "--quantized-filename"): ("FILE", ("--quantized-file",)),
        ("-t", "--tok-model-id"): ("MODEL", ("--tok-model-id",)),
        ("--topology",): ("FILE", "leave it out"),
    },
    "ggml": {
        ("-m", "--quantized-model-id"): ("MODEL", ("--model-id",)),
        ("-f", "--quantized-filename"): ("FILE", ("--quantized-file",)),
        ("-t", "--tok-model-id"): ("MODEL", ("--tok-model-id",)),
        ("-g", "--gqa"): ("N", ("--gqa",)),
        ("--topology",): ("FILE", "leave it out"),
    },
    "lora": {
        ("-m", "--model-id"): ("MODEL", ("--model-id",)),
        ("-t", "--tokenizer-json"): ("FILE", ("--tokenizer",)),
        ("--arch",): ("NAME", ("--arch",)),
        ("-d", "--dtype"): ("TYPE", ("--dtype",)),
        ("--topology",): ("FILE", "leave it out"),
        **ADAPTERS,
    },
    "lora-gguf": {
        ("-m", "--quantized-model-id"): ("MODEL", ("--model-id",)),
        ("-f", "--quantized-filename"): ("FILE", ("--quantized-file",)),
        ("-t", "--tok-model-id"): ("MODEL", ("--tok-model-id",)),
        ("--topology",): ("FILE", "leave it out"),
        **ADAPTERS,
    },
    "lora-ggml": {
        ("-m", "--quantized-model-id"): ("MODEL", ("--model-id",)),
        ("-f", "--quantized-filename"): ("FILE", ("--quantized-file",)),
        ("-t", "--tok-model-id"): ("MODEL", ("--tok-model-id",)),
        ("-g", "--gqa"): ("N", ("--gqa",)),
        ("--topology",): ("FILE", "leave it out"),
        **ADAPTERS,
    },
    "x-lora": NO_XLORA,
    "x-lora-gguf": NO_XLORA,
    "x-lora-ggml": NO_XLORA,
    "vision-plain": {
        ("-m", "--model-id"): ("MODEL", ("--model-id",)),
        ("-t", "--tokenizer-json"): ("FILE", ("--tokenizer",)),
        ("-a", "--arch"): ("NAME", ("--arch",)),
        ("-d", "--dtype"): ("TYPE", ("--dtype",)),
        ("--max-edge",): ("N", ("--max-edge",)),
        ("--topology",): ("FILE", "leave it out"),
    },
    "diffusion": LATER_MEDIA,
    "speech": LATER_MEDIA,
    "toml": "write a configuration file for `mistral-paged from-config`",
}


def find(table: dict[tuple[str, ...], tuple[str | None, Meaning]], name: str) -> tuple[str | None, Meaning] | None:
    """A flag of a table."""
    return next((entry for names, entry in table.items() if name in names), None)


def selector_at(argv: Sequence[str]) -> int | None:
    """Where the selector stands; None for a newer command line. Each flag left of it is known, and so how much it takes."""
    at = 0
    while at < len(argv):
        word = argv[at]
        if not word.startswith("-"):
            return at if word in SELECTORS else None
        entry = find(GLOBALS, word.partition("=")[0])
        if entry is None:
            return None
        at += 1 if entry[0] is SWITCH or "=" in word else 2
    return None


def read(table: dict[tuple[str, ...], tuple[str | None, Meaning]], words: Sequence[str], where: str) -> list[str]:
    """The newer flags for those of a table."""
    flags: list[str] = []
    given: dict[str, str] = {}
    rest = list(words)
    while rest:
        name, has_value, value = rest.pop(0).partition("=")
        entry = find(table, name)
        if entry is None:
            raise Usage(f"unexpected argument '{name}' {where}")
        metavar, meaning = entry
        if isinstance(meaning, str):
            shown = name if metavar is SWITCH else f"{name} <{metavar}>"
            raise Usage(f"the argument '{shown}' is not supported yet; {meaning}")
        other = given.setdefault(meaning[0], name)
        if find(table, other) != entry:
            raise Usage(f"the argument '{name}' cannot be used with '{other}'")
        flags += meaning
        if metavar is SWITCH:
            if has_value:
                raise Usage(f"unexpected value '{value}' for '{name}'; it takes none")
            continue
        if not has_value:
            if not rest:
                raise Usage(f"a value is required for '{name} <{metavar}>' but none was supplied")
            value = rest.pop(0)
        flags.append(";".join(value.split()) if meaning == ("--quantized-file",) else value)
    return flags


def translate(argv: Sequence[str]) -> list[str]:
    """The newer command line that an older one means; a newer one is returned as it is.

    Raises `Usage` for what cannot be honoured.
    """
    at = selector_at(argv)
    if at is None:
        return list(argv)
    selector = argv[at]
    options = SELECTORS[selector]
    if "--vi" in argv[:at] and selector != "vision-plain":
        raise Usage(f"the argument '--vi' cannot be used with the selector '{selector}'; it is a chat about images")
    flags = read(GLOBALS, argv[:at], f"before '{selector}'")
    if isinstance(options, str):
        raise Usage(f"the selector '{selector}' is not supported yet; {options}")
    flags += read(options, argv[at + 1 :], f"behind '{selector}'")
    commands: list[str] = [word for word in ("run", "serve") if word in flags]
    if len(commands) != 1:
        raise Usage("give -i for a chat, or -p PORT for a server" + ("; not both" if commands else ""))
    if selector == "vision-plain":
        commands.append("multimodal")
    return commands + [word for word in flags if word not in commands]
