"""`mistral-paged bench`: rows as llama-bench has them."""

from __future__ import annotations

import json
import re

import pytest
from conftest import GOLDEN, runner_of

from mistral_paged import CompletionRequest, Runner, bench, cli, flags

MODEL = str(GOLDEN / "text" / "llama")
SMALL = ["--prompt-len", "16,48", "--gen-len", "8", "--depth", "4,32", "--iterations", "2", "--num-threads", "1"]


def test_a_table_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "-m", MODEL, "--pa-memory-mb", "16", *SMALL]) == 0
    head, line, *rows = capsys.readouterr().out.splitlines()
    assert head == "| model | size | backend | threads | test | t/s |"
    assert line == "| --- | ---: | --- | ---: | ---: | ---: |"
    assert [row.split("|")[5].strip() for row in rows] == ["pp16", "pp48", "tg8 @ d4", "tg8 @ d32"]
    assert all(re.fullmatch(r"\| llama \| [\d.]+ MiB \| CPU \| 1 \| [^|]+ \| [\d.]+ ± [\d.]+ \|", row) for row in rows)


def test_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "-m", MODEL, "--pa-memory-mb", "16", "--json", *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["threads"] == 1
    assert [len(row["tokens_per_second"]) for row in found["rows"]] == [2, 2, 2, 2]
    for row in found["rows"]:
        assert row["mean"] == pytest.approx(sum(row["tokens_per_second"]) / 2)
        assert row["mean"] > 0


class Recorder:
    """A runner that remembers what it is asked."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.asked: list[CompletionRequest] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.runner, name)

    def send_completion_request(self, request: CompletionRequest) -> object:
        self.asked.append(request)
        return self.runner.send_completion_request(request)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(runner_of("text", "llama"))


def test_requests_have_the_lengths_asked_for_and_run_past_the_end(recorder: Recorder) -> None:
    options = cli.build_parser().parse_args(["bench", *SMALL, "--warmup", "1"])
    assert len(list(bench.rows(recorder, options))) == 4
    shapes = [(len(request.prompt), request.max_tokens) for request in recorder.asked]
    assert shapes == [shape for shape in ((16, 1), (48, 1), (4, 9), (32, 9)) for _ in range(3)]
    assert all(request.ignore_eos and request.temperature == 0 for request in recorder.asked)


def test_the_rate_is_of_the_engines_own_times(recorder: Recorder) -> None:
    usage = bench.measure(recorder, bench.Test("tg", 0, 8, 4), [5])
    assert 0 < usage < 1e7
    text = list(range(10, 20))
    bench.measure(recorder, bench.Test("pp", 25, 0, 0), text)
    assert recorder.asked[-1].prompt == (text * 3)[:25]


def test_a_context_that_is_too_short_is_an_error_and_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "-m", MODEL, "--pa-context-len", "64", "--prompt-len", "0", "--gen-len", "400", "--warmup", "0"]
    assert cli.main(arguments) == 1
    assert "tg400 @ d4 ended after" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-len", "-1"], "--prompt-len is -1; it must be 0 or more"),
        (["--depth", "0"], "--depth is 0 and --iterations 3; they must be 1 or more"),
        (["--iterations", "0"], "--depth is 4 and --iterations 0; they must be 1 or more"),
        (["--prompt-len", "0", "--gen-len", "0"], "there is nothing to measure; give --prompt-len or --gen-len"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_model_is_loaded(arguments: list[str], message: str) -> None:
    with pytest.raises(flags.Usage, match=message):
        bench.tests(cli.build_parser().parse_args(["bench", "-m", "/no/such", *arguments]))


def test_a_prefix_cache_cannot_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "--prefix-cache-n", "1"])
    assert "'--prefix-cache-n <N>' has no use here" in capsys.readouterr().err
    assert cli.build_parser().parse_args(["bench"]).prefix_cache_n == 0
