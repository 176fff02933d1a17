"""The production scheduler in virtual time: traces of every form, results, the paper's allocators, pictures."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mistral_paged import InvalidArgumentError, cli, simulate, simulator
from mistral_paged.simulator import DEVICES, SOURCES, Device, SimulationResult, poisson_trace

SHAREGPT = Path(__file__).parent.parent / "examples" / "data" / "sharegpt.csv"
SECOND = Device(step_seconds=1.0, weights_seconds=0.0, token_seconds=0.0, kv_token_seconds=0.0)
ROWS = [(0.5, 9, 4, "a", 8, "x", 0, None), (30.0, 9, 2, "a", 8, "y", 0, 99.0), (31.0, 5, 1, None, None, None, None, None)]


def written(rows: list[tuple[Any, ...]], path: Path, header: tuple[str, ...] = simulator.COLUMNS) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def flat(result: SimulationResult) -> dict[str, Any]:
    """Everything in a result, arrays as bytes."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.tobytes()
        return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value

    return {key: plain(value) for key, value in dataclasses.asdict(result).items()}


def test_results_are_arrays_of_what_happened() -> None:
    result = simulate(ROWS, blocks=8, block_size=4, device=SECOND)
    assert result.time_to_first_token.tolist() == [1.0, 1.0, 1.0]
    assert result.end_time.tolist() == [4.5, 32.0, 32.0]
    assert result.inter_token_latency_mean[:2].tolist() == [1.0, 1.0]
    assert np.isnan(result.inter_token_latency_max[2])
    assert result.output_tokens.tolist() == [4, 2, 1]
    assert result.preemptions.tolist() == [0, 0, 0]
    assert result.cached_tokens.tolist() == [0, 8, 0]
    assert result.finish_reason.tolist() == ["stop", "stop", "stop"]
    assert result.rejected == {}
    assert result.hit_rate == pytest.approx(8 / 23)
    assert result.throughput == pytest.approx(7 / 31.5)
    assert (result.steps, result.seconds) == (6, 31.5)
    assert (result.computed_tokens, result.recomputed_tokens) == (9 + 3 + 1 + 1 + 5, 0)
    assert result.saturated is None
    assert result.overall is not None
    assert result.overall.seconds == 31.5
    timeline = result.timeline
    assert np.array_equal(sum(timeline.memory.values()), np.full(len(timeline.time), 32.0))
    assert timeline.memory["token_states"][0] == 9


def test_every_form_of_a_trace_gives_the_same_result(tmp_path: Path) -> None:
    columns = dict(zip(simulator.COLUMNS, zip(*ROWS, strict=True), strict=True))
    plain = {name: columns[name] for name in simulator.NEEDED}
    records = np.array([row[:3] for row in ROWS], dtype=[("arrival", "f8"), ("prompt_tokens", "i4"), ("output_tokens", "i8")])
    full = [
        ROWS,
        [dict(zip(simulator.COLUMNS, row, strict=True)) for row in ROWS],
        columns,
        written(ROWS, tmp_path / "trace.csv"),
        str(tmp_path / "trace.csv"),
    ]
    short = [
        [row[:3] for row in ROWS],
        plain,
        {name: np.array(values) for name, values in plain.items()},
        np.array([row[:3] for row in ROWS]),
        records,
    ]
    for forms in (full, short):
        results = [flat(simulate(trace, blocks=8, block_size=4, device=SECOND)) for trace in forms]  # type: ignore[arg-type]
        assert all(result == results[0] for result in results)


def test_the_same_trace_gives_the_same_result_bit_for_bit() -> None:
    trace = poisson_trace(SHAREGPT, rate=20, count=300, seed=3)
    assert trace == poisson_trace(SHAREGPT, rate=20, count=300, seed=3)
    assert trace != poisson_trace(SHAREGPT, rate=20, count=300, seed=4)
    assert flat(simulate(trace, blocks=600)) == flat(simulate(trace, blocks=600))


