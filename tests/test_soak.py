"""The shortest soak: one turn of each configuration."""

from __future__ import annotations

import soak


def test_a_round_of_random_operations_gives_what_each_request_gives_alone() -> None:
    report = soak.soak(minutes=0, seed=0, turn_seconds=0.25)
    assert not report.failures
    assert report.operations["send"] > 20
    assert report.tokens > 1000


def test_any_bit_that_differs_is_reported() -> None:
    case = soak.Case((5, 6), ())
    whole = b"".join(bytes([token] * 12) for token in range(4))

    def wrong(reason: str, tokens: bytes, pool_is_small: bool = False) -> bool:
        return soak.difference(soak.Got(case, ((reason, tokens),), "send"), (("length", whole),), pool_is_small) is not None

    assert not wrong("length", whole)
    assert not wrong("canceled", whole[:24])
    assert not wrong("length", whole[:24], pool_is_small=True)
    assert wrong("length", whole[:24])
    assert wrong("stop", whole)
    assert wrong("canceled", whole[:23] + b"x")
    assert wrong("timeout", whole + b"x" * 12)
