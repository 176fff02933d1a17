"""Replicas under Ray Serve, and batches of Ray Data. Skipped where Ray is not installed; `make test-ray` installs it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import GOLDEN

from mistral_paged import CompletionRequest, InvalidArgumentError, Runner, Which
from mistral_paged.default_model import default_model

# Ray reads them when it is imported.
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray", reason="`make test-ray` installs Ray")
    openai = pytest.importorskip("openai", reason="`make test-ray` installs it")
    from ray import serve
    from ray.serve.exceptions import BackPressureError
    from starlette.requests import Request

    from mistral_paged import ray as mistral_paged_ray
    from mistral_paged.ray import build_app, map_batches
    from mistral_paged.ray.deployments import Ingress, Replica, ReplicaLost, rest, target_num_replicas
    from mistral_paged.ray.routing import Forwarded, PrefixRouter, digests_of

# Other packages warn of what is to come in them.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(500)]

PORT = 8290
URL = f"http://127.0.0.1:{PORT}/v1"
QUESTION = [{"role": "user", "content": "What is 2+2?"}]
PATIENCE = 120


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def client(cluster: str) -> Iterator[Any]:
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    options = {"pa_memory_mb": "256", "pa_block_size": 16, "disable_access_log": True, "health_check_period_s": 1}
    serve.run(build_app({**options, "min_replicas": "2", "max_replicas": "2"}))
    with openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def servers() -> dict[int, int]:
    """The processes of the replicas' servers, and the replicas' own."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"mistral_paged.attended" in (folder / "cmdline").read_bytes():
                found[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    return found


def wait_for(what: str, condition: Any) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, f"not within {PATIENCE} s: {what}"
        time.sleep(0.1)


def running() -> float:
    """Requests that the replicas' engines have, by a few looks at either."""
    handle = serve.get_deployment_handle("Replica", "default")
    looks = [handle.record_autoscaling_stats.remote().result(timeout_s=20) for _ in range(4)]
    return max(look["running"] + look["waiting"] for look in looks)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"modell": "x"}, "there is no argument `modell`; did you mean 'model'?"),
    ({"port": 80}, "`port` cannot be given: each replica listens on a socket of its own"),
    ({"disable_metrics": True}, "replicas are scaled by their metrics"),
    ({"min_replicas": 3}, "`min_replicas` is 3 and `max_replicas` 1"),
    ({"max_replicas": "many"}, "`max_replicas` is 'many'; it must be int"),
    ({"router": "random"}, "`router` is 'random'; it must be prefix or least_loaded"),
    ({"num_cpus": -1}, "`num_cpus` is -1.0"),
    ({"kind": "speech"}, "`kind` is 'speech'"),
    ({"no_ui": "perhaps"}, "`no_ui` is 'perhaps'; it must be true or false"),
    ({"pa_block_size": "x"}, "argument --pa-block-size/--pa-blk-size: invalid int value: 'x'"),
    ({"max_connections": 0}, "--max-connections is 0; it must be from 1"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[message for _, message in BAD])
def test_an_argument_that_cannot_be_honoured_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        build_app(arguments)
    assert message in str(error.value)


def test_the_application_is_made_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISTRAL_PAGED_RAY_MODEL", str(default_model()))
    assert isinstance(mistral_paged_ray.app, serve.Application)
    monkeypatch.setenv("MISTRAL_PAGED_RAY_COLOUR", "red")
    with pytest.raises(InvalidArgumentError, match="there is no argument `colour`"):
        mistral_paged_ray.app  # noqa: B018


def test_the_examples_make_applications() -> None:
    yaml = pytest.importorskip("yaml")
    from ray.serve.schema import ServeDeploySchema

    folder = Path(__file__).parent.parent / "examples" / "fleet"
    service = yaml.safe_load((folder / "kuberay.yaml").read_text())
    for content in (yaml.safe_load((folder / "ray.yaml").read_text()), yaml.safe_load(service["spec"]["serveConfigV2"])):
        (application,) = ServeDeploySchema.model_validate(content).applications
        assert application.import_path == "mistral_paged.ray:build_app"
        # Files of the cluster.
        arguments = {name: value for name, value in application.args.items() if not str(value).startswith("/")}
        assert isinstance(build_app(arguments), serve.Application)