def test_the_timeline_of_a_long_trace_is_short() -> None:
    trace = poisson_trace(SHAREGPT, rate=50, count=2000)
    assert sum(prompt + output for _, prompt, output in trace) > 1_000_000
    result = simulate(trace, blocks=6250, num_intervals=100)
    assert result.steps > 1000
    assert 50 <= len(result.timeline.time) <= 100
    assert np.all(np.diff(result.timeline.time) > 0)
    assert result.timeline.seconds.sum() == pytest.approx(result.seconds)


BAD_ROWS = [
    ((-1.0, 1, 1), "row 1: `arrival` is -1"),
    ((float("nan"), 1, 1), "row 1: `arrival` is NaN"),
    ((0.0, 0, 1), "row 1: `prompt_tokens` is 0"),
    ((0.0, 2.5, 1), "row 1: `prompt_tokens` is 2.5"),
    ((0.0, 1, -3), "row 1: `output_tokens` is -3"),
    ((0.0, 10**18, 1), "row 1: `prompt_tokens` is 1000000000000000000: whole numbers from 1 to 16777216"),
    ((0.0, 10**400, 1), "row 1: `prompt_tokens`"),
    ((0.0, "many", 1), "row 1: `prompt_tokens` is 'many'"),
    ((0.0, None, 1), "row 1: `prompt_tokens` is NaN"),
    ((0.0, 1), "row 1 has no `output_tokens`"),
    ((0.0, 1, 1, "a"), "row 1: `prefix_tokens` is NaN: a prefix needs its length"),
    ((0.0, 1, 1, "a", 3), "row 1: `prefix_tokens` is 3"),
    ((0.0, 1, 1, None, None, 0, 0.5), "row 1: `priority` is 0.5"),
    ((0.0, 1, 1, None, None, 0, 0, -1.0), "row 1: `deadline` is -1"),
    ((0.0,) * 9, "row 1 has 9 values"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS, ids=[message for _, message in BAD_ROWS])
def test_a_bad_row_is_named_with_its_field(row: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        simulate([(0.0, 1, 1), row], blocks=4)
    assert message in str(error.value)


def test_a_bad_csv_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    with pytest.raises(InvalidArgumentError, match="no column `prompt_tokens`; it has arrival, output_tokens"):
        simulate(written([(0, 1)], path, ("arrival", "output_tokens")), blocks=4)
    with pytest.raises(InvalidArgumentError, match="unknown column 'colour'"):
        simulate(written([(0, 1, 1, 1)], path, (*simulator.NEEDED, "colour")), blocks=4)
    with pytest.raises(InvalidArgumentError, match=r"trace\.csv: trace row 1 has not as many cells as the header, which has 3"):
        simulate(written([(0, 1, 1), (0, 1)], path, simulator.NEEDED), blocks=4)
    with pytest.raises(InvalidArgumentError, match="trace row 1: `arrival` is 'soon'"):
        simulate(written([(0, 1, 1), ("soon", 1, 1)], path, simulator.NEEDED), blocks=4)
    with pytest.raises(InvalidArgumentError, match="has no column 'output_tokens'"):
        poisson_trace(written([(1,)], path, ("prompt_tokens",)), rate=1, count=1)
    with pytest.raises(InvalidArgumentError, match="has two columns 'arrival'"):
        simulate(written([(0, 1, 1, 5)], path, (*simulator.NEEDED, "arrival")), blocks=4)
    path.write_bytes(b"\xff\xfe")
    for read in (lambda: simulate(path, blocks=4), lambda: poisson_trace(path, rate=1, count=1)):
        with pytest.raises(InvalidArgumentError, match=r"trace\.csv is not a CSV file in UTF-8"):
            read()
    with pytest.raises(FileNotFoundError):
        simulate(tmp_path / "none.csv", blocks=4)


def test_a_csv_file_of_a_spreadsheet_begins_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = written([(0, 1, 1)], tmp_path / "trace.csv", simulator.NEEDED)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert simulate(path, blocks=4).finish_reason.tolist() == ["stop"]


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"blocks": 0}, "`blocks`"),
    ({"blocks": 10**30}, "`blocks`"),
    ({"block_size": 0}, "`block_size`"),
    ({"device": "abacus"}, "llama-8b-h200"),
    ({"device": Device(0.0, 1.0, 1.0, 1.0)}, "`step_seconds`"),
    ({"device": Device(1.0, 1.0, 1.0, float("nan"))}, "`kv_token_seconds`"),
    ({"policy": "greedy"}, "watermark or reserved or optimistic"),
    ({"policy": ["reserved", "optimistic"]}, 'is "reserved" already'),
    ({"policy": "drr", "allocator": "oracle"}, "only the paged allocator has policies"),
    ({"allocator": "heap"}, "paged, max, pow2, oracle"),
    ({"allocator": "max"}, "`max_model_len`"),
    ({"allocator": "oracle", "windows": [4]}, "`windows`"),
    ({"max_num_seqs": 0}, "`max_num_seqs`"),
    ({"max_num_batched_tokens": -1}, "`max_num_batched_tokens`"),
    ({"max_model_len": 1}, "`max_model_len`"),
    ({"windows": [0]}, "`windows`"),
    ({"num_intervals": 1}, "`num_intervals`"),
    ({"replicas": 0}, "`replicas`"),
    ({"replicas": 5000}, "`replicas` is 5000: from 1 to 4096 work"),
    ({"router": "random"}, "round_robin, least_loaded, prefix"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=[str(arguments) for arguments, _ in BAD_ARGUMENTS])
