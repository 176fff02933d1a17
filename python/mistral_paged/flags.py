"""The flags of the command line: one table, from which parsers, configuration files and the documentation are made."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mistral_paged import Architecture, EmbeddingArchitecture, ModelDType, MultimodalArchitecture, PagedCacheType

DTYPES = {"auto": ModelDType.Auto, "bf16": ModelDType.BF16, "f16": ModelDType.F16, "f32": ModelDType.F32}
POOLINGS = ("mean", "cls", "last")
LIMITS = ("ttft", "itl", "e2e")
EFFORTS = ("off", "none", "low", "medium", "high", "xhigh", "max")
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
    "deepseekv2": Architecture.DeepseekV2,
    "deepseekv3": Architecture.DeepseekV3,
    "gemma": Architecture.Gemma,
    "gemma2": Architecture.Gemma2,
    "glm4": Architecture.GLM4,
    "glm4moe": Architecture.GLM4Moe,
    "glm4moelite": Architecture.GLM4MoeLite,
    "gpt_oss": Architecture.GptOss,
    "granitemoehybrid": Architecture.GraniteMoeHybrid,
    "hunyuandensev1": Architecture.HunYuanDenseV1,
    "hunyuanmoev1": Architecture.HunYuanMoEV1,
    "lfm2": Architecture.Lfm2,
    "lfm2moe": Architecture.Lfm2Moe,
    "llama": Architecture.Llama,
    "mistral": Architecture.Mistral,
    "mixtral": Architecture.Mixtral,
    "phi2": Architecture.Phi2,
    "phi3": Architecture.Phi3,
    "phi3.5moe": Architecture.Phi3_5MoE,
    "qwen2": Architecture.Qwen2,
    "qwen3": Architecture.Qwen3,
    "qwen3moe": Architecture.Qwen3Moe,
    "qwen3next": Architecture.Qwen3Next,
    "smollm3": Architecture.SmolLm3,
    "starcoder2": Architecture.Starcoder2,
}

EMBEDDING_ARCHITECTURES = {
    "embeddinggemma": EmbeddingArchitecture.EmbeddingGemma,
    "qwen3embedding": EmbeddingArchitecture.Qwen3Embedding,
}
MULTIMODAL_ARCHITECTURES = {
    "gemma3": MultimodalArchitecture.Gemma3,
    "idefics2": MultimodalArchitecture.Idefics2,
    "idefics3": MultimodalArchitecture.Idefics3,
    "lfm2vl": MultimodalArchitecture.Lfm2Vl,
    "gemma3n": MultimodalArchitecture.Gemma3n,
    "gemma4": MultimodalArchitecture.Gemma4,
    "llama4": MultimodalArchitecture.Llama4,
    "llava": MultimodalArchitecture.LLaVA,
    "llava_next": MultimodalArchitecture.LLaVANext,
    "mistral3": MultimodalArchitecture.Mistral3,
    "phi3v": MultimodalArchitecture.Phi3V,
    "phi4mm": MultimodalArchitecture.Phi4MM,
    "qwen2_5vl": MultimodalArchitecture.Qwen2_5VL,
    "qwen2vl": MultimodalArchitecture.Qwen2VL,
    "qwen3_5": MultimodalArchitecture.Qwen3_5,
    "qwen3_5moe": MultimodalArchitecture.Qwen3_5Moe,
    "qwen3vl": MultimodalArchitecture.Qwen3VL,
    "qwen3vlmoe": MultimodalArchitecture.Qwen3VLMoE,
    "vllama": MultimodalArchitecture.VLlama,
    "voxtral": MultimodalArchitecture.Voxtral,
}


@dataclass(frozen=True)
class Group:
    """Flags that stand together in a help text and in the documentation."""

    title: str
    flags: tuple[Flag, ...]
    about: str | None = None


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
    left_out: str | None = None
    """For a flag of the mirrored command line that has no use here: what takes its place."""
    to: tuple[str, Any] | None = None
    """For a switch: the value that it gives to another destination."""
    repeated: bool = False
    several: bool = False
    """Whether several values follow it."""
    required: bool = False
    alone: Any = None
    """For a flag whose value may be left out: what it then is."""
    section: str | None = "runtime"
    """Its section in a configuration file; None where a file cannot have it."""

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

    @property
    def keys(self) -> tuple[str, ...]:
        """What it is called in a configuration file: its long names, and in the section of paged attention the short ones too."""
        names = [name.removeprefix("--").replace("-", "_") for name in self.names if name.startswith("--")]
        if self.section == "paged_attn":
            names += ["mode" if name == "paged_attn" else name.removeprefix("pa_") for name in names]
        return tuple(dict.fromkeys(names))

    @property
    def status(self) -> str:
        """Whether it "works", is "planned" or is "left out"."""
        return "planned" if self.planned is not None else "left out" if self.left_out is not None else "works"

    @property
    def refusal(self) -> str | None:
        """What a flag says that does not work; None for one that does."""
        if self.planned is not None:
            return f"the argument '{self.shown}' is not supported yet; {self.planned}"
        return f"the argument '{self.shown}' has no use here; {self.left_out}" if self.left_out is not None else None


class Usage(Exception):
    """The command line is wrong: exit status 2."""


class Give(argparse.Action):
    """Stores a value and remembers that it was given."""

    def __init__(self, flag: Flag, **options: Any) -> None:
        self.flag = flag
        super().__init__(**options)

    def __call__(
        self, parser: argparse.ArgumentParser, space: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        flag = self.flag
        if flag.refusal is not None:
            parser.error(flag.refusal)
        mine = f"given to {parser.prog}"
        given: dict[str, Flag] = getattr(space, mine, {})
        for other in given.values():
            if other.name != flag.name and (other.name in flag.conflicts or flag.name in other.conflicts):
                parser.error(f"the argument '{flag.shown}' cannot be used with '{other.shown}'")
        setattr(space, mine, {**given, flag.name: flag})
        if flag.to is not None:
            values = flag.to[1]
        elif flag.metavar is None:
            values = True
        if flag.repeated:
            values = [*(getattr(space, self.dest) or []), values]
        setattr(space, self.dest, values)


def integers(text: str) -> list[int]:
    """Whole numbers, separated by commas."""
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    """Names, separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def limit(text: str) -> tuple[str, float]:
    """What is limited and to how many milliseconds, such as `ttft:500`."""
    name, _, value = text.partition(":")
    if name not in LIMITS:
        raise argparse.ArgumentTypeError(f"invalid value {text!r}: {' or '.join(f'{name}:MS' for name in LIMITS)}")
    return name, float(value)


