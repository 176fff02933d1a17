"""Small models with random configurations and weights: this engine in F32 against the software that others run them with.

    python tests/random_models --kind text,adapters --cases 10 --seed 0 --family llama

A case is a function of its kind, its family and its seed; seeds go up from `--seed`. A line for each kind and family says how
many agreed and the largest difference of those. The exit status is 1 if anything disagreed, if a model was refused that the
reference takes and `refusals.py` does not list, if a case could not be made or run, or if nothing was compared.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType

from common import Case, Comparison, NotTakenError, quiet
from goldens import unpack
from refusals import is_documented

from mistral_paged import MistralPagedError

KINDS = ("text", "images", "sounds", "adapters", "embeddings", "encoders", "quantized")


class Verdict(Enum):
    """What became of a case, in the words that are printed."""

    AGREED = "agreed"
    SENSITIVE = "as sensitive as the difference"
    DOCUMENTED = "refused as documented"
    DISAGREED = "disagreed"
    REFUSED = "refused"
    NOT_TAKEN = "not taken by the reference"
    FAILED = "failed"


BAD = {Verdict.DISAGREED, Verdict.REFUSED, Verdict.NOT_TAKEN, Verdict.FAILED}
COMPARED = {Verdict.AGREED, Verdict.SENSITIVE, Verdict.DISAGREED}


@dataclass
class Outcome:
    """A verdict, and what is to be said of it."""

    verdict: Verdict
    difference: float = 0.0
    message: str = ""


def judged(found: Comparison) -> Outcome:
    """What a comparison means."""
    if found.agrees:
        return Outcome(Verdict.AGREED, found.difference)
    verdict = Verdict.SENSITIVE if found.is_sensitive else Verdict.DISAGREED
    message = f"by {found.difference:.3g}; rounding moves the reference by {found.in_float64:.3g}"
    return Outcome(verdict, found.difference, message)


def outcome_of(compare: Callable[[Case], Comparison], case: Case) -> Outcome:
    """Runs a case. An exception is a verdict as well."""
    try:
        return judged(compare(case))
    except NotTakenError as error:
        return Outcome(Verdict.NOT_TAKEN, message=str(error))
    except MistralPagedError as error:
        documented = is_documented(case.kind, str(error), case.configuration)
        return Outcome(Verdict.DOCUMENTED if documented else Verdict.REFUSED, message=str(error))
    except Exception as error:
        return Outcome(Verdict.FAILED, message=f"{type(error).__name__}: {error}")


def report_bad(case: Case, outcome: Outcome) -> None:
    """Says how to have the case again."""
    again = f"--kind {case.kind} --family {case.family} --seed {case.seed} --cases 1"
    print(f"{case.kind} {case.family} seed {case.seed} {outcome.verdict.value}: {outcome.message}")
    print(f"    python tests/random_models {again}")
    print(f"    {json.dumps(case.configuration)}", flush=True)


def run_family(kind: str, subject: ModuleType, family: str, seeds: Sequence[int]) -> Counter[Verdict]:
    """All cases of a family, and the line about them."""
    counts: Counter[Verdict] = Counter()
    largest = 0.0
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            case = Case(kind, family, seed, Path(folder))
            outcome = outcome_of(subject.compare, case)
        counts[outcome.verdict] += 1
        if outcome.verdict is Verdict.AGREED:
            largest = max(largest, outcome.difference)
        elif outcome.verdict in BAD:
            report_bad(case, outcome)
    others = "".join(
        f", {counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict] and verdict is not Verdict.AGREED
    )
    print(
        f"{kind} {family}: {counts[Verdict.AGREED]} of {len(seeds)} agreed, largest difference {largest:.2g}{others}", flush=True
    )
    return counts


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="random_models", description=__doc__.splitlines()[0])
    parser.add_argument("--kind", default=",".join(KINDS), help="some of these, with commas between (default: %(default)s)")
    parser.add_argument("--cases", type=int, default=10, help="of each family (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case (default: %(default)s)")
    parser.add_argument("--family", help="only this one")
    arguments = parser.parse_args()
    arguments.kinds = arguments.kind.split(",")
    if unknown := set(arguments.kinds) - set(KINDS):
        parser.error(f"no such kind: {', '.join(sorted(unknown))}")
    return arguments


def main() -> int:
    """Runs what was asked for, and returns the exit status."""
    arguments = parse_arguments()
    quiet()
    unpack()
    seeds = range(arguments.seed, arguments.seed + arguments.cases)
    counts: Counter[Verdict] = Counter()
    for kind in arguments.kinds:
        # Only now, for each needs other packages.
        subject = importlib.import_module(kind)
        for family in subject.families():
            if arguments.family in (None, family):
                counts += run_family(kind, subject, family, seeds)
    compared = sum(counts[verdict] for verdict in COMPARED)
    bad = sum(counts[verdict] for verdict in BAD)
    print(f"{compared} compared, {bad} bad")
    return 1 if bad or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