def test_a_bad_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        simulate([(0.0, 1, 1)], **{"blocks": 4, **arguments})


@pytest.mark.parametrize(
    ("name", "value"),
    [("blocks", 1.5), ("policy", 3), ("device", (1.0, 2.0)), ("windows", 7), ("prefix_caching", 1), ("max_model_len", "8")],
)
def test_an_argument_of_another_type_is_named(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"`{name}` must be .*, got {re.escape(repr(value))}"):
        simulate([(0.0, 1, 1)], **{"blocks": 4, name: value})


def test_a_request_that_never_fits_is_rejected_in_the_result_or_raised_if_asked() -> None:
    trace = [(0.0, 8, 1), (0.0, 100, 1)]
    result = simulate(trace, blocks=4, block_size=4)
    assert result.finish_reason.tolist() == ["stop", "rejected"]
    assert "100 tokens need 25 KV blocks" in result.rejected[1]
    assert np.isnan(result.time_to_first_token[1])
    with pytest.raises(InvalidArgumentError, match=r"trace row 1 can never be served.*100 tokens need 25 KV blocks"):
        simulate(trace, blocks=4, block_size=4, strict=True)


def test_policies_deadlines_and_tenants_reach_the_scheduler() -> None:
    rows = [{"arrival": 0.0, "prompt_tokens": 256, "output_tokens": 1, "tenant": tenant} for tenant in ["a"] * 8 + ["b"]]

    def last_end(policy: str) -> float:
        result = simulate(rows, blocks=256, device=SECOND, max_num_batched_tokens=256, policy=policy)
        return float(result.end_time[-1])

    assert last_end("fcfs") == 9.0
    assert last_end("drr") <= 3.0
    urgent = simulate([(0, 9, 9, None, None, None, 0, 4.5), (0, 9, 9)], blocks=64, device=SECOND)
    assert urgent.finish_reason.tolist() == ["deadline", "stop"]
    assert urgent.output_tokens.tolist() == [5, 9]
    crowd = [(0.1 * row, 8, 24) for row in range(12)]
    reserved, optimistic = (
        simulate(crowd, blocks=24, block_size=4, device=SECOND, policy=name) for name in ("reserved", "optimistic")
    )
    assert reserved.preemptions.sum() == 0
    assert optimistic.preemptions.sum() > 0
    assert optimistic.recomputed_tokens > 0


