"""How the CUDA kernels are compiled: with a stand-in for nvcc, which writes down what it was asked for."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))
import backend
import compiler
import symbols

NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release {version}, V{version}.88"; exit; fi
echo "$@" >> "$(dirname "$0")/calls"
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; source=$1; shift; done
grep -q WARNS "$source" && {{ echo "error: declared but never referenced"; exit 1; }}
echo image > "$out"
spilt=$(grep -c SPILLS "$source")
name=$(sed -nE 's/.* ([a-z_0-9]+)\\(.*/\\1/p' "$source")
for target in sm_80 sm_90; do
    echo "ptxas info    : Compiling entry function '$name' for '$target'"
    echo "ptxas info    : Function properties for $name"
    echo "    8 bytes stack frame, $((spilt * 8)) bytes spill stores, $((spilt * 4)) bytes spill loads"
    echo "ptxas info    : Used 40 registers, used 0 barriers"
done
"""

# Of a fatbin that is text: a line a target, with its kernels.
CUOBJDUMP = """#!/bin/sh
while read -r target kernels; do
    printf '\\nFatbin elf code:\\n================\\narch = %s\\ncompressed\\n\\nsymbols:\\n' "$target"
    echo 'STT_FUNC         STB_WEAK   STV_DEFAULT    $__internal_0_$__cuda_sm20_rcp_rn_f32_slowpath'
    for kernel in $kernels; do echo "STT_FUNC         STB_GLOBAL STO_ENTRY      $kernel"; done
done < "$2"
"""