def named(text: str) -> tuple[str, str]:
    """An alias and what it stands for, such as `sql=/adapters/sql`."""
    alias, equals, source = text.partition("=")
    if not (alias and equals and source):
        raise argparse.ArgumentTypeError(f"invalid value {text!r}: ALIAS=SRC")
    return alias, source


def truth(text: str) -> bool:
    """What the words true and false mean."""
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"invalid value {text!r}: true or false")
    return text == "true"


def add(parser: argparse.ArgumentParser, groups: Iterable[Group]) -> None:
    """Adds flags to a parser, by the groups of its help."""
    for group in groups:
        part = parser.add_argument_group(group.title, group.about)
        for flag in group.flags:
            add_flag(part, flag)


def add_flag(group: argparse._ArgumentGroup, flag: Flag) -> None:
    """Adds one flag."""
    is_switch = flag.metavar is None
    value: dict[str, Any] = {"nargs": 0} if is_switch else {"type": flag.kind, "metavar": flag.metavar, "choices": flag.choices}
    if flag.alone is not None:
        value |= {"nargs": "?", "const": flag.alone}
    if flag.several:
        value |= {"nargs": "+"}
    default = flag.default if flag.to is None else argparse.SUPPRESS
    if is_switch and flag.to is None and flag.default is None:
        default = False
    shown = flag.help if flag.status == "works" else argparse.SUPPRESS
    group.add_argument(
        *flag.names, action=Give, flag=flag, dest=flag.dest, default=default, help=shown, required=flag.required, **value
    )


