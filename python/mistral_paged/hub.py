"""Finds a model's files: a local folder or file as it is, anything else through huggingface_hub."""

from __future__ import annotations

import os
from pathlib import Path

from mistral_paged.exceptions import InvalidArgumentError, ModelLoadError, ModelNotFoundError

TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"]
CONFIG_FILES = ["config.json", "generation_config.json"]
WEIGHT_FILES = ["*.safetensors", "*.safetensors.index.json"]


def resolve_plain(model_id: str, token_source: str, cache_dir: str | None) -> str:
    """The folder of a model in Hugging Face layout."""
    token = parse_token_source(token_source)
    path = Path(model_id).expanduser()
    if model_id and path.is_dir():
        return str(path)
    if path.is_file():
        raise ModelLoadError(f"{model_id} is a file; Which.Plain takes a folder or a hub id (for a GGUF file, use Which.GGUF)")
    return _download(model_id, [*CONFIG_FILES, *TOKENIZER_FILES, *WEIGHT_FILES], token, cache_dir)


def resolve_gguf(
    model_id: str, filenames: list[str] | None, tok_model_id: str | None, token_source: str, cache_dir: str | None
) -> tuple[list[str], str | None]:
    """The GGUF files of a model in order, and the folder of a tokenizer to use instead of theirs."""
    token = parse_token_source(token_source)
    path = Path(model_id).expanduser()
    if path.is_file():
        if filenames is not None:
            raise InvalidArgumentError(f"{model_id} is a file already; leave quantized_filename={filenames} out")
        files = [str(path)]
    elif model_id and path.is_dir():
        files = _pick(path, filenames)
    else:
        if filenames is None:
            raise InvalidArgumentError(
                f"{model_id} is no local folder or file, so it is taken as a hub id, which needs quantized_filename"
            )
        files = _pick(Path(_download(model_id, filenames, token, cache_dir)), filenames)
    if tok_model_id is None:
        return files, None
    tokenizer = Path(tok_model_id).expanduser()
    if tokenizer.is_dir():
        return files, str(tokenizer)
    return files, _download(tok_model_id, [*CONFIG_FILES, *TOKENIZER_FILES], token, cache_dir)


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
    if not filenames:
        raise InvalidArgumentError("quantized_filename is an empty list; name at least one file")
    for name in filenames:
        if not (folder / name).is_file():
            raise ModelLoadError(f"{folder} has no file {name!r}; its GGUF files: {present}")
    return [str(folder / name) for name in filenames]


def _download(repo_id: str, patterns: list[str], token: str | bool | None, cache_dir: str | None) -> str:
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
    try:
        return snapshot_download(repo_id, allow_patterns=patterns, token=token, cache_dir=cache_dir)
    except HFValidationError as error:
        raise ModelNotFoundError(f"{repo_id!r} is neither a local folder nor a hub id such as 'owner/name': {error}") from error
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{repo_id} is gated: accept its terms on the hub and give a token, by `hf auth login` or token_source ({error})"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{repo_id} is neither a local folder nor a repository of the hub; a private one needs a token ({error})"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(f"{repo_id} is not in the cache and the hub cannot be reached ({error})") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelLoadError(f"downloading {repo_id} failed: {error}") from error
