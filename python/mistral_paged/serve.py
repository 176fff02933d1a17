"""The `serve` command: the HTTP server over one model or several."""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mistral_paged import Runner, _core, logs
from mistral_paged.default_model import default_model
from mistral_paged.flags import Usage

STATUSES = {"drained": 0, "interrupted": 130, "forced": 143}
KINDS = ("auto", "text", "multimodal", "embedding")
"""What the mirrored command says of the model; others are not served. Of these, auto is text."""
MAX_NUM_IMAGES = 16
OTHER_KINDS = ("diffusion", "speech")


def describe(command: argparse.ArgumentParser) -> None:
    """What the help of `serve` says besides its flags."""
    command.description = "Serves a model over HTTP: OpenAI's and Anthropic's interfaces, metrics, and a page at /ui."
    command.add_argument(
        "kind",
        nargs="?",
        default="auto",
        choices=(*KINDS, *OTHER_KINDS),
        metavar="KIND",
        help="auto, text, multimodal or embedding",
    )


def keys(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The keys that clients must have: of flags, of the environment and of a file."""
    given = [*(options.api_key or []), *filter(None, [os.environ.get("MISTRAL_PAGED_API_KEY")])]
    found: list[dict[str, Any]] = [{"key": key, "admin": True} for key in given]
    if options.api_keys is not None:
        found += read_keys(Path(options.api_keys))
        if options.fairness != "drr" and any("weight" in key for key in found):
            raise ValueError(f"--api-keys: {options.api_keys}: weight is for tenants that take turns: add --fairness drr")
    return found


def read_keys(path: Path) -> list[dict[str, Any]]:
    """The `[[keys]]` of a TOML file, each with `key` or `sha256`, and perhaps `tenant`, `weight`, `max_in_flight` and `admin`."""
    from mistral_paged.config import read_toml

    try:
        content = read_toml(path)
    except ValueError as error:
        raise ValueError(f"--api-keys: {error}") from None
    entries = content.pop("keys", None)
    if content or not isinstance(entries, list) or not entries:
        raise ValueError(f"--api-keys: {path} must have [[keys]] and nothing else, {KEY_FORM}")
    for number, entry in enumerate(entries, 1):
        if wrong := wrong_key(entry):
            raise ValueError(f"--api-keys: {path}: key {number} {wrong}; [[keys]] are tables {KEY_FORM}")
    return entries


MAX_WEIGHT = 1000
KEY_FORM = "each with key or sha256, and perhaps tenant, weight, max_in_flight and admin"


def wrong_key(entry: Any) -> str | None:
    """What is wrong with one of `[[keys]]`; never the key itself."""
    if not isinstance(entry, dict):
        return "is no table"
    kinds = {"key": str, "sha256": str, "tenant": str, "weight": int, "max_in_flight": int, "admin": bool}
    if unknown := sorted(set(entry) - set(kinds)):
        return f"has {unknown}"
    if wrong := [name for name, value in entry.items() if type(value) is not kinds[name]]:
        return f"has {wrong[0]}, which is no {kinds[wrong[0]].__name__}"
    if ("key" in entry) == ("sha256" in entry):
        return "must have either key or sha256"
    if "sha256" in entry and not re.fullmatch("[0-9a-fA-F]{64}", entry["sha256"]):
        return "has a sha256 that is not 64 hexadecimal digits"
    if "weight" in entry and "tenant" not in entry:
        return "has a weight and no tenant, whose it would be"
    for name in ("max_in_flight", "weight"):
        if entry.get(name, 1) < 1:
            return f"has {name} = {entry[name]}, which must be at least 1"
    if entry.get("weight", 1) > MAX_WEIGHT:
        return f"has weight = {entry['weight']}, which may be {MAX_WEIGHT} at most"
    return None


def lora_root() -> str | None:
    """The folder that adapters are taken from over HTTP, if that is allowed; the mirrored names need its permission beside it."""
    own = os.environ.get("MISTRAL_PAGED_LORA_ROOT")
    if own:
        return own
    is_allowed = os.environ.get("MISTRALRS_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true")
    return os.environ.get("MISTRALRS_LORA_ADAPTER_ROOT") if is_allowed else None


def models_of(options: argparse.Namespace) -> list[argparse.Namespace]:
    """The options of each model that a command line serves: of one, or of those of a folder, which are lazy."""
    if options.models_dir is None:
        return [options]
    folder = Path(options.models_dir).expanduser()
    if not folder.is_dir():
        raise Usage(f"--models-dir {options.models_dir} is no folder")
    found = [path for path in sorted(folder.iterdir()) if is_model(path)]
    if not found:
        raise Usage(f"--models-dir {options.models_dir} has no models: GGUF files, or folders with a config.json or GGUF files")
    if parts := [path.name for path in found if re.search(r"-\d{5}-of-\d{5}\.gguf$", path.name)]:
        raise Usage(f"--models-dir has {parts[0]}, a part of a model: put the parts of each into a folder of their own")
    models = []
    for path in found:
        model = copy.copy(options)
        model.model_id, model.lazy = str(path), True
        # As it is called there, whatever a link leads to.
        model.alias = path.stem if path.is_file() else path.name
        models.append(model)
    return models


def is_model(path: Path) -> bool:
    """Whether a file or a folder is a model."""
    if path.is_dir():
        return (path / "config.json").exists() or any(path.glob("*.gguf"))
    return path.suffix == ".gguf" and not path.name.startswith("mmproj")


def settings(models: Sequence[argparse.Namespace], default: int) -> dict[str, Any]:
    """The server's settings: what is each model's own by its options, the rest by those of any of them."""
    options, of_models = models[0], [model_settings(options) for options in models]
    access_log = "off" if options.disable_access_log else options.access_log_format
    return {
        "host": options.host,
        "port": options.port,
        "models": of_models,
        "default_model": of_models[default]["model_id"],
        "max_loaded_models": options.max_loaded_models,
        "keys": keys(options),
        "max_queued": options.max_queued,
        "max_queued_tokens": options.max_queued_tokens,
        "max_body_bytes": options.max_body_mb << 20,
        "max_connections": options.max_connections,
        "request_timeout": options.request_timeout,
        "shutdown_timeout": options.shutdown_timeout,
        "keep_alive_ms": int(os.environ.get("KEEP_ALIVE_INTERVAL", "10000")),
        "cors_origins": options.cors_origin or [],
        "access_log": access_log,
        "access_log_health": options.access_log_health,
        "ui": not options.no_ui,
        "cache_salt_secret": options.cache_salt_secret,
        "lora_root": lora_root(),
        "allowed_local_media_path": options.allowed_local_media_path,
        "allowed_media_domains": options.allowed_media_domains or [],
        "metrics": not options.disable_metrics,
        "otlp_endpoint": options.otlp_endpoint,
        "system": _core.survey(),
    }


def model_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of a model."""
    return {
        "model_id": model_id(options),
        "served_model_names": options.served_model_name or [],
        "max_seqs": options.max_seqs,
        "max_num_images": MAX_NUM_IMAGES if options.max_num_images is None else options.max_num_images,
        "idle_unload": options.idle_unload,
    }


def model_id(options: argparse.Namespace) -> str:
    """What requests call a model: its alias or hub id, or of a local one the name of its file or folder, without the path."""
    if options.alias is not None:
        return str(options.alias)
    return short_id(str(default_model()) if options.model_id is None else options.model_id)


def short_id(model: str) -> str:
    """A hub id, or of a local model the name of its file or folder, without the path."""
    path = Path(model).expanduser()
    return (path.stem if path.is_file() else path.resolve().name) if path.exists() else model


def check(models: Sequence[argparse.Namespace], config: dict[str, Any]) -> None:
    """Refuses what cannot be served, before a model is loaded; `Usage`."""
    options = models[0]
    for model, own in zip(models, config["models"], strict=True):
        check_model(model, own["model_id"], len(models))
    if all(model.kind != "multimodal" for model in models):
        media = {
            "--allowed-local-media-path": options.allowed_local_media_path,
            "--allowed-media-domains": options.allowed_media_domains,
        }
        if given := [name for name, value in media.items() if value is not None]:
            raise Usage(f"{given[0]} is about images: `serve multimodal` takes them")
    limits = {
        "--port": (options.port, 0, 65535),
        "--max-queued": (options.max_queued, 0, 1 << 20),
        "--max-body-mb": (options.max_body_mb, 1, 1024),
        "--max-connections": (options.max_connections, 1, 1 << 20),
        "--shutdown-timeout": (options.shutdown_timeout, 0, 86400),
    }
    for name, (value, least, most) in limits.items():
        if not least <= value <= most:
            raise Usage(f"{name} is {value}; it must be from {least} to {most}")
    if options.max_queued_tokens is not None and options.max_queued_tokens < 1:
        raise Usage(f"--max-queued-tokens is {options.max_queued_tokens}; it must be at least 1")
    most = options.max_loaded_models
    if most is not None and most < 1:
        raise Usage(f"--max-loaded-models is {most}; it must be at least 1; left out, there is no limit")
    if most is not None and (eager := sum(not model.lazy for model in models)) > most:
        raise Usage(
            f"{eager} models are loaded at the start, and --max-loaded-models is {most}: some need lazy = true in [[models]], or "
            "all of them in [server]"
        )
    if options.request_timeout is not None and not 0 < options.request_timeout < float("inf"):
        raise Usage(f"--request-timeout is {options.request_timeout}; it must be seconds above 0")
    _core.check_server(json.dumps(config))


def check_model(options: argparse.Namespace, model_id: str, num_models: int) -> None:
    """Refuses a model that cannot be served, alone or beside others; `Usage`."""
    if options.kind not in KINDS:
        raise Usage(f"a model of the kind '{options.kind}' cannot be served yet; text, multimodal and embedding models can")
    if options.max_num_images is not None and options.max_num_images < 1:
        raise Usage(f"--max-num-images is {options.max_num_images}; it must be at least 1")
    if options.idle_unload is not None and not 0 < options.idle_unload < float("inf"):
        raise Usage(f"--idle-unload is {options.idle_unload}; it must be seconds above 0; left out, a model stays loaded")
    sizes = (options.pa_memory_mb, options.pa_context_len, options.pa_memory_fraction)
    if num_models > 1 and all(size is None for size in sizes):
        raise Usage(
            f"the KV pool of {model_id} has no size: beside other models each needs pa_memory_mb, pa_context_len or "
            "pa_memory_fraction in [[models]], or all of them by one in [paged_attn], or by --pa-memory-mb"
        )


def serve(options: argparse.Namespace, runners: Sequence[Runner], config: dict[str, Any]) -> int:
    """Serves the models of runners until a signal ends it; the exit status."""
    served = ", ".join(model["model_id"] for model in config["models"])
    if not config["keys"] and options.host not in ("127.0.0.1", "localhost", "::1") and not options.host.startswith("unix:"):
        print(f"warning: anyone who reaches {options.host} can use the server; --api-key guards it", file=sys.stderr)

    def listening(address: str) -> None:
        print(f"serving {served} at {address}/v1", file=sys.stderr)
        if config["ui"] and address.startswith("http"):
            print(f"the page is at {address}/ui", file=sys.stderr)
        sys.stderr.flush()
        if options.log is not None:
            logs.take_standard_error(options.log)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return STATUSES[_core.serve(runners, json.dumps(config), listening)]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
