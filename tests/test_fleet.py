"""What stands in front of replicas: the metrics that gateways read, and the examples' flags."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from conftest import GOLDEN
from prometheus_client.parser import text_string_to_metric_families
from test_server import Server, serving

from mistral_paged import cli

FLEET = Path(__file__).parent.parent / "examples" / "fleet"
LORA = GOLDEN / "lora"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--disable-access-log", "--pa-block-size", "16") as server:
        yield server


def test_the_gateway_api_inference_extension_reads_what_it_schedules_by(server: Server) -> None:
    """Its scraper takes the newest sample of a family by name; `block_size` and `num_gpu_blocks` are labels."""
    assert server.complete().status == 200
    page = server.get("/metrics").body.decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        (sample,) = families[name].samples
        assert families[name].type == "gauge"
        assert sample.value >= 0
        assert sample.labels["model_name"] == "llama"
    (info,) = families["vllm:cache_config_info"].samples
    assert int(info.labels["block_size"]) == 16
    assert int(info.labels["num_gpu_blocks"]) > 0


def lora_requests(server: Server) -> tuple[str, set[str], set[str]]:
    """As the scraper reads them: the sample with the largest value, whose labels are lists with commas between."""
    page = server.get("/metrics").body.decode()
    (family,) = [f for f in text_string_to_metric_families(page) if f.name == "vllm:lora_requests_info"]
    assert family.type == "gauge"
    newest = max(family.samples, key=lambda sample: sample.value)
    assert abs(newest.value - time.time()) < 60
    running, waiting = (
        {name for name in newest.labels[f"{of}_lora_adapters"].split(",") if name} for of in ("running", "waiting")
    )
    return newest.labels["max_lora"], running, waiting


def test_the_gateway_api_inference_extension_reads_where_adapters_are(server: Server) -> None:
    assert "vllm:lora_requests_info" not in server.get("/metrics").body.decode()
    modules = [f"{alias}={LORA / name}" for alias, name in (("attn", "llama-attn"), ("layers", "llama-layers"))]
    with serving("--lora-modules", *modules, "--lora-max-adapters", "5", "--disable-access-log") as adapted:
        assert lora_requests(adapted) == ("5", {"attn", "layers"}, set())
        adapted.post("/admin/pause", {})
        with ThreadPoolExecutor(1) as pool:
            try:
                answer = pool.submit(adapted.complete, model="layers", max_tokens=2)
                until = time.monotonic() + 30
                while not (seen := lora_requests(adapted))[2] and time.monotonic() < until:
                    time.sleep(0.01)
                assert seen == ("5", {"attn", "layers"}, {"layers"})
            finally:
                adapted.post("/admin/resume", {})
            assert answer.result(30).status == 200
        assert lora_requests(adapted) == ("5", {"attn", "layers"}, set())


def test_the_examples_give_flags_that_there_are() -> None:
    parser = cli.build_parser()
    (deployment, *_) = yaml.safe_load_all((FLEET / "kubernetes.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    options = parser.parse_args(["serve", "--host", "0.0.0.0", *container["args"]])
    assert {port["name"]: port["containerPort"] for port in container["ports"]}["http"] == options.port
    assert {probe: container[probe]["httpGet"]["path"] for probe in container if probe.endswith("Probe")} == {
        "startupProbe": "/live",
        "livenessProbe": "/health",
        "readinessProbe": "/ready",
    }
    script = (FLEET / "replicas.sh").read_text().replace("\\\n", " ").replace("$number", "1")
    (command,) = re.findall("mistral-paged (serve .*?)&", script)
    replica = parser.parse_args(shlex.split(command))
    assert (replica.port, replica.kv_events, replica.kv_events_replay) == (8101, "tcp://127.0.0.1:5551", "tcp://127.0.0.1:5561")
    router = (FLEET / "vllm_router.sh").read_text()
    for address in (
        f"http://127.0.0.1:{replica.port}={replica.kv_events}",
        f"http://127.0.0.1:{replica.port}={replica.kv_events_replay}",
    ):
        assert address in router
    assert f"--kv-event-block-size {replica.pa_block_size}" in router
    (model,) = replica.served_model_name
    assert f"--kv-event-model {model}" in router
    proxy = yaml.safe_load((FLEET / "litellm.yaml").read_text())
    assert {entry["model_name"] for entry in proxy["model_list"]} == {model}
