"""Some cases of the fuzzer of arguments."""

from __future__ import annotations

import fuzz_arguments


def test_arguments_are_honoured_or_refused_by_name() -> None:
    fuzzer = fuzz_arguments.fuzz(range(3000), seed=1)
    assert not fuzzer.failures
    for kind in ("chat", "completion", "plan", "load", "text"):
        assert len([outcome for outcome in fuzzer.counts if outcome.startswith(kind)]) > 1
