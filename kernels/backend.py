"""The build backend: maturin's, after the CUDA kernels have been compiled.

Where there is no nvcc, or it fails, the wheel is built without kernels; `mistral-paged doctor` then tells why.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import compiler
import maturin
from maturin import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def check_platform() -> None:
    """Ends the build where it would fail after pages of compiler errors."""
    if sys.platform != "linux":
        sys.exit(f"mistral_paged runs on Linux, and this is {sys.platform}: build it in a Linux container or virtual machine")


def compile_kernels() -> None:
    """Leaves what is embedded in kernels/built."""
    check_platform()
    try:
        compiler.compile_all()
    except compiler.CompileError as error:
        print(f"CUDA kernels are left out, so this build runs on CPUs only: {error}", file=sys.stderr)
        compiler.write_embedded(compiler.BUILT, f"none were compiled when this was built: {str(error).splitlines()[0]}", [])


def build_wheel(directory: str, settings: Mapping[str, Any] | None = None, metadata: str | None = None) -> str:
    """Builds a wheel into `directory` and returns its name."""
    compile_kernels()
    return str(maturin.build_wheel(directory, settings, metadata))


def build_editable(directory: str, settings: Mapping[str, Any] | None = None, metadata: str | None = None) -> str:
    """Builds a wheel that leads back here, and returns its name."""
    compile_kernels()
    return str(maturin.build_editable(directory, settings, metadata))