LOGGING = (
    Flag(("-v", "-vv", "--verbose"), "tell on standard error what is loaded and how its memory is shared out", section=None),
    Flag(("-l", "--log"), "append the log to FILE, the lines about requests too", "FILE", section="global"),
)

LATER_WEIGHTS = "load a quantised GGUF file with -f"
NO_XLORA = "X-LoRA mixes its adapters by a second pass of each token; load them with --lora, one a request"
LATER_MEDIA = "this version makes text only"
LATER_TOOLS = "this server runs no tools"

MODEL = (
    Flag(("-m", "--model-id", "--model"), "folder, GGUF file or hub id; left out, the default model", "MODEL", section="model"),
    Flag(("-f", "--quantized-file"), "GGUF file in MODEL; the parts of a split one by ';'", "FILE", section="model"),
    Flag(("--tok-model-id",), "take the tokenizer from there instead of the GGUF file", "MODEL", section="model"),
    Flag(("-t", "--tokenizer"), "tokenizer.json to use instead of the model's", "FILE", section="model"),
    Flag(
        ("-a", "--arch"),
        "expected architecture",
        "NAME",
        choices=(*ARCHITECTURES, *EMBEDDING_ARCHITECTURES, *MULTIMODAL_ARCHITECTURES),
        section="model",
    ),
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
    Flag(
        ("--pooling",),
        "serve embedding: mean, cls or last token, where the model's files do not say or say another",
        "NAME",
        choices=POOLINGS,
        section="model",
    ),
    Flag(("--hf-cache",), "folder of the download cache", "DIR", section="model"),
    Flag(("--token-source",), "cache, none, literal:VALUE, env:NAME or path:FILE", "SOURCE", default="cache", section="global"),
    Flag(("--format",), "plain, gguf or ggml", "FORMAT", left_out="it is seen from the files", section="model"),
    Flag(("--gqa",), "heads of queries that share one of keys, of a GGML file; default 1", "N", int, section="model"),
    Flag(("--isq",), "quantise float weights while loading: 2 to 8 bits, Q4K, Q8_0, ...", "TYPE", section="model"),
    Flag(("--quant",), "quantise while loading", "TYPE", planned="use --isq", section="model"),
    Flag(("--from-uqff",), "UQFF file", "FILE", planned=LATER_WEIGHTS, section="model"),
    Flag(("--isq-organization",), "which weights", "NAME", planned=LATER_WEIGHTS, section="model"),
    Flag(("--imatrix",), "importance matrix of llama.cpp, for K types of --isq", "FILE", section="model"),
    Flag(("--calibration-file",), "text to measure importance by, before --isq quantises", "FILE", section="model"),
    Flag(("--topology",), "YAML of devices and types by layer", "FILE", planned="leave it out", section="model"),
    Flag(
        ("--lora",),
        "adapter: its alias, and a PEFT folder, GGUF file or hub id",
        "ALIAS=SRC",
        named,
        repeated=True,
        section="model",
    ),
    Flag(("--lora-modules",), "the same, several at once", "ALIAS=SRC", named, several=True, section="model"),
    Flag(("--enable-lora",), "take adapters that are loaded later, though none is given", section="model"),
    Flag(("--lora-max-adapters",), "adapters at once at most; default 16", "N", int, section="model"),
    Flag(("--lora-max-rank",), "their largest rank; default 256", "N", int, section="model"),
    Flag(("--lora-max-bytes",), "bytes of all of them at most; default 8 GiB", "N", int, section="model"),
    Flag(("--legacy-lora",), "folder or hub id with a folder an adapter", "MODEL", section="model"),
    Flag(("--legacy-lora-order",), "JSON file that names those folders", "FILE", section="model"),
    Flag(("--xlora",), "X-LoRA adapter", "MODEL", planned=NO_XLORA, section="model"),
    Flag(("--xlora-order",), "X-LoRA adapter", "FILE", planned=NO_XLORA, section="model"),
    Flag(("--mmproj",), "multimodal: GGUF file of a GGUF model's encoders, in MODEL or elsewhere", "FILE", section="model"),
    Flag(
        ("--max-edge",), "multimodal: pixels of an image's longer edge; larger ones are made smaller", "N", int, section="model"
    ),
    Flag(
        ("--encoder-cache-mb",),
        "multimodal: MB that vectors of images and sounds may take; default 256, or two images of Llama 3.2 Vision",
        "MB",
        int,
        section="model",
    ),
    Flag(
        ("--max-num-images",),
        "serve multimodal: images, sounds and videos of a request at most; default 16",
        "N",
        int,
        section="model",
    ),
    Flag(("--max-image-length",), "for device mapping", "N", left_out="use --max-edge", section="model"),
    Flag(
        ("-n", "--device-layers"),
        "layers by device",
        "LIST",
        planned="a model runs on one device; choose it with --device",
        section="model",
    ),
    Flag(("--max-seq-len",), "for device mapping", "N", left_out="size the pool with --pa-context-len", section="model"),
    Flag(("--max-batch-size",), "for device mapping", "N", left_out="use --max-seqs", section="model"),
)

