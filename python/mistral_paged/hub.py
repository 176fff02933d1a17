"""Finds a model's files: a local folder or file as it is, anything else through huggingface_hub."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
from pathlib import Path

from mistral_paged.exceptions import InvalidArgumentError, ModelLoadError, ModelNotFoundError

TEXT_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tekken.json",
    "tokenizer.model",
    "vocab.txt",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.*",
]
WEIGHT_FILES = ["model*.safetensors", "model.safetensors.index.json"]
OLDER_WEIGHT_FILES = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
ADAPTER_FILES = ["adapter_config.json", "adapter_model.safetensors"]
OWN_ADAPTERS = ["vision-lora", "speech-lora"]
EMBEDDING_FILES = [
    "modules.json",
    "sentence_*_config.json",
    "config_sentence_transformers.json",
    "[0-9]_*/config.json",
    "[0-9]_*/model.safetensors",
]
IMAGE_FILES = ["preprocessor_config.json", "processor_config.json"]
SUBFOLDERS = ["*/*"]
MODEL_SUFFIXES = [".gguf", ".safetensors", ".json", ".bin"]


def resolve_multimodal(model_id: str, token_source: str, cache_dir: str | None) -> str:
    """The folder of a model in Hugging Face layout, with what says how images are processed, and adapters of its own."""
    folder = resolve_plain(model_id, token_source, cache_dir, IMAGE_FILES)
    if find_local(model_id) is None and _model_type(Path(folder)) == "phi4_multimodal":
        files = [f"{name}/{file}" for name in OWN_ADAPTERS for file in ADAPTER_FILES]
        _download(model_id, files, None, parse_token_source(token_source), cache_dir)
    return folder


def _model_type(folder: Path) -> object:
    """As config.json says; None where it is malformed, of which the engine tells."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return config.get("model_type") if isinstance(config, dict) else None


def resolve_plain(model_id: str, token_source: str, cache_dir: str | None, more: Sequence[str] = ()) -> str:
    """The folder of a model in Hugging Face layout, with further files."""
    token = parse_token_source(token_source)
    path = find_local(model_id)
    if path is None:
        folder = _download(model_id, [*TEXT_FILES, *more, *WEIGHT_FILES], SUBFOLDERS, token, cache_dir)
        if not (folder / "config.json").is_file():
            raise _missing(model_id, folder, "config.json", token)
        if not any(folder.glob(WEIGHT_FILES[0])):
            folder = _download(model_id, [*TEXT_FILES, *more, *OLDER_WEIGHT_FILES], SUBFOLDERS, token, cache_dir)
        return str(folder)
    if path.is_file():
        raise ModelLoadError(
            f"{model_id} is a file; Which.Plain takes a folder or a hub id (a GGUF file: Which.GGUF; an older one: Which.GGML)"
        )
    return str(path)


def resolve_embedding(model_id: str, token_source: str, cache_dir: str | None) -> str:
    """The folder of a model in Hugging Face layout, with what sentence-transformers keeps beside it and below."""
    if find_local(model_id) is not None:
        return resolve_plain(model_id, token_source, cache_dir)
    token = parse_token_source(token_source)
    files = [*TEXT_FILES, *EMBEDDING_FILES]
    folder = _download(model_id, [*files, *WEIGHT_FILES], None, token, cache_dir)
    if not (folder / "config.json").is_file():
        raise _missing(model_id, folder, "config.json", token)
    if not any(folder.glob(WEIGHT_FILES[0])):
        folder = _download(model_id, [*files, *OLDER_WEIGHT_FILES], None, token, cache_dir)
    return str(folder)


def resolve_gguf(
    model_id: str, filenames: list[str] | None, tok_model_id: str | None, token_source: str, cache_dir: str | None
) -> tuple[list[str], str | None]:
    """The GGUF files of a model in order, and the folder of a tokenizer to use instead of theirs."""
    token = parse_token_source(token_source)
    path = find_local(model_id)
    if filenames is not None and not filenames:
        raise InvalidArgumentError("quantized_filename is an empty list; name at least one file")
    if path is None:
        if filenames is None:
            raise InvalidArgumentError(
                f"{model_id} is no local folder or file, so it is taken as a hub id, which needs quantized_filename"
            )
        folder = _download(model_id, [glob.escape(name) for name in filenames], None, token, cache_dir)
        for name in filenames:
            if not (folder / name).is_file():
                raise _missing(model_id, folder, name, token)
        files = [str(folder / name) for name in filenames]
    elif path.is_dir():
        files = _pick(path, filenames)
    elif filenames is None:
        files = [str(path)]
    else:
        raise InvalidArgumentError(f"{model_id} is a file already; leave quantized_filename={filenames} out")
    if tok_model_id is None:
        return files, None
    tokenizer = find_local(tok_model_id)
    if tokenizer is not None and tokenizer.is_dir():
        return files, str(tokenizer)
    return files, str(_download(tok_model_id, TEXT_FILES, SUBFOLDERS, token, cache_dir))