class Folder:
    """A folder of kernels with a compiler of its own."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.built, self.calls = path / "kernels", path / "built", path / "bin" / "calls"
        self.path.mkdir()
        (path / "bin").mkdir()
        self.nvcc = path / "bin" / "nvcc"
        self.install("13.0")
        monkeypatch.setattr(sys, "path", [str(path)])
        monkeypatch.setenv("CUDA_HOME", str(path))
        monkeypatch.setenv("XDG_CACHE_HOME", str(path / "cache"))

    def install(self, version: str) -> None:
        self.nvcc.write_text(NVCC.format(version=version))
        self.nvcc.chmod(0o755)

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

    def compile(self) -> list[compiler.Compiled]:
        return compiler.compile_all(self.path, self.built)

    def compiled_files(self) -> list[str]:
        """Names of the files that were compiled since the last question."""
        if not self.calls.exists():
            return []
        calls = self.calls.read_text().splitlines()
        self.calls.unlink()
        return sorted(Path(call.split()[-1]).name for call in calls)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    folder = Folder(tmp_path, monkeypatch)
    folder.write("norm.cu", "void rms_norm(Args a) {}\n")
    folder.write("gemv.cu", '#include "dots.cuh"\nvoid gemv_f32(Args a) {}\n')
    folder.write("dots.cuh", '#include "shared.cuh"\n')
    folder.write("shared.cuh", "// shared\n")
    return folder


def test_every_target_and_ptx_are_asked_for(folder: Folder) -> None:
    folder.compile()
    call = folder.calls.read_text()
    for target in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "compute_80"):
        assert f"code={target}" in call
    assert "all-warnings" in call
    assert "--warning-as-error" in call


def test_some_targets_are_checked_in_a_folder_that_nothing_embeds(folder: Folder) -> None:
    assert compiler.chosen_targets("sm_90,sm_80") == ("sm_80", "sm_90")
    assert (compiler.built_folder(compiler.TARGETS), compiler.built_folder(["sm_80"])) == (compiler.BUILT, compiler.CHECKED)
    with pytest.raises(argparse.ArgumentTypeError, match=r"^sm_75: targets are sm_80, sm_89, "):
        compiler.chosen_targets("sm_75,sm_80")
    compiler.compile_all(folder.path, folder.built, ["sm_90"])
    call = folder.calls.read_text()
    assert "code=sm_90" in call
    assert "code=sm_80" not in call
    assert "code=compute_80" not in call
    assert not (folder.built / "embedded.rs").exists()
    # What was checked alone is not what a package embeds.
    folder.compiled_files()
    folder.compile()
    assert folder.compiled_files() == ["gemv.cu", "norm.cu"]


def test_only_what_changed_is_compiled_again(folder: Folder) -> None:
    folder.compile()
    assert folder.compiled_files() == ["gemv.cu", "norm.cu"]
    embedded = (folder.built / "embedded.rs").stat().st_mtime_ns
    folder.compile()
    assert folder.compiled_files() == []
    assert (folder.built / "embedded.rs").stat().st_mtime_ns == embedded
    folder.write("norm.cu", "void rms_norm(Args args) {}\n")
    folder.compile()
    assert folder.compiled_files() == ["norm.cu"]
    folder.write("shared.cuh", "// gemv.cu includes it through another one\n")
    folder.compile()
    assert folder.compiled_files() == ["gemv.cu"]
    folder.install("13.1")
    folder.compile()
    assert folder.compiled_files() == ["gemv.cu", "norm.cu"]


def test_another_copy_of_the_sources_finds_what_the_first_compiled(folder: Folder) -> None:
    folder.compile()
    assert folder.compiled_files() == ["gemv.cu", "norm.cu"]
    folder.path = folder.path.rename(folder.path.with_name("copy"))
    folder.built = folder.built.with_name("other")
    folder.compile()
    assert folder.compiled_files() == []
    assert (folder.built / "gemv.fatbin").read_text() == "image\n"


def test_rust_is_told_every_kernel_of_every_file(folder: Folder) -> None:
    folder.compile()
    text = (folder.built / "embedded.rs").read_text()
    assert 'Module { name: "gemv", image: include_bytes!("gemv.fatbin"), kernels: &["gemv_f32"] }' in text
    assert 'Module { name: "norm", image: include_bytes!("norm.fatbin"), kernels: &["rms_norm"] }' in text
    assert "nvcc 13.0.88" in text
    (folder.path / "gemv.cu").unlink()
    folder.compile()
    assert "gemv" not in (folder.built / "embedded.rs").read_text()


def test_a_warning_fails_and_leaves_nothing_that_looks_compiled(folder: Folder) -> None:
    folder.write("norm.cu", "void rms_norm(Args a) {} // WARNS\n")
    with pytest.raises(compiler.CompileError, match="never referenced"):
        folder.compile()
    assert not (folder.built / "norm.fatbin").exists()
    assert not (folder.built / "embedded.rs").exists()


def test_spills_fail_in_kernels_that_decode_and_there_only(folder: Folder) -> None:
    folder.write("norm.cu", "void rms_norm(Args a) {} // SPILLS\n")
    assert compiler.spilling(folder.compile()) == []
    folder.write("gemv.cu", "void gemv_f32(Args a) {} // SPILLS\n")
    expected = ["gemv_f32 for sm_80 spills 12 bytes", "gemv_f32 for sm_90 spills 12 bytes"]
    assert compiler.spilling(folder.compile()) == expected
    # What was kept from the last time spills as well.
    assert compiler.spilling(folder.compile()) == expected


def test_an_older_compiler_is_refused_by_its_version(folder: Folder) -> None:
    folder.install("12.9")
    with pytest.raises(compiler.CompileError, match=r"version 12\.9\.88; 13\.0 or newer"):
        folder.compile()


def test_without_a_compiler_the_places_are_named(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.nvcc.unlink()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(compiler.CompileError, match=r"NVIDIA's wheels.*CUDA_HOME or PATH"):
        folder.compile()


def test_the_compiler_of_a_wheel_goes_before_that_of_cuda_home(folder: Folder, tmp_path: Path) -> None:
    wheel = tmp_path / "nvidia" / "cu13" / "bin"
    wheel.mkdir(parents=True)
    (wheel / "nvcc").write_text("")
    assert compiler.find_tool("nvcc") == wheel / "nvcc"


def test_a_build_without_kernels_says_why(folder: Folder) -> None:
    compiler.write_embedded(folder.built, 'no "nvcc"', [])
    text = (folder.built / "embedded.rs").read_text()
    assert r'note: "no \"nvcc\""' in text
    assert "targets: &[]" in text


def test_kernels_are_compiled_where_there_is_a_driver_or_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_driver", lambda: False)
    assert "no NVIDIA driver" in str(backend.why_left_out(None))
    assert backend.why_left_out({"kernels": "yes"}) is None
    monkeypatch.setattr(backend, "has_driver", lambda: True)
    assert backend.why_left_out({"kernels": "auto"}) is None
    assert "kernels=no" in str(backend.why_left_out({"kernels": "no"}))


def test_nvcc_is_a_requirement_only_of_builds_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.platform, "machine", lambda: "x86_64")
    wanted = [name for name in backend.get_requires_for_build_wheel({"kernels": "yes"}) if "nvcc" in name]
    assert wanted == ["nvidia-cuda-nvcc==13.0.88"]
    assert not any("nvidia" in name for name in backend.get_requires_for_build_wheel({"kernels": "no"}))


def test_an_unknown_setting_is_refused_in_a_line() -> None:
    with pytest.raises(SystemExit, match=r"^the build setting kernels='maybe' means nothing; it is one of auto, yes, no$"):
        backend.why_left_out({"kernels": "maybe"})


def test_kernels_of_a_fatbin_and_of_the_manifest_are_compared_by_name(folder: Folder, tmp_path: Path) -> None:
    folder.nvcc.with_name("cuobjdump").write_text(CUOBJDUMP)
    folder.nvcc.with_name("cuobjdump").chmod(0o755)
    manifest, gemv, norm = (tmp_path / name for name in ("manifest.txt", "gemv.fatbin", "norm.fatbin"))
    manifest.write_text("gemv_f32 GemvArgs 128 64\nrms_norm NormArgs 256 32\n")
    gemv.write_text("".join(f"{target} gemv_f32\n" for target in compiler.TARGETS))
    norm.write_text("".join(f"{target} rms_norm\n" for target in compiler.TARGETS))
    assert symbols.differences([gemv, norm], manifest) == []
    norm.write_text(norm.read_text().replace("sm_90 rms_norm", "sm_90 rms_norm_2"))
    assert symbols.differences([gemv, norm], manifest) == [
        "rms_norm of manifest.txt has no machine code for sm_90",
        "rms_norm_2 has machine code for sm_90, and is not in manifest.txt",
    ]
    assert len(symbols.differences([norm], manifest)) == len(compiler.TARGETS) + 2
    assert symbols.differences([gemv, norm], manifest, ["sm_80"]) == []


@pytest.mark.parametrize("platform", ["Darwin", "Windows"])
def test_another_system_is_told_in_one_line_before_anything_is_compiled(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.platform, "system", lambda: platform)
    monkeypatch.setattr(compiler, "compile_all", lambda: pytest.fail("compiled"))
    for build in (backend.build_wheel, backend.build_editable):
        with pytest.raises(SystemExit, match=f"^mistral_paged runs on Linux, and this is {platform}: [^\n]*$"):
            build("nowhere")