RUNTIME = (
    Flag(("--max-seqs",), "requests that run together at most; default 32", "N", int, 32),
    Flag(("--max-num-batched-tokens", "--prompt-batchsize"), "tokens a step at most; default 4096", "N", int, 4096),
    Flag(("--no-kv-cache",), "drop blocks after each step (slow)"),
    Flag(("--prefix-cache-n",), "0 turns the prefix cache off", "N", int, 16),
    Flag(("--state-snapshot-mb",), "recurrent layers: MB of snapshots of states, where prefix hits end; 0: none", "MB", int),
    Flag(("--seed",), "seeds requests without a seed of their own", "N", int, section="global"),
    Flag(("--deterministic",), "the same bits whatever runs beside a request"),
    Flag(("--device",), "auto (a GPU where one can be used), cpu, or cuda:0", "NAME", default="auto", conflicts=("--cpu",)),
    Flag(("--cpu",), "the same as --device cpu", to=("device", "cpu")),
    Flag(("--cpu-tier",), "instruction set, such as scalar or avx2", "NAME"),
    Flag(("--num-threads",), "worker threads", "N", int),
    Flag(("--cuda-graphs",), "on a GPU: launch a decode step as one CUDA graph", "auto|on|off", default="auto", choices=GRAPHS),
    Flag(
        ("--max-decode-steps-before-prefill",), "steps", "N", left_out="a step has a token for each answer, whatever prompts wait"
    ),
    Flag(
        ("--speculative",),
        "guess later tokens from what was said before: off, auto (where it pays) or prompt_lookup (always); with --draft-model "
        "auto unless given, or draft_model (always); with --mtp auto unless given, or mtp (always)",
        "NAME",
        choices=("off", "auto", "prompt_lookup", "draft_model", "mtp"),
    ),
    Flag(("--draft-model",), "a smaller model of the same vocabulary that guesses: a folder, a GGUF file or a hub id", "MODEL"),
    Flag(("--speculative-gamma",), "tokens guessed at once at most", "N", int),
    Flag(("--mtp",), "a head of the model that predicts further tokens guesses", conflicts=("--mtp-model",)),
    Flag(("--mtp-model",), "the same of a folder, a GGUF file or a hub id that has the model's head", "MODEL"),
    Flag(("--mtp-n-predict",), "tokens that the head guesses at once at most; unless given, 2", "N", int),
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
    Flag(
        ("--thinking",),
        "whether the model thinks first, for chat templates that ask; alone it is true",
        "BOOL",
        truth,
        alone=True,
        section="request",
    ),
    Flag(("--reasoning-effort",), "how much, for chat templates that ask", "EFFORT", choices=EFFORTS, section="request"),
    Flag(
        ("--image",),
        "image before the text, for a model of the kind multimodal; may be repeated; needs -i",
        "FILE",
        repeated=True,
        section="request",
    ),
    Flag(
        ("--video",),
        "video before the text, for a model of the kind multimodal that takes them; may be repeated; needs -i",
        "FILE",
        repeated=True,
        section="request",
    ),
    Flag(
        ("--audio",),
        "sound before the text, for a model of the kind multimodal; may be repeated; needs -i",
        "FILE",
        repeated=True,
        section="request",
    ),
    Flag(("--adapter",), "adapter that answers", "ALIAS", section="request"),
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
        ("--kv-tier",),
        "folder for KV blocks that the pool drops, and for other replicas and the next start",
        "DIR",
        section="paged_attn",
    ),
    Flag(("--kv-tier-size",), "MB of that folder at most; default 4096", "MB", int, section="paged_attn"),
    Flag(
        ("--fairness",),
        "who goes first: priority, fcfs or drr (tenants take turns)",
        "NAME",
        choices=("priority", "fcfs", "drr"),
        section="paged_attn",
    ),
)

