"""The build backend: maturin's, after the CUDA kernels have been compiled where they can be of use.

`pip install . -C kernels=auto|yes|no`: with "auto", which is the default, kernels are compiled where there is an NVIDIA driver.
"yes" compiles them anywhere, for a wheel that goes to another machine; "no" leaves them out. Where nvcc cannot be had or fails,
the package is built without kernels; `mistral-paged doctor` then tells why.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable, Mapping
from typing import Any

import compiler
import maturin
from maturin import (
    build_sdist,
    get_requires_for_build_sdist,
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

Settings = Mapping[str, Any] | None
CHOICES = ("auto", "yes", "no")


def why_left_out(settings: Settings) -> str | None:
    """Why kernels are not to be compiled; `None`: they are.

    Ends the build, in one line, on systems that the package does not run on, and for a `kernels` setting that is none of
    `CHOICES`.
    """
    if platform.system() != "Linux":
        sys.exit(
            f"mistral_paged runs on Linux, and this is {platform.system()}: build it in a Linux container or virtual machine"
        )
    choice = (settings or {}).get("kernels", "auto")
    if choice not in CHOICES:
        sys.exit(f"the build setting kernels={choice!r} means nothing; it is one of {', '.join(CHOICES)}")
    if choice == "no":
        return "the build was asked to leave them out (-C kernels=no)"
    if choice == "auto" and not has_driver():
        return "the machine that built this has no NVIDIA driver (`pip install . -C kernels=yes` compiles them anyway)"
    return None


def has_driver() -> bool:
    """Whether NVIDIA's driver library can be loaded."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def nvcc_requirements() -> list[str]:
    """What brings nvcc: NVIDIA has it for Linux on x86-64."""
    if platform.machine() != "x86_64":
        return []
    lines = (compiler.KERNELS / "requirements.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def requirements(of_maturin: Callable[[Settings], list[str]], settings: Settings) -> list[str]:
    """The build's requirements beside those of pyproject.toml."""
    return of_maturin(settings) + (nvcc_requirements() if why_left_out(settings) is None else [])


def get_requires_for_build_wheel(settings: Settings = None) -> list[str]:
    """The requirements of `build_wheel`."""
    return requirements(maturin.get_requires_for_build_wheel, settings)


def get_requires_for_build_editable(settings: Settings = None) -> list[str]:
    """The requirements of `build_editable`."""
    return requirements(maturin.get_requires_for_build_editable, settings)


def compile_kernels(settings: Settings) -> None:
    """Leaves what is embedded in kernels/built."""
    left_out = why_left_out(settings)
    if left_out is None:
        try:
            compiler.compile_all()
            return
        except compiler.CompileError as error:
            left_out = str(error)
    print(f"CUDA kernels are left out, so this build runs on CPUs only: {left_out}", file=sys.stderr)
    compiler.write_embedded(compiler.BUILT, f"none were compiled when this was built: {left_out.splitlines()[0]}", [])


def build_wheel(directory: str, settings: Settings = None, metadata: str | None = None) -> str:
    """Builds a wheel into `directory` and returns its name."""
    compile_kernels(settings)
    return str(maturin.build_wheel(directory, settings, metadata))


def build_editable(directory: str, settings: Settings = None, metadata: str | None = None) -> str:
    """Builds a wheel that leads back here, and returns its name."""
    compile_kernels(settings)
    return str(maturin.build_editable(directory, settings, metadata))
