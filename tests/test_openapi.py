"""Requests that schemathesis makes from /openapi.json. Skipped where it is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_server import serving

pytest.importorskip("schemathesis")

HOOKS = {"SCHEMATHESIS_HOOKS": "openapi_checks", "PYTHONPATH": str(Path(__file__).parent)}
EXAMPLES = ["--max-examples", "12", "--generation-deterministic"]
CHECKS = ["--checks", "all", "--exclude-checks", "positive_data_acceptance,negative_data_rejection"]
# Those that end the service for all.
EXCLUDED = ["--exclude-path", "/admin/pause", "--exclude-path", "/admin/drain"]


def test_requests_of_the_documents_form_are_answered_and_others_refused(tmp_path: Path) -> None:
    with serving("--disable-access-log") as server:
        url = f"http://127.0.0.1:{server.port}/openapi.json"
        command = [sys.executable, "-m", "schemathesis.cli", "run", url, *CHECKS, *EXAMPLES, *EXCLUDED, "--no-color"]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **HOOKS}, capture_output=True, text=True, timeout=110, check=False
        )
        assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
        assert server.get("/health").json["status"] == "ok"
        assert server.metric("mistralrs_kv_cache_blocks_used") == 0
