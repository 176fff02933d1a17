"""`mistral-paged doctor`, and a package that needs nothing of NVIDIA's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN

from mistral_paged import DeviceError, Runner, Which, _core, doctor

MODEL = Which.GGUF(str(GOLDEN / "gguf" / "llama.gguf"))


def facts(**changes: Any) -> dict[str, Any]:
    """What `survey` would find on a machine with a GPU and everything for it."""
    gpu = {"name": "NVIDIA H200", "capability": "9.0", "multiprocessors": 132, "memory": (140 << 30, 139 << 30), "problem": None}
    return {
        "cpu_tiers": ["scalar", "avx2"],
        "cores": 16,
        "memory": (128 << 30, 100 << 30),
        "driver": "13.0",
        "driver_error": None,
        "gpus": [gpu],
        "libraries": [("cuBLASLt", "/venv/nvidia/cu13/lib/libcublasLt.so.13", None)],
        "kernels": ["gemv", "norm"],
        "kernel_bytes": 12_000_000,
        "kernel_targets": ["sm_90", "compute_80"],
        "kernel_note": "compiled by nvcc 13.0.88",
        **changes,
    }


def report(**changes: Any) -> str:
    """The report, an entry a line."""
    return re.sub(r"\n {4,}", " ", "\n".join(doctor.lines(facts(**changes))))


def test_a_report_fits_a_terminal_of_80_columns() -> None:
    for changes in ({}, {"libraries": [("cuBLASLt", None, "not there; " * 20)]}, {"kernels": [], "kernel_note": "no nvcc " * 20}):
        lines = [line for entry in doctor.lines(facts(**changes)) for line in entry.splitlines()]
        assert max(len(line) for line in lines) <= 80
        assert all(line == line.rstrip() for line in lines)


def test_everything_that_is_there_is_told() -> None:
    text = report()
    for part in (
        "avx2 (and scalar)",
        "serves CUDA 13.0",
        "NVIDIA H200, compute capability 9.0, 132 multiprocessors, 140.0 GB, 139.0 GB free",
        "/venv/nvidia/cu13/lib/libcublasLt.so.13",
        "2 fatbins, 12.0 MB, compiled by nvcc 13.0.88",
        "for sm_90, compute_80",
        "Models run on cuda:0 unless device says otherwise",
    ):
        assert part in text
    assert text.count("  - ") == 1, "nothing is missing, so there is nothing more to do"


def test_what_is_missing_is_told_with_what_to_do() -> None:
    text = report(driver=None, driver_error="no driver; install one", gpus=[])
    assert "driver     none" in text
    assert "GPUs       none" in text
    assert "- Driver: no driver; install one." in text
    text = report(libraries=[("cuBLASLt", None, "not there; install it")])
    assert "- cuBLASLt: not there; install it." in text
    text = report(kernels=[], kernel_targets=[], kernel_note="no nvcc")
    assert "kernels    no nvcc" in text
    assert "- Kernels: no nvcc" in text


def test_a_gpu_that_cannot_be_used_is_told_with_the_reason() -> None:
    gpu = {"name": "GTX", "capability": "7.5", "multiprocessors": 20, "memory": None, "problem": "too old; use another"}
    text = report(gpus=[gpu])
    assert "GTX, compute capability 7.5, 20 multiprocessors, memory unknown" in text
    assert "- cuda:0: too old; use another." in text
    assert "Models run on the processor" in text


def test_the_command_prints_the_report_of_this_machine() -> None:
    command = Path(sys.executable).with_name("mistral-paged")
    done = subprocess.run([str(command), "doctor"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("mistral_paged ")
    assert f"tier       {_core.survey()['cpu_tiers'][-1]}" in done.stdout


def test_a_gpu_that_is_not_there_is_refused_with_what_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    if _core.survey()["gpus"]:
        pytest.skip("there is a GPU")
    monkeypatch.setenv("CUDA_HOME", "/opt/some-cuda")
    for refused in (lambda: Runner(which=MODEL, device="cuda:0"), lambda: Runner.memory_plan(MODEL, device="cuda:7")):
        with pytest.raises(DeviceError, match=r'device="cuda:[07]" cannot be used: .*libcuda\.so\.1.*device="cpu"') as error:
            refused()
        if not _core.survey()["libraries"][0][1]:
            assert "NVIDIA's wheels" in str(error.value)
            assert "system's library folders, CUDA_HOME (/opt/some-cuda)" in str(error.value)
            assert 'pip install "mistral-paged[cuda]"' in str(error.value)


def test_the_module_needs_no_library_of_nvidia() -> None:
    needed = subprocess.run(["readelf", "-d", _core.__file__], capture_output=True, text=True, check=True).stdout
    assert "libc.so" in needed
    for name in ("cuda", "cublas", "nvrtc"):
        assert name not in needed.lower()
