"""What stands in front of replicas: the metrics that gateways read, and the examples' flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from test_server import Server, serving

from mistral_paged import cli

FLEET = Path(__file__).parent.parent / "examples" / "fleet"


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
