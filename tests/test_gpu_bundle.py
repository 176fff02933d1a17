"""The script of `make gpu-bundle`: every step ends in time, and says how."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent / "gpu" / "run.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_run", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_run"] = module
    spec.loader.exec_module(module)
    return module


def run(script: ModuleType, folder: Path, code: str, limit: float = 30.0, left: float = 60.0) -> tuple[str, float]:
    step = script.Step("one", [sys.executable, "-c", code], limit)
    begun = time.monotonic()
    outcome = script.run(step, folder, begun + left)
    return str(outcome["outcome"]), time.monotonic() - begun


def test_a_step_says_how_it_ended(script: ModuleType, tmp_path: Path) -> None:
    assert run(script, tmp_path, "print('all is well')")[0] == "passed"
    assert (tmp_path / "one.log").read_text().splitlines()[-1] == "all is well"
    assert run(script, tmp_path, "raise SystemExit(3)")[0] == "failed with status 3"
    missing = script.Step("two", [str(tmp_path / "nothing")], 1.0)
    assert str(script.run(missing, tmp_path, time.monotonic() + 9)["outcome"]).startswith("does not start: ")


def test_a_step_that_takes_too_long_ends_with_what_it_started_and_leaves_what_it_said(script: ModuleType, tmp_path: Path) -> None:
    code = f"""
import subprocess, sys, time
print("begun")
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3); open({str(tmp_path / "late")!r}, 'w')"])
time.sleep(100)
"""
    outcome, seconds = run(script, tmp_path, code, limit=1.0)
    assert outcome == "ended after 1 seconds"
    assert seconds < 20
    assert "begun" in (tmp_path / "one.log").read_text()
    time.sleep(4)
    assert not (tmp_path / "late").exists()


def test_a_step_without_time_left_is_left_out(script: ModuleType, tmp_path: Path) -> None:
    assert run(script, tmp_path, "", left=-1.0)[0] == "left out: no time was left"


def test_both_calls_fit_into_ten_minutes(script: ModuleType, tmp_path: Path) -> None:
    for steps in (script.test_steps("cuda:0"), script.bench_steps("cuda:0", tmp_path)):
        assert sum(step.limit for step in steps) <= 570


def test_without_a_gpu_what_needs_none_runs(tmp_path: Path) -> None:
    """Here no wheel lies beside the script, and the package is that of the tests."""
    command = [sys.executable, str(SCRIPT), "benches", "--device", "cpu", "--output", str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("left out: needs a GPU") == 2
    records = [json.loads(line) for line in (tmp_path / "results" / "summary.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == ["kernels", "model"]
    refused = subprocess.run([*command[:3], "--device", "metal"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "got 'metal'" in refused.stderr