def test_scaling_aims_at_requests_and_at_blocks() -> None:
    def wanted(current: int, requests: float, usage: list[float]) -> float:
        config = SimpleNamespace(get_target_ongoing_requests=lambda: 16)
        metrics = {"kv_usage": dict(enumerate(usage))}
        context = SimpleNamespace(
            current_num_replicas=current,
            target_num_replicas=7,
            total_num_requests=requests,
            aggregated_metrics=metrics,
            config=config,
        )
        return target_num_replicas(context)[0]

    assert wanted(0, 3, []) == 7
    assert wanted(2, 48, [0.1, 0.1]) == 3
    assert wanted(2, 0, []) == 0
    assert wanted(4, 16, [0.8] * 4) == pytest.approx(4)
    assert wanted(4, 16, [1.0] * 4) == pytest.approx(5)


def chat(*texts: str, **rest: Any) -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return json.dumps({"messages": messages, **rest}).encode()


def common(one: bytes, other: bytes, keys: tuple[str, str] = ("", "")) -> int:
    """Digests that two requests begin with alike."""
    pairs = zip(digests_of(one, keys[0]), digests_of(other, keys[1]), strict=False)
    return sum(a == b for a, b in pairs)


def test_a_turn_begins_like_the_one_before_it_and_nobody_elses_does() -> None:
    first = chat("x" * 500)
    assert common(first, chat("x" * 500, "yes", "and then?")) >= len(digests_of(first, "")) - 1
    assert common(first, chat("y" * 500)) <= 1
    assert common(first, first, ("one", "other")) == 0
    assert common(first, chat("x" * 500, cache_salt="salt")) == 0
    assert common(first, chat("x" * 500, model="sql")) == 0
    assert digests_of(b"\x80", "") == digests_of(b"[]", "") == digests_of(b"{}", "") == []
    assert digests_of(b"[" * 100_000, "") == []
    assert len(digests_of(chat("x" * 10_000_000), "")) < 600


def router_of(*loads: int) -> tuple[PrefixRouter, list[Any]]:
    router = object.__new__(PrefixRouter)
    router.initialize_state()
    router._replica_queue_len_cache = SimpleNamespace(get=lambda replica_id: loads[int(replica_id)])
    return router, [SimpleNamespace(replica_id=str(number)) for number in range(len(loads))]


def choose(router: PrefixRouter, replicas: list[Any], body: bytes, is_sent: bool = True) -> str:
    request = SimpleNamespace(
        args=[Forwarded("POST", "/", [], body, digests_of(body, ""))], routing_context=SimpleNamespace(should_backoff=False)
    )
    ranks = asyncio.run(router.choose_replicas(replicas, request))
    assert request.routing_context.should_backoff
    assert sorted(one.replica_id for rank in ranks for one in rank) == [one.replica_id for one in replicas]
    chosen: str = ranks[0][0].replica_id
    if is_sent:
        router.on_request_routed(request, chosen, None)
    return chosen


def test_the_router_spreads_new_prompts_and_sends_known_ones_home() -> None:
    router, replicas = router_of(0, 0, 0)
    homes = [choose(router, replicas, chat(name * 300)) for name in "abc"]
    assert sorted(homes) == ["0", "1", "2"]
    for _ in range(2):
        assert [choose(router, replicas, chat(name * 300, "yes", "more")) for name in "abc"] == homes
    # Of several that come at once none is sent before the last is chosen for.
    burst = [choose(router, replicas, chat(name * 300), is_sent=False) for name in "defghi"]
    assert sorted(burst) == ["0", "0", "1", "1", "2", "2"]
    router._forget({homes[0]})
    assert choose(router, [one for one in replicas if one.replica_id != homes[0]], chat("a" * 300)) != homes[0]
    busy, replicas = router_of(20, 0)
    busy._homes[digests_of(chat("a" * 300), "")[-1]] = {"0"}
    assert choose(busy, replicas, chat("a" * 300)) == "1"