def test_an_empty_trace_is_simulated() -> None:
    result = simulate([], blocks=4)
    assert (len(result.end_time), result.steps, result.overall) == (0, 0, None)
    assert np.isnan(result.throughput)


def test_a_window_holds_less_than_the_whole_context() -> None:
    def most(windows: list[int | None]) -> float:
        result = simulate([(0.0, 400, 50)], blocks=200, block_size=4, device=SECOND, windows=windows, prefix_caching=False)
        return float(result.timeline.memory["token_states"][-1])

    assert most([]) == 449
    assert most([None, None]) == 449
    assert 16 <= most([16, 16]) < 24
    assert 449 + 16 <= most([16, None]) < 449 + 24


def conversations(number: int, turns: int) -> list[tuple[Any, ...]]:
    """Turns of conversations, each behind all of the one before it."""
    return [
        (turn * 100 + 0.1 * name, 400 * turn + 300, 100, f"c{name}", 400 * (turn + 1))
        for turn in range(turns)
        for name in range(number)
    ]


def test_replicas_are_reported_one_by_one_and_together() -> None:
    trace = conversations(10, 4)[::-1]
    alone = simulate(trace, blocks=2000)
    assert alone.replicas == ()
    assert set(alone.replica) == {0}
    results = {
        name: simulate(trace, blocks=2000, replicas=4, router=name, num_intervals=50) for name in ("prefix", "round_robin")
    }
    assert results["prefix"].hit_rate == pytest.approx(alone.hit_rate)
    assert results["round_robin"].hit_rate < 0.5 * alone.hit_rate
    for result in results.values():
        assert len(result.replicas) == 4
        assert (result.finish_reason == "stop").all()
        assert result.output_tokens.sum() == sum(one.output_tokens.sum() for one in result.replicas) == 40 * 100
        assert result.computed_tokens == sum(one.computed_tokens for one in result.replicas)
        assert result.steps == sum(one.steps for one in result.replicas)
        assert result.seconds == max(one.seconds for one in result.replicas)
        for number, one in enumerate(result.replicas):
            rows = [row for row in range(len(trace)) if result.replica[row] == number]
            assert sorted(one.end_time) == sorted(result.end_time[rows])
        timeline = result.timeline
        assert 1 < len(timeline.time) <= 50
        assert sum(timeline.memory.values()) == pytest.approx(np.full(len(timeline.time), 4 * 2000 * 16))
        busy = sum((one.timeline.running * one.timeline.seconds).sum() for one in result.replicas)
        assert (timeline.running * timeline.seconds).sum() == pytest.approx(busy)
        assert result.overall is not None
        assert result.overall.running == pytest.approx(busy / result.seconds)
        each = (result.end_time - [row[0] for row in trace]) / 100
        assert result.normalized_latency == pytest.approx(each.mean())
    # Rows that are rejected are those of the trace, wherever they went.
    late = simulate([(5.0, 4, 1), (0.0, 4, 1), (2.0, 400, 1)], blocks=4, replicas=2)
    assert list(late.rejected) == [2]
    assert late.replica.tolist() == [0, 0, 1]
    assert list(late.replicas[1].rejected) == [0]
    idle = simulate([(0.0, 4, 1)], blocks=4, replicas=3)
    assert sum(idle.timeline.memory.values()) == pytest.approx(3 * 4 * 16)
    assert np.isnan(idle.replicas[2].throughput)


def test_the_command_prints_what_the_function_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(conversations(10, 4), tmp_path / "trace.csv", simulator.COLUMNS[:5])
    words = ["simulate", str(path), "--blocks", "2000", "--replicas", "4", "--router", "prefix"]
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    result = simulate(path, blocks=2000, replicas=4, router="prefix")
    assert (found["hit_rate"], found["steps"], found["tokens_per_second"]) == (result.hit_rate, result.steps, result.throughput)
    assert [one["requests"] for one in found["replicas"]] == [len(one.end_time) for one in result.replicas]
    assert cli.main(words) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + 1 + 4
    assert table[1].split()[:2] == ["all", "40"]
    assert cli.main(["simulate", str(path), "--blocks", "2000", "--device", "abacus"]) == 1
    assert "llama-8b-h200" in capsys.readouterr().err


