"""Compares the kernels in the fatbins of kernels/built, for each target, with kernels/manifest.txt, from which they are launched.

`python3 kernels/symbols.py` fails with the names of those that only one side has. `--targets` is that of compiler.py.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import compiler

MANIFEST = compiler.KERNELS / "manifest.txt"


def entry_points(fatbin: Path) -> Iterator[tuple[str, str]]:
    """(target, kernel) for all machine code in a file, as cuobjdump reads it."""
    target = ""
    for line in compiler.run([str(compiler.find_tool("cuobjdump")), "-symbols", str(fatbin)]).splitlines():
        if found := re.match(r"arch = (\w+)", line):
            target = found[1]
        elif found := re.match(r"STT_FUNC .*\bSTO_ENTRY\s+(\S+)", line):
            yield target, found[1]


def differences(fatbins: Iterable[Path], manifest: Path = MANIFEST, targets: Sequence[str] = compiler.TARGETS) -> list[str]:
    """What is listed and not there, or there and not listed."""
    listed = {line.split()[0] for line in manifest.read_text().splitlines()}
    there: dict[str, set[str]] = {target: set() for target in targets}
    for fatbin in fatbins:
        for target, kernel in entry_points(fatbin):
            if target in there:
                there[target].add(kernel)
    failures = []
    for target, kernels in there.items():
        failures += [f"{name} of {manifest.name} has no machine code for {target}" for name in sorted(listed - kernels)]
        failures += [f"{name} has machine code for {target}, and is not in {manifest.name}" for name in sorted(kernels - listed)]
    return failures


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="Compare compiled kernels with the manifest.")
    parser.add_argument("--targets", type=compiler.chosen_targets, default=compiler.TARGETS, help="those that were compiled")
    targets = parser.parse_args().targets
    try:
        failures = differences(sorted(compiler.built_folder(targets).glob("*.fatbin")), targets=targets)
    except compiler.CompileError as error:
        failures = [str(error)]
    print(*failures, sep="\n", end="\n" if failures else "", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
