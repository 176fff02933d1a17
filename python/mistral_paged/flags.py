"""The flags of the command line: one table, from which parsers, configuration files and the documentation are made."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from mistral_paged import Architecture, ModelDType, PagedCacheType

DTYPES = {"auto": ModelDType.Auto, "bf16": ModelDType.BF16, "f16": ModelDType.F16, "f32": ModelDType.F32}
GRAPHS = {"auto": None, "on": True, "off": False}
CACHE_TYPES = {
    "auto": PagedCacheType.Auto,
    "f32": PagedCacheType.F32,
    "f16": PagedCacheType.F16,
    "bf16": PagedCacheType.BF16,
    "f8e4m3": PagedCacheType.F8E4M3,
    "int8": PagedCacheType.Int8,
}
ARCHITECTURES = {
    "gemma": Architecture.Gemma,
    "gemma2": Architecture.Gemma2,
    "glm4": Architecture.GLM4,
    "llama": Architecture.Llama,
    "mistral": Architecture.Mistral,
    "phi2": Architecture.Phi2,
    "phi3": Architecture.Phi3,
    "qwen2": Architecture.Qwen2,
    "qwen3": Architecture.Qwen3,
    "smollm3": Architecture.SmolLm3,
    "starcoder2": Architecture.Starcoder2,
}


@dataclass(frozen=True)
class Flag:
    """A flag: the first of its names is the one that messages use."""

    names: tuple[str, ...]
    help: str
    metavar: str | None = None
    """What the value is called; None for a switch."""
    kind: Callable[[str], Any] = str
    default: Any = None
    choices: Collection[str] | None = None
    conflicts: tuple[str, ...] = ()
    """Names of flags that cannot be given as well."""
    planned: str | None = None
    """For a flag that is known and not there yet: what to do instead."""
    to: tuple[str, Any] | None = None
    """For a switch: the value that it gives to another destination."""
    repeated: bool = False
    section: str = "runtime"
    """Its section in a configuration file."""

    @property
    def name(self) -> str:
        """The name that messages use: the long one."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])

    @property
    def dest(self) -> str:
        """Where its value goes."""
        return self.to[0] if self.to is not None else self.name.removeprefix("--").replace("-", "_")

    @property
    def shown(self) -> str:
        """As clap shows it in messages."""
        return self.name if self.metavar is None else f"{self.name} <{self.metavar}>"


class Usage(Exception):
    """The command line is wrong: exit status 2."""


def planned(flag: Flag) -> str:
    """What a flag that is not there yet says."""
    return f"the argument '{flag.shown}' is not supported yet; {flag.planned}"