def resolve_mmproj(model_id: str, filename: str, token_source: str, cache_dir: str | None) -> str:
    """The GGUF file of an encoder of images or sounds: beside the model's, or a local path."""
    token = parse_token_source(token_source)
    path = find_local(model_id)
    if path is not None:
        beside = (path if path.is_dir() else path.parent) / Path(filename).expanduser()
        if beside.is_file():
            return str(beside)
    elsewhere = Path(filename).expanduser()
    if elsewhere.is_file():
        return str(elsewhere)
    if path is not None or elsewhere.is_absolute():
        raise ModelLoadError(f"mmproj_filename={filename!r} is no file beside {model_id}, and no path from here")
    folder = _download(model_id, [glob.escape(filename)], None, token, cache_dir)
    if not (folder / filename).is_file():
        raise _missing(model_id, folder, filename, token)
    return str(folder / filename)


def resolve_ggml(
    model_id: str, filenames: list[str] | None, tok_model_id: str | None, token_source: str, cache_dir: str | None
) -> tuple[list[str], str | None]:
    """The one file of a model from before GGUF, and the folder of a tokenizer to use instead of its vocabulary."""
    path = find_local(model_id)
    if filenames is None and (path is None or path.is_dir()):
        raise InvalidArgumentError(f"{model_id} is a folder or a hub id: name the file in it with quantized_filename")
    if filenames is not None and len(filenames) > 1:
        raise InvalidArgumentError(f"quantized_filename={filenames}: a GGML model is one file")
    if filenames is not None and path is not None and path.is_dir() and not (path / filenames[0]).is_file():
        raise ModelLoadError(f"{path} has no file {filenames[0]!r}; its files: {sorted(p.name for p in path.iterdir())}")
    return resolve_gguf(model_id, filenames, tok_model_id, token_source, cache_dir)


def resolve_adapter(source: str, revision: str | None, token_source: str, cache_dir: str | None) -> str:
    """The folder or GGUF file of an adapter."""
    token = parse_token_source(token_source)
    path = find_local(source)
    if path is not None:
        if revision is not None:
            raise InvalidArgumentError(f"revision={revision!r} is about the hub, and {source} is here: leave it out")
        return str(path)
    folder = _download(source, ADAPTER_FILES, None, token, cache_dir, revision)
    if not (folder / ADAPTER_FILES[0]).is_file():
        raise _missing(source, folder, ADAPTER_FILES[0], token)
    return str(folder)


def resolve_ordered_adapters(source: str, order: str, token_source: str, cache_dir: str | None) -> list[tuple[str, str]]:
    """Alias and folder of each adapter that an ordering file names: its `order` lists folders below `source`."""
    try:
        ordering = json.loads(Path(local_path(order)).read_text())
        names = ordering["order"]
        unknown = sorted(key for key, value in ordering.items() if key not in ("order", "base_model_id") and value)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgumentError(f'order={order!r} must be a JSON file with a list "order": {error}') from error
    if not (isinstance(names, list) and all(isinstance(name, str) and Path(name).name == name != ".." for name in names)):
        raise InvalidArgumentError(f'order={order!r}: "order" must list names of folders, got {names!r}')
    if unknown:
        raise InvalidArgumentError(f'order={order!r} has {unknown}, which is not supported: only "order" is')
    folder = find_local(source)
    if folder is None:
        token = parse_token_source(token_source)
        files = [f"{name}/{file}" for name in names for file in ADAPTER_FILES]
        folder = _download(source, files, None, token, cache_dir)
    return [(name, str(folder / name)) for name in names]