def test_a_server_that_cannot_start_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"ended with status 1: .*no-such-model"):
        Replica(["serve", "--model=/no-such-model"], None)


def test_a_replica_reads_the_metrics_of_a_server_with_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nkey = "k"\ntenant = "one"\n')
    words = ["serve", f"--model={GOLDEN / 'text' / 'llama'}", "--pa-memory-mb=16", "--num-threads=1", f"--api-keys={keys}"]
    replica = Replica([*words, "--disable-access-log"], "own")

    async def looks() -> list[Any]:
        await replica.check_health()
        stats = await replica.record_autoscaling_stats()
        answers = []
        for headers in ([], [("authorization", "Bearer k")]):
            parts = replica.forward(Forwarded("GET", "/v1/models/a%2Fb?x=1", headers, b""))
            (status, _), *body = [part async for part in parts]
            answers.append((status, json.loads(b"".join(body))["error"]["code"]))
        assert replica.client is not None
        await replica.client.close()
        return [stats, *answers]

    try:
        stats, closed, opened = asyncio.run(looks())
    finally:
        replica.__del__()
    assert stats == {"waiting": 0, "running": 0, "kv_usage": 0}
    assert closed == (401, "invalid_api_key")
    assert opened == (404, "model_not_found")
    assert not Path(replica.path).parent.exists()
    assert replica.process.poll() == 0


def test_openai_chats_streams_and_is_refused_as_without_ray(client: Any) -> None:
    request: dict[str, Any] = {"model": "default", "messages": QUESTION, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**request)
    parts = list(client.chat.completions.create(**request, stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert "default" in [model.id for model in client.models.list()]
    assert client.completions.create(model="default", prompt="Hello", max_tokens=3).usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="default", messages=QUESTION, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="embedding"):
        client.embeddings.create(model="default", input="Hello")
    with pytest.raises(openai.NotFoundError, match="is about one replica"):
        client.get("/../metrics", cast_to=object)
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="default", prompt="x" * (17 << 20))
    assert large.value.status_code == 413


def test_conversations_find_their_beginnings(client: Any) -> None:
    def turns(name: str) -> tuple[int, int]:
        """Prompt tokens of later turns that could have been found, and that were."""
        messages: list[Any] = [{"role": "user", "content": f"{name} " * 60}]
        could = found = before = 0
        for _ in range(4):
            answer = client.chat.completions.create(
                model="default", messages=messages, max_tokens=8, temperature=0, extra_body={"cache_salt": name[0]}
            )
            usage = answer.usage
            found += usage.prompt_tokens_details.cached_tokens if before else 0
            could += before // 16 * 16
            before = usage.prompt_tokens
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": "More."},
            ]
        return could, found

    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(turns, ["alpha", "beta", "gamma", "delta", "apple", "bear", "gnu", "dog"]))
    could, found = (sum(count) for count in zip(*counts, strict=True))
    assert found >= 0.98 * could


