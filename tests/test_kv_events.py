"""What routers are told of the prefix cache: over pyzmq, decoded into the types that vLLM's subscribers have."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from conftest import GOLDEN, complete, text_model
from test_server import COMMAND, MODEL, Server, serving

from mistral_paged import AddressError, LoraAdapter, ModelDType, Runner, Which

BLOCK = 8
PROMPT = list(range(10, 74))
PATIENCE = 20.0
END = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(Batch).decode


class Consumer:
    """Knows what is held by events alone."""

    def __init__(self, stats: dict[str, Any], topic: str = "") -> None:
        self.context = zmq.Context()
        self.subscriber = self.context.socket(zmq.SUB)
        self.subscriber.connect(stats["address"])
        self.subscriber.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.replays = self.context.socket(zmq.DEALER)
        self.replays.connect(stats["replay_address"])
        self.held: dict[tuple[int, int | None], list[int]] = {}
        self.events: list[Event] = []
        self.next = 0

    def close(self) -> None:
        self.context.destroy(linger=0)

    def apply(self, number: int, payload: bytes) -> None:
        if number < self.next:
            return
        self.next = number + 1
        batch = decode(payload)
        assert abs(batch.ts - time.time()) < 600
        assert batch.data_parallel_rank == 0
        self.events += batch.events
        for event in batch.events:
            if isinstance(event, BlockStored):
                size = event.block_size
                assert len(event.token_ids) == size * len(event.block_hashes)
                assert event.extra_keys is not None
                assert len(event.extra_keys) == len(event.block_hashes)
                for place, block in enumerate(event.block_hashes):
                    assert (block, event.group_idx) not in self.held
                    self.held[block, event.group_idx] = event.token_ids[place * size : (place + 1) * size]
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    del self.held[block, event.group_idx]
            else:
                self.held.clear()

    def replay(self, start: int) -> int:
        """Asks for all batches from a number on, and how many came."""
        self.replays.send_multipart([b"", start.to_bytes(8, "big")])
        for count in range(1_000_000):
            assert self.replays.poll(PATIENCE * 1000), "no answer to a request for a replay"
            delimiter, number, payload = self.replays.recv_multipart()
            assert delimiter == b""
            if number == END:
                assert payload == b""
                return count
            self.apply(int.from_bytes(number, "big"), payload)
        raise AssertionError("a replay without an end")

    def listen(self, seconds: float) -> None:
        """Takes what comes for a while, after what was missed before it."""
        while self.subscriber.poll(seconds * 1000):
            _, number, payload = self.subscriber.recv_multipart()
            at = int.from_bytes(number, "big")
            if at > self.next:
                self.replay(self.next)
            self.apply(at, payload)

    def follow(self, runner: Runner) -> None:
        """Listens until as much is held as the runner says; what was published before it was a subscriber is replayed."""
        until = time.monotonic() + PATIENCE
        self.replay(self.next)
        while len(self.held) != runner.kv_cache_stats()["kv_event_blocks"]:
            assert time.monotonic() < until, (len(self.held), runner.kv_cache_stats()["kv_event_blocks"])
            self.listen(0.1)
            self.replay(self.next)


def tiny(name: str = "llama", **options: Any) -> Runner:
    options = {"pa_ctxt_len": 400, "pa_blk_size": BLOCK, "num_threads": 1, **options}
    return Runner(which=text_model(name), kv_events="tcp://127.0.0.1:0", kv_events_replay="tcp://127.0.0.1:0", **options)


@contextmanager
def consuming(runner: Runner, topic: str = "") -> Iterator[Consumer]:
    stats = runner.kv_events_stats()
    assert stats is not None
    consumer = Consumer(stats, topic)
    try:
        yield consumer
    finally:
        consumer.close()


def stored(consumer: Consumer) -> list[BlockStored]:
    return [event for event in consumer.events if isinstance(event, BlockStored)]


def test_a_prompt_is_told_of_as_vllm_tells_it() -> None:
    with tiny(kv_events_topic="kv-events") as runner, consuming(runner, "kv-events") as consumer:
        complete(runner, PROMPT, max_tokens=1)
        consumer.follow(runner)
        assert isinstance(consumer.events[0], AllBlocksCleared)
        (event,) = stored(consumer)
        assert event.token_ids == PROMPT
        assert (event.parent_block_hash, event.block_size, event.group_idx) == (None, BLOCK, 0)
        assert (event.lora_id, event.lora_name, event.medium) == (None, None, "GPU")
        assert event.extra_keys == [None] * 8
        assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == ("full_attention", None)
        complete(runner, [*PROMPT, *PROMPT[:BLOCK]], max_tokens=1)
        consumer.follow(runner)
        assert stored(consumer)[1].parent_block_hash == event.block_hashes[-1]
        assert stored(consumer)[1].token_ids == PROMPT[:BLOCK]


def test_groups_are_told_apart() -> None:
    with tiny("gemma3") as runner, consuming(runner) as consumer:
        complete(runner, PROMPT, max_tokens=1)
        consumer.follow(runner)
        kinds = {event.group_idx: (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) for event in stored(consumer)}
        assert len(kinds) > 1
        assert ("full_attention", None) in kinds.values()
        assert all(window for kind, window in kinds.values() if kind == "sliding_window")
        assert {kind for kind, _ in kinds.values()} == {"full_attention", "sliding_window"}


def test_a_consumer_holds_what_the_pool_holds_after_evictions_and_a_late_one_after_a_replay() -> None:
    with tiny(pa_ctxt_len=160) as runner, consuming(runner) as consumer:
        for turn in range(40):
            complete(runner, [(turn * 7 + place) % 400 + 10 for place in range(20 + turn * 3 % 60)], max_tokens=4)
        consumer.follow(runner)
        assert any(isinstance(event, BlockRemoved) for event in consumer.events)
        stats = runner.kv_events_stats()
        assert stats is not None
        assert (stats["subscribers"], stats["dropped_batches"], stats["subscriber_dropped_batches"]) == (1, 0, 0)
        assert stats["batches"] >= consumer.next > 0
        with consuming(runner) as late:
            assert late.replay(0) == consumer.next
            assert late.held == consumer.held


def test_replicas_call_blocks_alike_and_salts_and_adapters_part_them() -> None:
    def told(**request: Any) -> list[BlockStored]:
        with tiny() as runner, consuming(runner) as consumer:
            complete(runner, PROMPT, max_tokens=1, **request)
            consumer.follow(runner)
            return stored(consumer)

    (one,), (other,), (salted,) = told(), told(), told(cache_salt="tenant")
    assert one.block_hashes == other.block_hashes
    assert not set(salted.block_hashes) & set(one.block_hashes)
    assert salted.extra_keys == [("tenant",), *[None] * 7]


def test_an_adapter_is_told_by_its_name() -> None:
    adapters = [LoraAdapter("sql", str(GOLDEN / "lora" / "llama-attn"))]
    which = Which.Lora(MODEL, adapters, dtype=ModelDType.F32)
    options = {"kv_events": "tcp://127.0.0.1:0", "kv_events_replay": "tcp://127.0.0.1:0", "pa_blk_size": BLOCK}
    with Runner(which=which, pa_ctxt_len=400, num_threads=1, **options) as runner, consuming(runner) as consumer:
        complete(runner, PROMPT, max_tokens=1, adapter="sql")
        consumer.follow(runner)
        (event,) = stored(consumer)
        assert event.lora_name == "sql"
        assert event.extra_keys == [("sql",)] * 8


def test_weights_that_are_quantized_anew_clear_all_and_name_blocks_otherwise() -> None:
    with tiny() as runner, consuming(runner) as consumer:
        complete(runner, list(range(40, 80)), max_tokens=1)
        consumer.follow(runner)
        before = set(consumer.held)
        assert before
        runner.send_re_isq("8")
        assert runner.kv_cache_stats()["kv_event_blocks"] == 0
        consumer.follow(runner)
        complete(runner, list(range(40, 80)), max_tokens=1)
        consumer.follow(runner)
        assert len(consumer.held) == len(before)
        assert not before & set(consumer.held)
    with tiny(in_situ_quant="8") as fresh, consuming(fresh) as other:
        complete(fresh, list(range(40, 80)), max_tokens=1)
        other.follow(fresh)
        assert set(other.held) == set(consumer.held), "a replica that was loaded so calls them alike"


def test_an_unloaded_model_tells_that_nothing_is_held_and_listens_there_again_when_it_is_reloaded() -> None:
    port = free_ports()
    address, replay = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"
    options = {"pa_ctxt_len": 400, "pa_blk_size": BLOCK, "num_threads": 1}
    with Runner(which=text_model("llama"), kv_events=address, kv_events_replay=replay, **options) as runner:
        with consuming(runner) as consumer:
            complete(runner, PROMPT, max_tokens=1)
            consumer.follow(runner)
            assert consumer.held
            # A subscriber hears of nothing that was published before it was one.
            until, start = time.monotonic() + PATIENCE, 100
            while not consumer.subscriber.poll(20) and time.monotonic() < until:
                complete(runner, list(range(start, start + BLOCK)), max_tokens=1)
                start += BLOCK
            runner.unload_model()
            while consumer.held and time.monotonic() < until:
                consumer.listen(0.5)
            assert not consumer.held
        runner.reload_model()
        with consuming(runner) as consumer:
            complete(runner, PROMPT[:BLOCK], max_tokens=1)
            consumer.follow(runner)
            assert isinstance(consumer.events[0], AllBlocksCleared)
            assert list(consumer.held.values()) == [PROMPT[:BLOCK]]


def test_addresses_that_cannot_be_had_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(AddressError, match=r'kv_events is "5557"; it must be tcp://HOST:PORT'):
        Runner(which=text_model("llama"), kv_events="5557")
    with tiny() as runner:
        stats = runner.kv_events_stats()
        assert stats is not None
        taken = stats["address"]
        with pytest.raises(AddressError, match=f"kv_events: cannot listen on {taken}"):
            Runner(which=text_model("llama"), kv_events=taken)
        command = [str(COMMAND), "serve", "-m", MODEL, "--port", "0", "--kv-events", taken]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert f"kv_events: cannot listen on {taken}" in done.stderr


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kv_events_replay": "tcp://127.0.0.1:0"}, ValueError, "`kv_events_replay` goes with `kv_events`"),
        ({"kv_events_topic": "x"}, ValueError, "`kv_events_topic` goes with `kv_events`"),
        ({"kv_events": "tcp://127.0.0.1:0", "prefix_cache_n": 0}, ValueError, "which prefix_cache_n=0 turns off"),
        ({"kv_events": "tcp://127.0.0.1:0", "no_kv_cache": True}, ValueError, "which no_kv_cache=True turns off"),
    ],
)
def test_what_cannot_be_told_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Runner(which=text_model("llama"), **options)


def test_nothing_is_told_unless_asked_for() -> None:
    with Runner(which=text_model("llama"), pa_ctxt_len=400, num_threads=1) as runner:
        complete(runner, PROMPT, max_tokens=1)
        assert runner.kv_events_stats() is None
        assert runner.kv_cache_stats()["kv_event_blocks"] == 0


def test_metrics_count_and_replicas_with_one_secret_salt_alike(tmp_path: Path) -> None:
    keys, secret = tmp_path / "keys.toml", tmp_path / "secret"
    keys.write_text('[[keys]]\nkey = "k"\ntenant = "one"\n')
    secret.write_bytes(bytes(range(32)))
    options = ["--api-keys", str(keys), "--cache-salt-secret", str(secret), "--disable-access-log", "--kv-events"]

    def counts(server: Server) -> tuple[float, float]:
        """Batches, 2 at most, and subscribers."""
        return (
            min(server.metric("mistralrs_kv_event_batches_total"), 2),
            server.metric("mistralrs_kv_event_subscribers"),
        )

    def hashes(port: int) -> set[int]:
        address = f"tcp://127.0.0.1:{port}"
        replay = f"tcp://127.0.0.1:{port + 1}"
        with serving(*options, address, "--kv-events-replay", replay, "--pa-block-size", "8") as server:
            consumer = Consumer({"address": address, "replay_address": replay})
            try:
                server.headers["Authorization"] = "Bearer k"
                reply = server.complete(prompt=PROMPT, max_tokens=1)
                assert reply.status == 200, reply.body
                until = time.monotonic() + PATIENCE
                while not consumer.held and time.monotonic() < until:
                    consumer.replay(0)
                # A batch that can be asked for again may not be counted yet.
                while (found := counts(server)) != (2, 1) and time.monotonic() < until:
                    time.sleep(0.02)
                assert found == (2, 1)
                assert server.metric("mistralrs_kv_event_batches_dropped_total", at="publisher") == 0
            finally:
                consumer.close()
            (event,) = stored(consumer)
            assert event.extra_keys is not None
            (salt,) = event.extra_keys[0] or ()
            assert salt.startswith("tenant-")
            return set(event.block_hashes)

    assert hashes(free_ports()) == hashes(free_ports())


def free_ports() -> int:
    """The first of two ports in a row that are free now."""
    import socket

    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            try:
                two.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def test_a_secret_that_is_short_or_of_no_use_is_refused(tmp_path: Path) -> None:
    keys, secret = tmp_path / "keys.toml", tmp_path / "secret"
    keys.write_text('[[keys]]\nkey = "k"\ntenant = "one"\n')
    secret.write_bytes(b"short")
    for arguments, message in (
        (["--api-keys", str(keys)], "it has 5 bytes"),
        ([], "no API key has a tenant"),
    ):
        # There is no such model: the secret is named before it is looked for.
        command = [str(COMMAND), "serve", "-m", "/no-such-model", "--cache-salt-secret", str(secret), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert message in done.stderr
        assert "no-such-model" not in done.stderr


SUBSCRIBER = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.connect(sys.argv[1])
socket.setsockopt(zmq.SUBSCRIBE, b"")
socket.setsockopt(zmq.HEARTBEAT_IVL, 100)
print(len(socket.recv_multipart()), flush=True)
sys.stdin.read()
"""


def test_a_subscriber_that_dies_is_forgotten() -> None:
    with tiny() as runner:
        stats = runner.kv_events_stats()
        assert stats is not None
        command = [sys.executable, "-c", SUBSCRIBER, stats["address"]]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            until = time.monotonic() + PATIENCE
            while (runner.kv_events_stats() or {})["subscribers"] == 0:
                assert time.monotonic() < until
            # The connection is there; the subscription may still be on its way.
            for turn in range(200):
                complete(runner, [turn % 100 + 10] * 16, max_tokens=1)
            assert process.stdout.readline() == "3\n"
            time.sleep(0.5)
            assert (runner.kv_events_stats() or {})["subscribers"] == 1, "heartbeats are answered"
            process.kill()
        while (runner.kv_events_stats() or {})["subscribers"]:
            assert time.monotonic() < until
            complete(runner, PROMPT, max_tokens=1)
