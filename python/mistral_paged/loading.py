"""The model that flags ask for: which one, and the runner over it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from mistral_paged import LoraAdapter, ModelDType, Runner, Which
from mistral_paged.default_model import default_model
from mistral_paged.flags import ARCHITECTURES, CACHE_TYPES, DTYPES, EMBEDDING_ARCHITECTURES, GRAPHS, MULTIMODAL_ARCHITECTURES
from mistral_paged.hub import find_local

MTP_DRAFTS = 2
"""What a head guesses unless it is said how much; `Runner` has the same for `mtp_model`."""


def load(options: argparse.Namespace) -> Runner:
    """The runner that the arguments ask for, with a progress bar on a terminal."""
    with ProgressBar() as bar:
        return Runner(
            which=select(options),
            max_seqs=options.max_seqs,
            no_kv_cache=options.no_kv_cache,
            prefix_cache_n=options.prefix_cache_n,
            state_snapshot_mb=options.state_snapshot_mb,
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
            in_situ_quant=options.isq,
            cuda_graphs=GRAPHS[options.cuda_graphs],
            attention_backend=options.attention_backend,
            seed=options.seed,
            fairness=options.fairness,
            speculative=options.speculative,
            speculative_gamma=options.speculative_gamma,
            which_draft=draft_model(options.draft_model),
            mtp_model=options.mtp_model,
            mtp_n_predict=MTP_DRAFTS if options.mtp and options.mtp_n_predict is None else options.mtp_n_predict,
            load_progress=bar.update,
            lazy=getattr(options, "lazy", False),
            kv_tier=options.kv_tier,
            kv_tier_size=options.kv_tier_size,
            kv_events=getattr(options, "kv_events", None),
            kv_events_replay=getattr(options, "kv_events_replay", None),
            kv_events_topic=getattr(options, "kv_events_topic", None),
        )


def select(options: argparse.Namespace) -> Which:
    """Which model: a GGUF file when one is named, else a folder or hub id."""
    dtype = DTYPES[options.dtype]
    model = options.model_id
    if model is None:
        if options.quantized_file is not None:
            raise ValueError("-f names a file in a model; name the model with -m")
        model = str(default_model())
    lora = adapters(options)
    kind = getattr(options, "kind", None)
    if kind == "multimodal":
        return multimodal(options, model, dtype, lora)
    images = {
        "--mmproj": options.mmproj,
        "--max-edge": options.max_edge,
        "--encoder-cache-mb": options.encoder_cache_mb,
        "--max-num-images": options.max_num_images,
    }
    if given := [name for name, value in images.items() if value is not None]:
        subject = "images" if given[0] == "--max-edge" else "images and sounds"
        raise ValueError(f"{given[0]} is about {subject}: `serve multimodal` and `run multimodal` take them")
    if kind == "embedding":
        return embedding(options, model, dtype, lora)
    if options.arch in MULTIMODAL_ARCHITECTURES:
        raise ValueError(f"--arch {options.arch} is of models that see: `serve multimodal` and `run multimodal` load them")
    if options.arch in EMBEDDING_ARCHITECTURES:
        raise ValueError(f"--arch {options.arch} is of embedding models: `serve embedding` serves them")
    if options.pooling is not None:
        raise ValueError("--pooling is about embeddings: `serve embedding` makes them")
    if is_ggml(find_local(model), options.quantized_file):
        return select_ggml(model, options, lora or {})
    if options.gqa is not None:
        raise ValueError("--gqa goes with a GGML file; other files say it themselves")
    if options.quantized_file is None and not has_gguf(find_local(model)):
        if options.tok_model_id is not None:
            raise ValueError("--tok-model-id goes with a GGUF file; name it with -f")
        place = {"tokenizer_json": options.tokenizer, "dtype": dtype, "hf_cache_path": options.hf_cache}
        arch = ARCHITECTURES.get(options.arch)
        if lora is None:
            return Which.Plain(model, arch=arch, imatrix=options.imatrix, calibration_file=options.calibration_file, **place)
        for flag, value in (("--imatrix", options.imatrix), ("--calibration-file", options.calibration_file)):
            if value is not None:
                raise ValueError(f"{flag} does not go with adapters of a model in Hugging Face layout; leave out one of the two")
        return Which.Lora(model, arch=arch, **place, **lora)
    return gguf(options, model, dtype, **(lora or {}))


def gguf(options: argparse.Namespace, model: str, dtype: ModelDType, **others: Any) -> Which:
    """A GGUF file, with arguments that only some have."""
    if options.arch is not None:
        raise ValueError("--arch goes with a model in Hugging Face layout; a GGUF file names its own")
    return Which.GGUF(
        model,
        options.quantized_file.split(";") if options.quantized_file is not None else None,
        tok_model_id=options.tok_model_id,
        dtype=dtype,
        tokenizer_json=options.tokenizer,
        hf_cache_path=options.hf_cache,
        imatrix=options.imatrix,
        calibration_file=options.calibration_file,
        **others,
    )


def select_ggml(model: str, options: argparse.Namespace, lora: dict[str, Any]) -> Which:
    """A file from before GGUF."""
    if options.arch is not None:
        raise ValueError("--arch does not go with a GGML file, which is of Llama")
    return Which.GGML(
        model,
        options.quantized_file,
        tok_model_id=options.tok_model_id,
        tokenizer_json=options.tokenizer,
        gqa=1 if options.gqa is None else options.gqa,
        dtype=DTYPES[options.dtype],
        hf_cache_path=options.hf_cache,
        **lora,
    )


def is_ggml(path: Path | None, filename: str | None) -> bool:
    """Whether a model is a file from before GGUF: by its first bytes, or by its name where it is on the hub."""
    if path is None:
        return filename is not None and filename.endswith(".bin")
    file = path if filename is None else path / filename
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(4) in (b"lmgg", b"fmgg", b"tjgg")


def multimodal(options: argparse.Namespace, model: str, dtype: ModelDType, lora: dict[str, Any] | None) -> Which:
    """The model, to see images as well."""
    if lora is not None:
        raise ValueError("adapters with images are not supported: leave the flags about LoRA out")
    if options.gqa is not None:
        raise ValueError("--gqa goes with a GGML file, which is of text alone")
    if options.pooling is not None:
        raise ValueError("--pooling is about embeddings: `serve embedding` makes them")
    if options.max_num_images is not None and options.command != "serve":
        raise ValueError("--max-num-images is about requests that others send: `serve multimodal` takes it")
    arch = None
    if options.arch is not None:
        arch = MULTIMODAL_ARCHITECTURES.get(options.arch)
        if arch is None:
            names = ", ".join(MULTIMODAL_ARCHITECTURES)
            raise ValueError(f"--arch {options.arch}: for images it is one of {names}; left out, it is any")
    cache_bytes = None if options.encoder_cache_mb is None else options.encoder_cache_mb << 20
    if options.quantized_file is not None or has_gguf(find_local(model)) or options.mmproj is not None:
        if options.mmproj is None:
            raise ValueError("images and sounds need the GGUF file of the model's encoder: name it with --mmproj")
        images = {"mmproj_filename": options.mmproj, "max_edge": options.max_edge, "encoder_cache_memory_bytes": cache_bytes}
        return gguf(options, model, dtype, **images)
    if options.tok_model_id is not None:
        raise ValueError("--tok-model-id goes with a GGUF file; name it with -f")
    return Which.MultimodalPlain(
        model,
        arch=arch,
        tokenizer_json=options.tokenizer,
        dtype=dtype,
        max_edge=options.max_edge,
        imatrix=options.imatrix,
        calibration_file=options.calibration_file,
        hf_cache_path=options.hf_cache,
        encoder_cache_memory_bytes=cache_bytes,
    )


def embedding(options: argparse.Namespace, model: str, dtype: ModelDType, lora: dict[str, Any] | None) -> Which:
    """The model, to make embeddings with."""
    if lora is not None:
        raise ValueError("adapters with embeddings are not supported: leave the flags about LoRA out")
    arch = None
    if options.arch is not None:
        arch = EMBEDDING_ARCHITECTURES.get(options.arch)
        if arch is None:
            names = " or ".join(EMBEDDING_ARCHITECTURES)
            raise ValueError(f"--arch {options.arch}: for embeddings it is {names}; left out, it is any")
    local, files = find_local(model), None
    if options.quantized_file is not None:
        files = options.quantized_file.split(";")
    elif local is not None and local.is_dir() and has_gguf(local):
        files = [path.name for path in local.glob("*.gguf")]
    return Which.Embedding(
        model,
        arch=arch,
        tokenizer_json=options.tokenizer,
        dtype=dtype,
        hf_cache_path=options.hf_cache,
        pooling=options.pooling,
        quantized_filename=files,
        tok_model_id=options.tok_model_id,
    )


def adapters(options: argparse.Namespace) -> dict[str, Any] | None:
    """What the flags say of adapters, as `Which.Lora` takes it; None where they say nothing."""
    if (options.legacy_lora is None) != (options.legacy_lora_order is None):
        raise ValueError("--legacy-lora and --legacy-lora-order go together")
    listed = [LoraAdapter(alias, source) for alias, source in (options.lora or []) + (options.lora_modules or [])]
    given = {
        "max_adapters": options.lora_max_adapters,
        "max_rank": options.lora_max_rank,
        "max_bytes": options.lora_max_bytes,
        "adapters_model_id": options.legacy_lora,
        "order": options.legacy_lora_order,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return {"adapters": listed, **given} if listed or given or options.enable_lora else None


def draft_model(model: str | None) -> Which | None:
    """The model that guesses tokens."""
    if model is None:
        return None
    path = find_local(model)
    if is_ggml(path, None):
        raise ValueError("--draft-model is a GGML file: a folder in Hugging Face layout or a GGUF file works")
    return Which.GGUF(model) if has_gguf(path) else Which.Plain(model)


def has_gguf(path: Path | None) -> bool:
    """Whether a local model is a GGUF file, or a folder that has such files and is not in Hugging Face layout."""
    if path is None:
        return False
    return path.suffix == ".gguf" if path.is_file() else not (path / "config.json").exists() and any(path.glob("*.gguf"))


class ProgressBar:
    """Bytes of weights loaded, on standard error when that is a terminal."""

    WIDTH = 40

    def __init__(self, verb: str = "loading") -> None:
        self.verb = verb
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
            print(f"\r{self.verb} [{bar}] {done >> 20}/{total >> 20} MB", end="", file=sys.stderr, flush=True)
