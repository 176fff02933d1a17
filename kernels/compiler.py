"""Compiles kernels/*.cu, each to a fatbin with machine code for every target and PTX, and writes what rust/device embeds.

`python3 kernels/compiler.py` compiles, prints what came of it, and fails where there is no nvcc, on any warning, and on
spills in kernels that decode. With `--targets` it does so for some targets alone, into a folder that nothing embeds. A package
is built by kernels/backend.py, which compiles kernels where they can be of use.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

KERNELS = Path(__file__).resolve().parent
BUILT = KERNELS / "built"
CHECKED = KERNELS.parent / "build" / "kernels"
"""Of some targets alone."""
# Machine code runs on later devices of the same major version, so sm_80 serves 8.6; the driver compiles PTX for what has none.
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
PTX = "compute_80"
MIN_NVCC = (13, 0)
FLAGS = (
    "-fatbin",
    "-std=c++17",
    "-O3",
    "--compress-mode=size",
    "-Werror=all-warnings",
    "-Xptxas=-v,--warning-as-error",
)
# Bytes of spills at most in what decodes: it waits for memory, and a spill is traffic of its own. Products with 32 rows have 64
# sums a thread and spill some, so that a multiprocessor has two CTAs: with fewer warps and no spill they took longer on an H100.
MOST_SPILT = {
    "attention_": 0,
    "latent_": 0,
    "gemv_": 0,
    "gemm_": 256,
    "lora_": 0,
    "causal_conv": 0,
    "mamba_": 0,
    "mamba2_": 0,
    "gated_delta_": 0,
    "kimi_delta_": 0,
}


class CompileError(Exception):
    """There is no usable compiler, or it refused a file."""


@dataclass(frozen=True)
class Entry:
    """What ptxas says of one kernel for one target."""

    name: str
    target: str
    registers: int
    spill_bytes: int


@dataclass(frozen=True)
class Compiled:
    """One file's fatbin lies in `built`, as NAME.fatbin; `entries` are its kernels, once a target."""

    name: str
    entries: list[Entry]


def find_tool(name: str) -> Path:
    """A program of NVIDIA's wheels, of CUDA_HOME, or on the PATH, in that order."""
    wheels = [Path(folder or ".") / "nvidia" / "cu13" for folder in sys.path]
    homes = [Path(home) for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if home]
    for prefix in wheels + homes:
        tool = prefix / "bin" / name
        if tool.is_file():
            return tool
    on_path = shutil.which(name)
    if on_path is None:
        raise CompileError(f"no {name} in NVIDIA's wheels (pip install nvidia-cuda-{name} and its companions), CUDA_HOME or PATH")
    return Path(on_path)


def nvcc_version(nvcc: Path) -> str:
    """Such as 13.0.88."""
    text = run([str(nvcc), "--version"])
    found = re.search(r"V(\d+)\.(\d+)\.(\d+)", text)
    if found is None:
        raise CompileError(f"{nvcc} --version tells no version: {text.strip()!r}")
    if (int(found[1]), int(found[2])) < MIN_NVCC:
        raise CompileError(f"{nvcc} is version {found[0][1:]}; {MIN_NVCC[0]}.{MIN_NVCC[1]} or newer compiles for all targets")
    return found[0][1:]


def run(command: list[str]) -> str:
    """What a command prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompileError(f"{command[0]} does not start: {error}") from error
    if done.returncode != 0:
        raise CompileError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def parse_ptxas(text: str) -> Iterator[Entry]:
    """The kernels that `ptxas -v` tells about."""
    entry = spills = None
    for line in text.splitlines():
        if found := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            entry, spills = found, 0
        elif found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            # Functions that are called, rather than inlined, have lines of their own: all count for their kernel.
            spills = (spills or 0) + int(found[1]) + int(found[2])
        elif entry and (found := re.search(r"Used (\d+) registers", line)):
            yield Entry(entry[1], entry[2], int(found[1]), spills or 0)
            entry = None


def with_headers(source: Path) -> list[Path]:
    """A file and the headers beside it that it includes, through others as well; those of the emulation are not nvcc's."""
    files = [source]
    for file in files:
        for name in re.findall(r'^\s*#include "([^"/]+)"', file.read_text(), re.MULTILINE):
            header = source.parent / name
            if header not in files and header.is_file():
                files.append(header)
    return files


def flags(targets: Sequence[str]) -> tuple[str, ...]:
    """What nvcc is told: with all targets, PTX as well."""
    codes = [f"-gencode=arch=compute_{target[3:]},code={target}" for target in targets]
    return *FLAGS, *codes, *([f"-gencode=arch={PTX},code={PTX}"] if tuple(targets) == TARGETS else [])


def content_key(source: Path, version: str, targets: Sequence[str] = TARGETS) -> str:
    """A digest of everything that decides a file's fatbin."""
    digest = hashlib.sha256(repr((version, flags(targets))).encode())
    for path in with_headers(source):
        content = path.read_bytes()
        digest.update(repr((path.name, len(content))).encode() + content)
    return digest.hexdigest()