OF_ONE_MODEL = (
    *("--model-id", "--quantized-file", "--tok-model-id", "--tokenizer", "--arch", "--mmproj", "--imatrix", "--mtp-model"),
    *("--lora", "--lora-modules", "--legacy-lora", "--alias", "--served-model-name"),
    *("--kv-events", "--kv-events-replay", "--kv-events-topic"),
)
"""Flags that several models cannot share."""

SERVER = (
    Flag(
        ("--host", "--serve-ip"),
        "address, 127.0.0.1 unless given, or unix:PATH",
        "ADDRESS",
        default="127.0.0.1",
        section="server",
    ),
    Flag(("-p", "--port"), "port, 1234 unless given; 0 takes a free one", "N", int, 1234, section="server"),
    Flag(
        ("--alias",), "what requests and answers call the model, instead of its folder's or file's name", "NAME", section="model"
    ),
    Flag(
        ("--models-dir",),
        "serve every model of a folder, by the name of its file or folder; each is loaded when a request first wants it",
        "DIR",
        conflicts=OF_ONE_MODEL,
        section=None,
    ),
    Flag(("--lazy",), "load the model when a request first wants it, and not at the start", section="server"),
    Flag(
        ("--idle-unload", "--sleep-idle-seconds"),
        "seconds without a request after which the model is unloaded, until the next one",
        "S",
        float,
        section="server",
    ),
    Flag(
        ("--max-loaded-models", "--models-max"),
        "models that are loaded at once at most; the idle one that was not used for longest makes room",
        "N",
        int,
        section="server",
    ),
    Flag(("--served-model-name",), "another name of the model; may be repeated", "NAME", repeated=True, section="server"),
    Flag(
        ("--api-key",),
        "key that clients must send; may be repeated; MISTRAL_PAGED_API_KEY has one as well",
        "KEY",
        repeated=True,
        section="server",
    ),
    Flag(("--api-keys",), "TOML file of keys or their SHA-256, with tenants, limits and admin rights", "FILE", section="server"),
    Flag(("--max-queued",), "answers that wait at most; more are refused with 429; default 512", "N", int, 512, section="server"),
    Flag(("--max-queued-tokens",), "tokens of prompts that wait at most; more are refused with 429", "N", int, section="server"),
    Flag(("--max-body-mb",), "MB of a request at most; default 16", "MB", int, 16, section="server"),
    Flag(
        ("--allowed-local-media-path",),
        "folder below which clients may name images, sounds and videos by file: URLs",
        "DIR",
        section="server",
    ),
    Flag(
        ("--allowed-media-domains",),
        "hosts that clients may name images, sounds and videos of by http: and https: URLs",
        "HOST",
        several=True,
        section="server",
    ),
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
    Flag(("--otlp-endpoint",), "OpenTelemetry collector that gets a span a request, http://HOST:4318", "URL", section="server"),
    Flag(
        ("--kv-events",),
        "tell routers which blocks are cached, with their tokens, over ZeroMQ as vLLM does: tcp://127.0.0.1:5557",
        "ADDRESS",
        section="server",
    ),
    Flag(("--kv-events-replay",), "where they ask for what they missed, tcp://127.0.0.1:5558", "ADDRESS", section="server"),
    Flag(("--kv-events-topic",), "topic of these messages, empty unless given", "TEXT", section="server"),
    Flag(("--cache-salt-secret",), "file with the secret of tenants' salts, equal on replicas", "FILE", section="server"),
    Flag(("--max-tool-rounds",), "tools", "N", planned=LATER_TOOLS, section="server"),
    Flag(("--tool-dispatch-url",), "tools", "URL", planned=LATER_TOOLS, section="server"),
    Flag(("--disable-request-id-header",), "no x-request-id", left_out="every response has one", section="server"),
)