class Give(argparse.Action):
    """Stores a value and remembers that it was given."""

    def __init__(self, flag: Flag, **options: Any) -> None:
        self.flag = flag
        super().__init__(**options)

    def __call__(
        self, parser: argparse.ArgumentParser, space: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        flag = self.flag
        if flag.planned is not None:
            parser.error(planned(flag))
        given: dict[str, Flag] = getattr(space, "given", {})
        for other in given.values():
            if other.name != flag.name and (other.name in flag.conflicts or flag.name in other.conflicts):
                parser.error(f"the argument '{flag.shown}' cannot be used with '{other.shown}'")
        space.given = {**given, flag.name: flag}
        if flag.to is not None:
            values = flag.to[1]
        elif flag.metavar is None:
            values = True
        if flag.repeated:
            values = [*(getattr(space, self.dest) or []), values]
        setattr(space, self.dest, values)


def add(parser: argparse.ArgumentParser, title: str, flags: Iterable[Flag], about: str | None = None) -> None:
    """Adds flags to a parser, as a group of its help."""
    group = parser.add_argument_group(title, about)
    for flag in flags:
        is_switch = flag.metavar is None
        value: dict[str, Any] = (
            {"nargs": 0} if is_switch else {"type": flag.kind, "metavar": flag.metavar, "choices": flag.choices}
        )
        default = flag.default if flag.to is None else argparse.SUPPRESS
        if is_switch and flag.to is None and flag.default is None:
            default = False
        shown = argparse.SUPPRESS if flag.planned is not None else flag.help
        group.add_argument(*flag.names, action=Give, flag=flag, dest=flag.dest, default=default, help=shown, **value)


LATER_WEIGHTS = "load a quantised GGUF file with -f"
LATER_ADAPTERS = "load a model that has its adapters merged"
LATER_IMAGES = "this version takes text only"
LATER_TOOLS = "this version has no tools"

MODEL = (
    Flag(("-m", "--model-id", "--model"), "folder, GGUF file or hub id; left out, the default model", "MODEL", section="model"),
    Flag(("-f", "--quantized-file"), "GGUF file in MODEL; the parts of a split one by ';'", "FILE", section="model"),
    Flag(("--tok-model-id",), "take the tokenizer from there instead of the GGUF file", "MODEL", section="model"),
    Flag(("-t", "--tokenizer"), "tokenizer.json to use instead of the model's", "FILE", section="model"),
    Flag(("-a", "--arch"), "expected architecture", "NAME", choices=ARCHITECTURES, section="model"),
    Flag(
        ("--dtype",),
        "auto, bf16, f16 or f32; f32 is exact, auto is fast",
        "TYPE",
        default="auto",
        choices=DTYPES,
        section="model",
    ),
    Flag(("-c", "--chat-template"), "chat template, .jinja or .json", "FILE"),
    Flag(("-j", "--jinja-explicit"), "chat template that goes before any other", "FILE"),
    Flag(("--hf-cache",), "folder of the download cache", "DIR", section="model"),
    Flag(("--token-source",), "cache, none, literal:VALUE, env:NAME or path:FILE", "SOURCE", default="cache", section="global"),
    Flag(("--format",), "plain, gguf or ggml", "FORMAT", planned="it is seen from the files", section="model"),
    Flag(("--isq",), "quantise while loading", "TYPE", planned=LATER_WEIGHTS, section="model"),
    Flag(("--quant",), "quantise while loading", "TYPE", planned=LATER_WEIGHTS, section="model"),
    Flag(("--from-uqff",), "UQFF file", "FILE", planned=LATER_WEIGHTS, section="model"),
    Flag(("--imatrix",), "importance matrix", "FILE", planned=LATER_WEIGHTS, section="model"),
    Flag(("--calibration-file",), "text to calibrate by", "FILE", planned=LATER_WEIGHTS, section="model"),
    Flag(("--topology",), "YAML of devices and types by layer", "FILE", planned="leave it out", section="model"),
    Flag(("--lora",), "adapter", "ALIAS=SRC", planned=LATER_ADAPTERS, repeated=True, section="model"),
    Flag(("--enable-lora",), "adapters", planned=LATER_ADAPTERS, section="model"),
    Flag(("--xlora",), "X-LoRA adapter", "MODEL", planned=LATER_ADAPTERS, section="model"),
    Flag(("--mmproj",), "vision tower", "FILE", planned=LATER_IMAGES, section="model"),
    Flag(
        ("-n", "--device-layers"),
        "layers by device",
        "LIST",
        planned="a model runs on one device; choose it with --device",
        section="model",
    ),
    Flag(("--max-seq-len",), "for device mapping", "N", planned="size the pool with --pa-context-len", section="model"),
    Flag(("--max-batch-size",), "for device mapping", "N", planned="use --max-seqs", section="model"),
)

RUNTIME = (
    Flag(("--max-seqs",), "requests that run together at most; default 32", "N", int, 32),
    Flag(("--max-num-batched-tokens", "--prompt-batchsize"), "tokens a step at most; default 4096", "N", int, 4096),
    Flag(("--no-kv-cache",), "drop blocks after each step (slow)"),
    Flag(("--prefix-cache-n",), "0 turns the prefix cache off", "N", int, 16),
    Flag(("--seed",), "seeds requests without a seed of their own", "N", int, section="global"),
    Flag(("--deterministic",), "the same bits whatever runs beside a request"),
    Flag(("--device",), "auto (a GPU where one can be used), cpu, or cuda:0", "NAME", default="auto", conflicts=("--cpu",)),
    Flag(("--cpu",), "the same as --device cpu", to=("device", "cpu")),
    Flag(("--cpu-tier",), "instruction set, such as scalar or avx2", "NAME"),
    Flag(("--num-threads",), "worker threads", "N", int),
    Flag(("--cuda-graphs",), "on a GPU: launch a decode step as one CUDA graph", "auto|on|off", default="auto", choices=GRAPHS),
    Flag(("--max-decode-steps-before-prefill",), "steps", "N", planned="use max_step_latency in Python"),
    Flag(("--mtp",), "speculation", planned="leave it out"),
    Flag(("--mtp-model",), "draft model", "MODEL", planned="leave it out"),
    Flag(("--enable-search",), "web search", planned=LATER_TOOLS),
    Flag(("--agent", "--agentic"), "agent", planned=LATER_TOOLS),
    Flag(("--mcp-config",), "MCP servers", "FILE", planned=LATER_TOOLS),
    Flag(("--enable-code-execution",), "code execution", planned=LATER_TOOLS),
    Flag(("--enable-shell",), "shell", planned=LATER_TOOLS),
)

SAMPLING_DEFAULTS = {"temperature": 0.1, "top_p": 0.5, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}
"""Where neither a flag nor the model's generation_config.json says anything: gentle enough for a small model."""
MAX_TOKENS = 512

REQUEST = (
    Flag(("-i", "--input"), "answer this and leave", "TEXT", section="request"),
    Flag(("--system",), "system message", "TEXT", section="request"),
    Flag(("--max-tokens",), f"tokens of an answer at most; default {MAX_TOKENS}", "N", int, MAX_TOKENS, section="request"),
    Flag(("--thinking",), "thinking", planned="this version's chat does not set it", section="request"),
    Flag(("--image",), "image", "FILE", planned=LATER_IMAGES, repeated=True, section="request"),
    Flag(("--video",), "video", "FILE", planned=LATER_IMAGES, repeated=True, section="request"),
    Flag(("--audio",), "audio", "FILE", planned=LATER_IMAGES, repeated=True, section="request"),
    Flag(("--adapter",), "adapter", "ALIAS", planned=LATER_ADAPTERS, section="request"),
)

SAMPLING = (
    Flag(("--temperature",), f"0 is greedy; default {SAMPLING_DEFAULTS['temperature']}", "X", float, section="request"),
    Flag(
        ("--top-p",),
        f"the likeliest tokens of that probability together; default {SAMPLING_DEFAULTS['top_p']}",
        "P",
        float,
        section="request",
    ),
    Flag(
        ("--top-k",),
        f"so many of the likeliest tokens, 0 for all; default {SAMPLING_DEFAULTS['top_k']}",
        "N",
        int,
        section="request",
    ),
    Flag(
        ("--min-p",),
        f"tokens of that share of the likeliest's probability; default {SAMPLING_DEFAULTS['min_p']}",
        "P",
        float,
        section="request",
    ),
    Flag(("--presence-penalty",), "from -2 to 2; 0 is off", "X", float, section="request"),
    Flag(("--frequency-penalty",), "from -2 to 2; 0 is off", "X", float, section="request"),
    Flag(
        ("--repetition-penalty",),
        f"above 1: repeats less; default {SAMPLING_DEFAULTS['repetition_penalty']}",
        "X",
        float,
        section="request",
    ),
)

PAGED = (
    Flag(
        ("--paged-attn",),
        "auto, on or off; off is the baseline: whole contexts",
        "MODE",
        default="auto",
        choices=("auto", "on", "off"),
        section="paged_attn",
    ),
    Flag(("--pa-context-len", "--pa-ctxt-len"), "pool for one context of N tokens", "N", int, section="paged_attn"),
    Flag(
        ("--pa-memory-mb", "--pa-gpu-mem"),
        "pool of that many MB",
        "MB",
        int,
        conflicts=("--pa-context-len",),
        section="paged_attn",
    ),
    Flag(
        ("--pa-memory-fraction", "--pa-gpu-mem-usage"),
        "pool as a fraction of memory",
        "F",
        float,
        conflicts=("--pa-context-len", "--pa-memory-mb"),
        section="paged_attn",
    ),
    Flag(("--pa-block-size", "--pa-blk-size"), "tokens a block: 8, 16 or 32 (default)", "N", int, section="paged_attn"),
    Flag(
        ("--pa-cache-type",),
        "auto, f32, f16, bf16, f8e4m3 or int8; one byte takes half the memory of f16",
        "TYPE",
        default="auto",
        choices=CACHE_TYPES,
        section="paged_attn",
    ),
    Flag(
        ("--attention-backend",),
        "how a GPU reads keys: auto, split or plain",
        "NAME",
        default="auto",
        choices=("auto", "split", "plain"),
        section="paged_attn",
    ),
    Flag(
        ("--fairness",),
        "who goes first: priority, fcfs or drr (tenants take turns)",
        "NAME",
        choices=("priority", "fcfs", "drr"),
        section="paged_attn",
    ),
)

SERVER = (
    Flag(
        ("--host", "--serve-ip"),
        "address, 127.0.0.1 unless given, or unix:PATH",
        "ADDRESS",
        default="127.0.0.1",
        section="server",
    ),
    Flag(("-p", "--port"), "port, 1234 unless given; 0 takes a free one", "N", int, 1234, section="server"),
    Flag(("--served-model-name",), "another name of the model; may be repeated", "NAME", repeated=True, section="server"),
    Flag(
        ("--api-key",),
        "key that clients must send; may be repeated; MISTRAL_PAGED_API_KEY has one as well",
        "KEY",
        repeated=True,
        section="server",
    ),
    Flag(("--api-keys",), "TOML file of keys, with tenant and admin rights", "FILE", section="server"),
    Flag(("--max-queued",), "answers that wait at most; more are refused with 429; default 512", "N", int, 512, section="server"),
    Flag(("--max-body-mb",), "MB of a request at most; default 16", "MB", int, 16, section="server"),
    Flag(("--max-connections",), "connections at most; default 1024", "N", int, 1024, section="server"),
    Flag(("--request-timeout",), "seconds after which a request ends with the text that it has", "S", float, section="server"),
    Flag(
        ("--shutdown-timeout",),
        "seconds that running requests have after a SIGTERM; default 30",
        "S",
        float,
        30.0,
        section="server",
    ),
    Flag(
        ("--cors-origin",),
        "origin whose pages may call the server, or *; may be repeated",
        "URL",
        repeated=True,
        section="server",
    ),
    Flag(("--no-ui",), "without the page at /ui", section="server"),
    Flag(("--disable-metrics",), "without /metrics", section="server"),
    Flag(("--disable-access-log",), "without one line a request", section="server"),
    Flag(
        ("--access-log-format",),
        "text or json",
        "FORMAT",
        default="text",
        choices=("text", "json"),
        conflicts=("--disable-access-log",),
        section="server",
    ),
    Flag(("--access-log-health",), "log health checks as well", section="server"),
    Flag(("--mcp-port",), "MCP server", "N", planned=LATER_TOOLS, section="server"),
    Flag(("--otlp-endpoint",), "traces", "URL", planned="read /metrics", section="server"),
    Flag(("--max-tool-rounds",), "tools", "N", planned=LATER_TOOLS, section="server"),
    Flag(("--tool-dispatch-url",), "tools", "URL", planned=LATER_TOOLS, section="server"),
    Flag(("--disable-request-id-header",), "no x-request-id", planned="leave it out", section="server"),
)