def cache_folder() -> Path:
    """Where fatbins are kept by content, for every copy of the sources that this user has."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "mistral_paged" / "kernels"


def compile_file(source: Path, built: Path, nvcc: Path, version: str, targets: Sequence[str]) -> Compiled:
    """Puts a file's fatbin into `built`, and compiles it unless the cache has it of the same content."""
    key = content_key(source, version, targets)
    cached, record = cache_folder() / f"{key}.fatbin", cache_folder() / f"{key}.json"
    if not (cached.is_file() and record.is_file()):
        print(f"compiling {source.name}", file=sys.stderr, flush=True)
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
            image, text = Path(folder) / "image", Path(folder) / "text"
            entries = [asdict(entry) for entry in parse_ptxas(run([str(nvcc), *flags(targets), "-o", str(image), str(source)]))]
            text.write_text(json.dumps(entries))
            image.replace(cached)
            text.replace(record)
    image, content = built / f"{source.stem}.fatbin", cached.read_bytes()
    # A file that is not touched makes nothing that embeds it be built again.
    if not image.is_file() or image.read_bytes() != content:
        image.write_bytes(content)
    return Compiled(source.stem, [Entry(**entry) for entry in json.loads(record.read_text())])


def compile_all(kernels: Path = KERNELS, built: Path = BUILT, targets: Sequence[str] = TARGETS) -> list[Compiled]:
    """Compiles what has changed, as many files at once as there are processors, and tells rust/device what there is."""
    nvcc = find_tool("nvcc")
    version = nvcc_version(nvcc)
    if not any(kernels.glob("*.cu")):
        raise CompileError(f"there is no .cu file in {kernels}")
    built.mkdir(parents=True, exist_ok=True)
    # The slowest files are the largest; begun first, they do not end last alone.
    sources = sorted(kernels.glob("*.cu"), key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(lambda source: compile_file(source, built, nvcc, version, targets), sources))
    compiled.sort(key=lambda file: file.name)
    if tuple(targets) == TARGETS:
        write_embedded(built, f"compiled by nvcc {version}", compiled)
    return compiled


def write_embedded(built: Path, note: str, compiled: Iterable[Compiled]) -> None:
    """The Rust expression that rust/device/src/cuda/embedded.rs includes; a file that would not change is left alone."""
    built.mkdir(exist_ok=True)
    modules = []
    for file in compiled:
        names = ", ".join(f'"{name}"' for name in sorted({entry.name for entry in file.entries}))
        modules.append(f'Module {{ name: "{file.name}", image: include_bytes!("{file.name}.fatbin"), kernels: &[{names}] }},')
    targets = ", ".join(f'"{target}"' for target in (*TARGETS, PTX)) if modules else ""
    fields = [f"note: {json.dumps(note, ensure_ascii=False)},", "modules: &[", *modules, "],", f"targets: &[{targets}],"]
    text = "\n".join(["EmbeddedKernels {", *fields, "}", ""])
    path = built / "embedded.rs"
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)


def spilling(compiled: Iterable[Compiled]) -> list[str]:
    """The decode kernels that spill too much."""
    return [
        f"{entry.name} for {entry.target} spills {entry.spill_bytes} bytes"
        for file in compiled
        for entry in file.entries
        if any(entry.name.startswith(prefix) and entry.spill_bytes > most for prefix, most in MOST_SPILT.items())
    ]


def chosen_targets(text: str) -> tuple[str, ...]:
    """Of names with commas between them, in the order of all targets."""
    names = text.split(",")
    if unknown := [name for name in names if name not in TARGETS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: targets are {', '.join(TARGETS)}")
    return tuple(target for target in TARGETS if target in names)


def built_folder(targets: Sequence[str]) -> Path:
    """Where the fatbins of these targets go."""
    return BUILT if tuple(targets) == TARGETS else CHECKED


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="Compile kernels/*.cu and check what the compiler says of them.")
    parser.add_argument("--verbose", action="store_true", help="registers and spills of every kernel")
    parser.add_argument("--targets", type=chosen_targets, default=TARGETS, help="some alone, such as sm_80,sm_90, to check them")
    options = parser.parse_args()
    built = built_folder(options.targets)
    try:
        compiled = compile_all(built=built, targets=options.targets)
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    for file in compiled:
        size = (built / f"{file.name}.fatbin").stat().st_size
        print(f"{file.name}: {len({entry.name for entry in file.entries})} kernels, {size / 1e6:.2f} MB")
        for entry in file.entries if options.verbose else []:
            print(f"  {entry.name} {entry.target}: {entry.registers} registers, {entry.spill_bytes} bytes spilt")
    failures = spilling(compiled)
    print(*failures, sep="\n", end="\n" if failures else "", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