MEMORY = (
    Flag(("--kv-mb",), "KV budget in MB; default 1024", "MB", int, 1024, section=None),
    Flag(("--blk-size", "--pa-blk-size", "--pa-block-size"), "tokens a block: 8, 16 (default) or 32", "N", int, 16, section=None),
    Flag(("--num-threads",), "worker threads", "N", int, section=None),
    Flag(("--json",), "print one JSON object, with the memory step by step", section=None),
)

NO_PREFIX_CACHE = (
    Flag(("--prefix-cache-n",), "prefix cache", "N", left_out="it is off, so that each prompt is computed in full", section=None),
    Flag(("--state-snapshot-mb",), "prefix cache", "MB", left_out="it is off, so that nothing is kept for it", section=None),
)

BENCH = (
    Flag(
        ("--prompt-len",),
        "tokens of a prompt, several by ','; 0 leaves it out; default 512",
        "LIST",
        integers,
        [512],
        section=None,
    ),
    Flag(("--gen-len",), "tokens to generate; 0 leaves it out; default 128", "N", int, 128, section=None),
    Flag(("--depth",), "tokens of context to generate behind, several by ','; default 4", "LIST", integers, [4], section=None),
    Flag(("--iterations",), "requests a row; default 3", "N", int, 3, section=None),
    Flag(("--warmup",), "requests before them that do not count; default 1", "N", int, 1, section=None),
    Flag(("--json",), "print one JSON object", section=None),
    Flag(("--adapter",), "adapter that is measured", "ALIAS", section=None),
    *NO_PREFIX_CACHE,
)

BENCH_SERVE = (
    Flag(("--url",), "server, such as http://127.0.0.1:1234", "URL", required=True, section=None),
    Flag(("--api-key",), "key to send", "KEY", section=None),
    Flag(("--model",), "model to ask for; left out, the first that the server names", "NAME", section=None),
    Flag(("--rate",), "open loop: requests a second, Poisson", "R", float, section=None),
    Flag(("--concurrency",), "closed loop: requests at once; default 8", "N", int, 8, conflicts=("--rate",), section=None),
    Flag(("--requests",), "requests in all; default 99, one a conversation", "N", int, 99, section=None),
    Flag(("--max-tokens",), "tokens of an answer at most; default 128", "N", int, 128, section=None),
    Flag(("--ignore-eos",), "ask for answers of just so many tokens", section=None),
    Flag(("--seed",), "order and times of the requests; default 0", "N", int, 0, section=None),
    Flag(("--timeout",), "seconds that a request may take; default 600", "S", float, 600.0, section=None),
    Flag(
        ("--goodput",),
        "requests a second that keep limits: ttft, itl (a request's mean) and e2e, each as NAME:MS",
        "LIMIT",
        limit,
        several=True,
        section=None,
    ),
    Flag(("--json",), "print one JSON object", section=None),
)

TUNE = (
    Flag(
        ("--profile",),
        "how much perplexity may rise: quality 0.5, balanced 2 (default) or fast 10 percent",
        "NAME",
        default="balanced",
        choices=("quality", "balanced", "fast"),
        section=None,
    ),
    Flag(("--max-loss",), "the same in percent", "P", float, conflicts=("--profile",), section=None),
    Flag(
        ("--types",),
        "types to try, by ','; default Q8_0 to Q3K",
        "LIST",
        names,
        ["Q8_0", "Q6K", "Q5K", "Q5_0", "Q4K", "Q4_1", "Q4_0", "Q3K"],
        section=None,
    ),
    Flag(("--text-tokens",), "tokens that perplexity is of; default 8192", "N", int, 8192, section=None),
    Flag(("--emit-config",), "write a configuration file for from-config", "FILE", section=None),
    Flag(("--json",), "print one JSON object", section=None),
    *NO_PREFIX_CACHE,
)