def test_a_client_that_leaves_ends_its_request(client: Any) -> None:
    stream = client.completions.create(
        model="default", prompt="Hello", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert running() >= 1
    stream.close()
    wait_for("an idle engine", lambda: running() == 0)


def stream_to_the_end(client: Any, prompt: str, begun: list[str]) -> tuple[int, Exception | None]:
    """Parts that came, and the error that ended them."""
    count = 0
    try:
        for _ in client.completions.create(
            model="default", prompt=prompt, max_tokens=400, stream=True, temperature=0, extra_body={"ignore_eos": True}
        ):
            count += 1
            if count == 1:
                begun.append(prompt)
    except Exception as error:
        return count, error
    return count, None


@pytest.mark.parametrize("victim", ["replica", "server"])
def test_streams_of_a_killed_replica_end_with_an_error_and_others_go_on(client: Any, victim: str) -> None:
    wait_for("two servers", lambda: len(servers()) == 2)
    wait_for(
        "two replicas", lambda: serve.status().applications["default"].deployments["Replica"].replica_states == {"RUNNING": 2}
    )
    begun: list[str] = []
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(stream_to_the_end, client, f"{victim} {number} " * 20, begun) for number in range(8)]
        wait_for("eight streams", lambda: len(begun) == 8)
        server, replica = next(iter(servers().items()))
        os.kill({"replica": replica, "server": server}[victim], signal.SIGKILL)
        killed = time.monotonic()
        # Whoever asks now is answered, by the replica that is left; a request that is on its way to the other asks again.
        with openai.OpenAI(base_url=URL, api_key="none", max_retries=4, timeout=60) as patient:
            assert patient.chat.completions.create(model="default", messages=QUESTION, max_tokens=4).choices
        assert time.monotonic() - killed < 30
        outcomes = [stream.result(timeout=120) for stream in streams]
    ended = [error for _, error in outcomes if error is not None]
    assert 1 <= len(ended) <= 7
    assert {type(error) for error in ended} == {openai.APIError}
    assert all("is gone: ask again" in str(error) for error in ended)
    wait_for("the end of its server", lambda: server not in servers())


def test_a_part_of_an_event_is_not_passed_on_when_its_replica_is_lost() -> None:
    class Parts:
        def __init__(self) -> None:
            self.parts = [b"data: 1\n\ndata: ", b"2\n\nda"]

        def __aiter__(self) -> Parts:
            return self

        async def __anext__(self) -> bytes:
            if not self.parts:
                raise ray.exceptions.ActorDiedError
            return self.parts.pop(0)

        def cancel(self) -> None:
            pass

    async def all_of() -> list[bytes]:
        return [part async for part in rest(Parts(), "/v1/completions", {"Content-Type": "text/event-stream"})]

    *parts, last = asyncio.run(all_of())
    assert parts == [b"data: 1\n\n", b"data: 2\n\n"]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "replica_lost"


def refused(error: Exception, path: str) -> tuple[int, str | None, Any]:
    """Status, retry-after and body of what a client gets where no replica answers."""

    class Parts:
        async def __anext__(self) -> Any:
            raise error

    ingress = object.__new__(Ingress)
    ingress.replicas = SimpleNamespace(forward=SimpleNamespace(remote=lambda forwarded: Parts()))
    ingress.max_body_bytes = 100

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
    response = asyncio.run(ingress(Request({**scope, "server": ("h", 80), "scheme": "http"}, receive)))
    return response.status_code, response.headers.get("retry-after"), json.loads(response.body)


def test_clients_are_told_to_ask_again_when_all_is_full_or_a_replica_is_lost() -> None:
    status, retry_after, body = refused(BackPressureError(num_queued_requests=1, max_queued_requests=1), "/v1/chat/completions")
    assert (status, retry_after, body["error"]["code"]) == (429, "1", "queue_full")
    status, retry_after, body = refused(ReplicaLost("gone"), "/v1/chat/completions")
    assert (status, retry_after, body["error"]["code"]) == (503, "1", "replica_lost")
    status, retry_after, body = refused(ray.exceptions.ActorDiedError(), "/v1/messages")
    assert (status, body["type"], body["error"]["type"]) == (503, "error", "overloaded_error")
    with pytest.raises(ZeroDivisionError):
        refused(ZeroDivisionError(), "/v1/completions")


def test_replicas_come_and_go_with_the_load(client: Any) -> None:
    options = {"pa_memory_mb": 256, "disable_access_log": True, "target_ongoing_requests": 2, "max_replicas": 2}
    serve.run(build_app({**options, "upscale_delay_s": 0, "downscale_delay_s": 1}))

    def replicas() -> int:
        states: dict[str, int] = serve.status().applications["default"].deployments["Replica"].replica_states
        return states.get("RUNNING", 0)

    wait_for("one replica", lambda: replicas() == 1)
    streams = [
        client.completions.create(model="default", prompt="Hi", max_tokens=4000, stream=True, extra_body={"ignore_eos": True})
        for _ in range(12)
    ]
    wait_for("a second replica", lambda: replicas() == 2)
    for stream in streams:
        stream.close()
    wait_for("one replica again", lambda: replicas() == 1)