def test_devices_have_sources() -> None:
    assert set(DEVICES) == set(SOURCES) == {"smollm2-135m-cpu", "opt-13b-a100", "llama-8b-h200"}
    assert all(min(times) > 0 for times in DEVICES.values())
    slow, fast = (simulate([(0.0, 100, 10)], blocks=64, device=name).seconds for name in ("smollm2-135m-cpu", "llama-8b-h200"))
    assert slow > 1.5 * fast
    assert simulate([(0.0, 100, 10)], blocks=64, device=DEVICES["llama-8b-h200"]).seconds == fast


def share(result: SimulationResult, kind: str) -> float:
    assert result.saturated is not None
    return result.saturated.memory[kind] / sum(result.saturated.memory.values())


@pytest.mark.parametrize("seed", [0, 1])
def test_the_allocators_of_the_paper_are_reproduced(seed: int) -> None:
    trace = poisson_trace(SHAREGPT, rate=50, count=4000, seed=seed)
    # The paper's engine preempts whoever came last.
    policies = {"paged": ("fcfs", "newest"), "max": (), "pow2": (), "oracle": ()}
    results = {
        name: simulate(
            trace, blocks=6250, allocator=name, policy=policy, max_num_seqs=512, max_model_len=4096, prefix_caching=False
        )
        for name, policy in policies.items()
    }
    assert all((result.finish_reason == "stop").all() for result in results.values())
    states = {name: share(result, "token_states") for name, result in results.items()}
    assert states["paged"] >= 0.96
    assert states["max"] <= 0.25
    assert states["max"] < states["pow2"] < states["oracle"] < 0.5
    assert share(results["paged"], "external") == 0.0
    assert share(results["oracle"], "internal") == 0.0
    running = {name: result.saturated.running for name, result in results.items() if result.saturated}
    assert running["paged"] >= 2 * running["oracle"]
    # Four contiguous contexts of 4,096 tokens fit into 16,384 of them: 24 into 100,000.
    assert running["max"] == pytest.approx(24, abs=0.1)


def test_importing_the_package_does_not_import_numpy() -> None:
    imported = "import sys, mistral_paged as m; assert 'numpy' not in sys.modules"
    used = "m.simulate([], blocks=1); assert 'numpy' in sys.modules"
    subprocess.run([sys.executable, "-c", f"{imported}; {used}"], check=True, timeout=60)


@pytest.mark.parametrize("trace", [ROWS, []], ids=["some", "none"])
def test_plot_writes_a_picture(trace: list[tuple[Any, ...]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need `pip install mistral-paged[plot]`")
    simulator.plot(simulate(trace, blocks=8, block_size=4), tmp_path / "simulation.png")
    assert (tmp_path / "simulation.png").read_bytes().startswith(b"\x89PNG")


def test_every_label_of_latencies_is_in_seconds(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need `pip install mistral-paged[plot]`")
    device = Device(step_seconds=0.01, weights_seconds=0.0, token_seconds=0.001, kv_token_seconds=0.0)
    simulator.plot(simulate([(0.0, 20, 20)], blocks=8, device=device), tmp_path / "simulation.svg")
    drawn = (tmp_path / "simulation.svg").read_text()
    assert "<!-- 20 ms -->" in drawn
    assert "mathdefault" not in drawn


BAD_LENGTHS: list[tuple[Callable[[], object], str]] = [
    (lambda: poisson_trace([], rate=1, count=1), "`lengths` is empty"),
    (lambda: poisson_trace([(1, 1)], rate=0, count=1), "`rate`"),
    (lambda: poisson_trace([(1, 1)], rate=1, count=-1), "`count`"),
]


@pytest.mark.parametrize(("draw", "message"), BAD_LENGTHS, ids=[message for _, message in BAD_LENGTHS])
def test_a_trace_that_cannot_be_drawn(draw: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        draw()