SIMULATE = (
    Flag(("--blocks",), "KV blocks of a replica's pool", "N", int, required=True, section=None),
    Flag(("--block-size",), "tokens a block; default 16", "N", int, 16, section=None),
    Flag(("--device",), "what is simulated; default llama-8b-h200", "NAME", default="llama-8b-h200", section=None),
    Flag(("--replicas",), "engines, each with a pool of its own; default 1", "N", int, 1, section=None),
    Flag(
        ("--router",),
        "how they are chosen: round_robin, least_loaded or prefix (who was sent the beginning of the prompt)",
        "NAME",
        default="round_robin",
        choices=("round_robin", "least_loaded", "prefix"),
        section=None,
    ),
    Flag(("--max-seqs",), "requests in a step at most; default 256", "N", int, 256, section=None),
    Flag(("--max-num-batched-tokens",), "tokens in a step at most; default 2048", "N", int, 2048, section=None),
    Flag(("--max-step-latency",), "seconds that a step may take", "S", float, section=None),
    Flag(("--policy",), "policy of the scheduler; may be repeated", "NAME", repeated=True, section=None),
    Flag(("--no-prefix-cache",), "without the prefix cache", section=None),
    Flag(("--json",), "print one JSON object", section=None),
)

HF_CACHE = next(flag for flag in MODEL if flag.name == "--hf-cache")
QUANTIZED_MODEL = ("-m", "-f", "--tok-model-id", "-t", "-a", "--hf-cache", "--token-source", "--imatrix", "--calibration-file")
QUANTIZE = (
    *(flag for flag in MODEL if any(name in QUANTIZED_MODEL for name in flag.names)),
    Flag(("--type", "--isq"), "what matrices become: 2 to 8 bits, Q4K, Q8_0, ...", "TYPE", required=True, section=None),
    Flag(("-o", "--output"), "GGUF file to write", "FILE", required=True, section=None),
    Flag(("--force",), "replace a file that exists", section=None),
    Flag(("--num-threads",), "threads", "N", int, section=None),
    Flag(("--json",), "print one JSON object", section=None),
    Flag(("--no-readme",), "for UQFF", left_out="a GGUF file has no README", section=None),
    Flag(("--uqff-base-model",), "for UQFF", "MODEL", left_out="a GGUF file is written", section=None),
    Flag(("--uqff-repo-id",), "for UQFF", "ID", left_out="a GGUF file is written", section=None),
)
FILE = (Flag(("-f", "--file"), "configuration file", "FILE", required=True, section=None),)
CACHE_LIST = (HF_CACHE, Flag(("--json",), "print one JSON list", section=None))
CACHE_DELETE = (Flag(("-m", "--model-id"), "hub id", "MODEL", required=True, section=None), HF_CACHE)
LOGIN = (Flag(("--token",), "the token; left out, it is read from the terminal or standard input", "TOKEN", section=None),)

DOCTOR = (Flag(("--json",), "print one JSON object", section=None),)

BENCH_ABOUT = (
    "pp512 is a prompt of 512 tokens, tg128 @ d4 are 128 tokens generated behind 4. One request runs at a time; times are the "
    "engine's."
)
TUNE_ABOUT = (
    "Loads the model once for each type. Perplexity is that of the packaged conversations, up to 512 tokens of each. Of the "
    "types whose perplexity rises little enough the fastest at decoding is chosen. Nothing is kept."
)
LOAD_ABOUT = (
    "Requests are the first turns of the packaged conversations, greedy, in an order that follows from the seed. When all "
    "have been asked, they come again, each behind its number, so that no prefix cache has them. Each has a connection of "
    "its own. TTFT ends with the first text; in an open loop TTFT and E2E begin when the request was due, also where the "
    "client was late. ITL is what lies between texts that follow each other, of all answers. Requests that fail have no "
    "times; goodput counts them as not good."
)
SIMULATE_ABOUT = (
    "TRACE is a CSV file with a header: arrival in seconds, prompt_tokens, output_tokens, and, if wanted, prefix_id, "
    "prefix_tokens, tenant, priority, deadline. The scheduler and the pool are those that serve a model; how long a step lasts "
    "is the device's model of cost. The same trace gives the same figures."
)
SAMPLING_ABOUT = "What is left out follows the model's generation_config.json, where it says anything, else the default."