def find_local(model_id: str) -> Path | None:
    """The folder or file that a model id names; None when there is none and it may be a hub id.

    Raises ModelNotFoundError for what can only be a path and is not there, before the hub is asked.
    """
    if not model_id:
        return None
    try:
        path = Path(model_id).expanduser()
        if path.is_dir() or path.is_file():
            return path
        names_file = path.suffix in MODEL_SUFFIXES and path.parent.is_dir()
        if not (model_id.startswith(("/", ".", "~")) or model_id.count("/") > 1 or names_file):
            return None
        problem = "is not a folder or a file" if path.exists() else "does not exist"
        raise ModelNotFoundError(
            f"{_shorten(model_id)!r} {problem}: it is neither a local folder nor a hub id such as 'owner/name'"
        )
    except ModelNotFoundError:
        raise
    except (RuntimeError, OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"{_shorten(model_id)!r} is neither a local folder nor a hub id such as 'owner/name': {_shorten(str(error))}"
        ) from error


def local_path(path: str) -> str:
    """A path with `~` at its beginning expanded."""
    try:
        return str(Path(path).expanduser())
    except RuntimeError as error:
        raise InvalidArgumentError(f"{_shorten(path)!r} is no path: {error}") from error


def parse_token_source(source: str) -> str | bool | None:
    """What huggingface_hub takes as `token`: a token, None for the cached one, False for none.

    Formats: `cache`, `none`, `literal:VALUE`, `env:NAME`, `path:FILE`.
    """
    kind, colon, value = source.partition(":")
    if source == "cache":
        return None
    if source == "none":
        return False
    if kind == "literal" and value:
        return value
    if kind == "env" and value:
        if value not in os.environ:
            raise InvalidArgumentError(f"token_source={source!r}: the environment variable {value} is not set")
        return os.environ[value]
    if kind == "path" and value:
        try:
            return Path(value).expanduser().read_text().strip()
        except OSError as error:
            raise InvalidArgumentError(f"token_source={source!r}: {error}") from error
    shown = f"{kind}:..." if colon else f"{source[:4]}..."  # it may be a token
    raise InvalidArgumentError(
        f"Invalid token source format: {shown!r}; formats: 'cache', 'none', 'literal:VALUE', 'env:NAME', 'path:FILE'"
    )


def _pick(folder: Path, filenames: list[str] | None) -> list[str]:
    present = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.gguf"))
    if filenames is None:
        if len(present) != 1:
            raise ModelLoadError(f"{folder} has {len(present)} GGUF files {present}; name one with quantized_filename")
        filenames = present
    for name in filenames:
        if not (folder / name).is_file():
            raise ModelLoadError(f"{folder} has no file {name!r}; its GGUF files: {present}")
    return [str(folder / name) for name in filenames]


def _missing(repo_id: str, folder: Path, name: str, token: str | bool | None) -> ModelLoadError:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        files = HfApi(token=token).list_repo_files(repo_id)
        place = f"the hub's repository {repo_id}"
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError):
        files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        place = f"the cached part of the hub's repository {repo_id}"
    return ModelLoadError(f"{place} has no file {name!r}; its files: {sorted(files)}")


def _shorten(text: str, length: int = 100) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


def _one_line(error: Exception) -> str:
    return _shorten(" ".join(str(error).split()), 300)


def _unreachable(repo_id: str) -> ModelLoadError:
    from huggingface_hub import constants

    asked = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
    return ModelLoadError(
        f"{repo_id} is not a local folder and is not in the cache, and {asked}: go online once, "
        "or copy the model here and give its path"
    )


def _download(
    repo_id: str,
    patterns: list[str],
    ignored: list[str] | None,
    token: str | bool | None,
    cache_dir: str | None,
    revision: str | None = None,
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if not repo_id:
        raise ModelNotFoundError("the model id '' is neither a local folder nor a hub id such as 'owner/name'")
    cache = None if cache_dir is None else local_path(cache_dir)
    try:
        return Path(
            snapshot_download(
                repo_id, revision=revision, allow_patterns=patterns, ignore_patterns=ignored, token=token, cache_dir=cache
            )
        )
    except HFValidationError as error:
        raise ModelNotFoundError(f"{repo_id!r} is neither a local folder nor a hub id such as 'owner/name': {error}") from error
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{repo_id} is gated: accept its terms on the hub and give a token, by `hf auth login` or token_source "
            f"({_one_line(error)})"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{repo_id} is neither a local folder nor a repository of the hub; a private one needs a token ({_one_line(error)})"
        ) from error
    except LocalEntryNotFoundError as error:
        raise _unreachable(repo_id) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelLoadError(f"downloading {repo_id} failed: {_one_line(error)}") from error