BATCHES = """
import sys, ray
from mistral_paged.ray import map_batches
ray.init(address=sys.argv[1], log_to_driver=False)
rows = ray.data.from_items([{"id": number, "prompt": f"Number {number} is"} for number in range(60)])
map_batches(rows, sys.argv[2], request={"max_tokens": 16, "temperature": 0}, batch_size=4, pa_memory_mb=128)
"""


def lines_of(folder: Path) -> dict[Path, list[dict[str, Any]]]:
    return {path: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("*.jsonl")}


def test_batches_go_on_where_a_killed_run_stopped(cluster: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BATCHES, cluster, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for("some answers", lambda: len(lines_of(tmp_path)) >= 2 or process.poll() is not None)
        process.kill()
    time.sleep(2)
    before = lines_of(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in before}
    assert 0 < len(before) < 15, "it was to be cut off"
    rows = ray.data.from_items([{"id": number, "prompt": f"Number {number} is"} for number in range(60)])
    options: dict[str, Any] = {"request": {"max_tokens": 16, "temperature": 0}, "pa_memory_mb": 128}
    found = map_batches(rows, tmp_path, batch_size=4, concurrency=2, **options).take_all()
    assert sorted(row["key"] for row in found) == list(range(60))
    assert {path: path.stat().st_mtime_ns for path in before} == times
    assert {row["error"] for row in found} == {""}
    with Runner(which=Which.GGUF(str(default_model())), pa_gpu_mem=128, num_threads=1, max_seqs=4) as runner:
        for row in found[:5]:
            request = CompletionRequest(f"Number {row['key']} is", "default", max_tokens=16, temperature=0)
            response = runner.send_completion_request(request)
            assert (row["text"], row["finish_reason"]) == (response.choices[0].text, response.choices[0].finish_reason)
            assert row["completion_tokens"] == response.usage.completion_tokens
    with pytest.raises(InvalidArgumentError, match=r"has answers with request = .*16.*: name another folder"):
        map_batches(rows, tmp_path, request={"max_tokens": 8}, pa_memory_mb=128)


def test_a_row_that_is_refused_has_an_error_and_others_their_answers(cluster: str, tmp_path: Path) -> None:
    rows = ray.data.from_items(
        [{"name": "long", "ask": [{"role": "user", "content": "x " * 20_000}]}, {"name": "two", "ask": QUESTION}]
    )
    options: dict[str, Any] = {"request": {"max_tokens": 8, "temperature": 0}, "pa_context_len": 512}
    found = {row["key"]: row for row in map_batches(rows, tmp_path, key="name", column="ask", **options).take_all()}
    assert "tokens" in found["long"]["error"]
    assert (found["long"]["text"], found["long"]["finish_reason"]) == ("", "error")
    assert found["two"]["text"]
    assert found["two"]["error"] == ""


BAD_BATCHES: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    ([{"id": 1, "prompt": "a"}, {"id": 1, "prompt": "b"}], {}, "two rows have the key 1"),
    ([{"prompt": "a"}], {}, "the dataset has no column 'id'; it has prompt"),
    ([{"id": 1.5, "prompt": "a"}], {}, "neither a text nor a whole number"),
    ([{"id": 1, "prompt": "a"}], {"port": 80}, "there is no argument `port` of an engine"),
    ([{"id": 1, "prompt": "a"}], {"concurrency": 0}, "`concurrency` is 0"),
    ([{"id": 1, "prompt": "a"}], {"request": {"stream": True}}, "`stream` has no use here"),
]


@pytest.mark.parametrize(("rows", "options", "message"), BAD_BATCHES, ids=[message for *_, message in BAD_BATCHES])
def test_batches_that_cannot_be_are_refused(
    cluster: str, rows: list[dict[str, Any]], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        map_batches(ray.data.from_items(rows), tmp_path, **options)
    assert message in str(error.value)