LOADING = (
    Group("model", MODEL),
    Group("runtime", RUNTIME),
    Group("paged attention", PAGED),
    Group("log", LOGGING),
)

OF_PREFIX_CACHE = {flag.name for flag in NO_PREFIX_CACHE}
BENCH_LOADING = tuple(
    Group(group.title, tuple(flag for flag in group.flags if flag.name not in OF_PREFIX_CACHE)) for group in LOADING
)

COMMANDS: dict[str, tuple[str, tuple[Group, ...]]] = {
    "run": (
        "answer one text, or chat when no text is given",
        (*LOADING, Group("request", REQUEST), Group("sampling", SAMPLING, SAMPLING_ABOUT)),
    ),
    "serve": ("serve the model over HTTP, with a page at /ui", (Group("server", SERVER), *LOADING)),
    "bench": ("tokens a second of prompts and of decoding", (Group("bench", BENCH, BENCH_ABOUT), *BENCH_LOADING)),
    "bench serve": ("time to first token, between tokens, and goodput of a server", (Group("load", BENCH_SERVE, LOAD_ABOUT),)),
    "tune": ("which type to quantise a model to here", (Group("tune", TUNE, TUNE_ABOUT), *BENCH_LOADING)),
    "memory": ("how many requests a KV budget runs at once", (Group("model", MODEL), Group("memory", MEMORY))),
    "simulate": ("what a trace of requests comes to, in virtual time", (Group("simulation", SIMULATE, SIMULATE_ABOUT),)),
    "quantize": ("write a quantised GGUF file of a model's float weights", (Group("quantize", QUANTIZE),)),
    "from-config": ("serve or run as a TOML file says", (Group("file", FILE),)),
    "cache list": ("what the download cache holds", (Group("cache", CACHE_LIST),)),
    "cache delete": ("delete a model from the download cache", (Group("cache", CACHE_DELETE),)),
    "login": ("keep a token for the hub", (Group("token", LOGIN),)),
    "completions": ("print a script with which a shell completes command lines", ()),
    "doctor": ("what of this machine is used, and what is missing for more", (Group("output", DOCTOR),)),
}
"""What each command is for, and the flags that it has."""

NO_COMMANDS = {
    "uqff": f"is not supported yet; {LATER_WEIGHTS}",
    "update": "has no use here; run `pip install --upgrade .` in a newer copy of the source",
    "uninstall": "has no use here; run `pip uninstall mistral_paged`",
}
"""Commands of the mirrored command line that are planned or left out, and what to do instead."""

GLOBAL = tuple(
    {
        flag.name: flag
        for _, groups in COMMANDS.values()
        for group in groups
        for flag in group.flags
        if flag.section == "global" or flag in LOGGING
    }.values()
)
"""Flags that may stand before the command as well."""


def behind_the_command(words: Sequence[str]) -> list[str]:
    """The command line with global flags that stand before the command moved behind it."""
    at = 0
    while at < len(words) and words[at].startswith("-"):
        name, equals, _ = words[at].partition("=")
        flag = next((flag for flag in GLOBAL if name in flag.names), None)
        if flag is None:
            return list(words)
        at += 1 if flag.metavar is None or equals else 2
    behind = at + (2 if " ".join(words[at : at + 2]) in COMMANDS else 1)
    return [*words[at:behind], *words[:at], *words[behind:]]


def check_command(words: Sequence[str]) -> None:
    """Refuses commands that are not there; `Usage`."""
    if words and words[0] in NO_COMMANDS:
        raise Usage(f"the command '{words[0]}' {NO_COMMANDS[words[0]]}")


def check_places(options: argparse.Namespace) -> None:
    """Refuses flags of a command that stand before the command's own command, as in `bench -m MODEL serve`; `Usage`."""
    for place, given in vars(options).items():
        if place.startswith("given to ") and place != f"given to {options.program}":
            raise Usage(f"the argument '{next(iter(given.values())).shown}' cannot be used with '{options.program}'")
