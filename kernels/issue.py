"""How many instructions kernels issue for what they read of memory, counted in the machine code of kernels/built.

`python3 kernels/issue.py` prints a table for an H100: instructions a value, bytes a value, registers, CTAs on a multiprocessor,
and which share of its issue slots a kernel needs while memory is read at full bandwidth. It runs nothing: every branch of a loop
counts as taken, and what waits is not seen. So a share far below 1 says that instructions need not be in the way, and one above 1
that they are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import compiler
from symbols import MANIFEST

TARGET = "sm_90"
MULTIPROCESSORS = 132
CLOCK_HZ = 1.7e9
BYTES_PER_SECOND = 3.0e12
ISSUED_PER_CYCLE = 4
THREADS, CTAS, REGISTERS, SHARED_BYTES = 2048, 32, 65536, 227 << 10
"""Of a multiprocessor."""
RESERVED_SHARED_BYTES = 1 << 10
"""What the driver takes of shared memory for each CTA."""
BYTES_PER_CYCLE = BYTES_PER_SECOND / MULTIPROCESSORS / CLOCK_HZ


@dataclass(frozen=True)
class Loop:
    """What a turn of a warp's main loop takes.

    That is, of the loops that multiply, the innermost or the outermost one. Loops within it run `inner_turns` times.
    """

    module: str
    kernel: str
    values: int
    read_bytes: int
    inner_turns: int = 1
    is_innermost: bool = False


def gemm(name: str, stage_bytes: int, stage_columns: int) -> list[Loop]:
    """A warp takes a block of 64 features and 32 columns."""
    blocks = stage_columns // 32
    return [Loop("gemm", f"gemm_{name}_r{rows}", 64 * 32, stage_bytes // blocks, is_innermost=True) for rows in (8, 16, 32)]


def tiles(name: str, stage_bytes: int, stage_columns: int) -> list[Loop]:
    """A CTA of 8 warps takes two panels and 64 columns."""
    read_bytes = 2 * stage_bytes * 64 // stage_columns // 8
    return [Loop("gemm_tiles", f"gemm_{name}_r{rows}", 128 * 64 // 8, read_bytes, is_innermost=True) for rows in (64, 128)]


LOOPS = [
    Loop("gemv", "gemv_bf16_r1", 4 * 256, 4 * 256 * 2),
    Loop("gemv", "gemv_q4_k_r1", 4 * 1024, 4 * 4 * 144, 2),
    Loop("gemv", "gemv_q4_k_r8", 4 * 1024, 4 * 4 * 144, 2),
    *gemm("q4_k", 8 * 1152 + 256, 256),
    *gemm("q6_k", 8 * 1664 + 128, 256),
    *gemm("q8_0", 4 * 2176, 128),
    *tiles("q4_k", 8 * 1152 + 256, 256),
    *tiles("q8_0", 4 * 2176, 128),
    Loop("attention", "attention_bf16_d128", 2 * 16 * 128, 2 * 16 * 128 * 2),
]
"""Sizes are those of packed.cuh, of a run of gemv.cu and of a tile of attention.cu."""


@dataclass(frozen=True)
class Instruction:
    """One of a kernel's."""

    address: int
    text: str

    @property
    def target(self) -> int | None:
        """Where a branch leads."""
        found = re.search(r"\bBRA\b.* (?:`\(.*\)|0x([0-9a-f]+))$", self.text)
        return int(found[1], 16) if found and found[1] else None

    @property
    def is_issued(self) -> bool:
        """Whether it is there for more than alignment."""
        return not re.match(r"(@!PT |NOP\b)", self.text)


def machine_code(fatbin: Path, kernel: str) -> list[Instruction]:
    """A kernel's instructions for the target, in order."""
    tool = str(compiler.find_tool("cuobjdump"))
    text = compiler.run([tool, "-sass", "-arch", TARGET, "-fun", kernel, str(fatbin)])
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", text, re.MULTILINE)
    if not found:
        raise compiler.CompileError(f"{fatbin.name} has no machine code of {kernel} for {TARGET}")
    return [Instruction(int(address, 16), instruction) for address, instruction in found]


def registers(fatbin: Path, kernel: str) -> int:
    """Those of a thread."""
    text = compiler.run([str(compiler.find_tool("cuobjdump")), "-res-usage", "-arch", TARGET, str(fatbin)])
    found = re.search(rf"Function {kernel}:\s+REG:(\d+)", text)
    if found is None:
        raise compiler.CompileError(f"{fatbin.name} tells no registers of {kernel} for {TARGET}")
    return int(found[1])


def loops(code: Iterable[Instruction]) -> list[tuple[int, int]]:
    """First and last address of each, from branches that lead back."""
    backwards = ((each.target, each.address) for each in code)
    return [(target, address) for target, address in backwards if target is not None and target < address]


def issued(code: list[Instruction], loop: Loop) -> float:
    """Instructions of one turn of the main loop."""
    by_tensor_cores = [each.address for each in code if re.search(r"\bHMMA\b", each.text)]
    multiplies = by_tensor_cores or [each.address for each in code if re.search(r"\bFFMA\b", each.text)]
    spans = [(first, last) for first, last in loops(code) if any(first <= address <= last for address in multiplies)]
    first, last = (min if loop.is_innermost else max)(spans, key=lambda span: span[1] - span[0])
    inner = [span for span in loops(code) if first < span[0] and span[1] < last]

    def turns(address: int) -> int:
        return loop.inner_turns if any(begin <= address <= end for begin, end in inner) else 1

    return sum(turns(each.address) for each in code if first <= each.address <= last and each.is_issued)


def ctas(threads: int, shared_bytes: int, num_registers: int) -> int:
    """Of a kernel on a multiprocessor at once: registers are given to warps in pieces of 256."""
    of_warp = (num_registers * 32 + 255) // 256 * 256
    by_registers = REGISTERS // of_warp // (threads // 32)
    return min(CTAS, THREADS // threads, by_registers, SHARED_BYTES // (shared_bytes + RESERVED_SHARED_BYTES))


def row(loop: Loop, manifest: dict[str, tuple[int, int]]) -> list[str]:
    """A line of the table."""
    fatbin = compiler.BUILT / f"{loop.module}.fatbin"
    count = issued(machine_code(fatbin, loop.kernel), loop)
    num_registers = registers(fatbin, loop.kernel)
    threads, shared_bytes = manifest[loop.kernel]
    share = BYTES_PER_CYCLE * count / loop.read_bytes / ISSUED_PER_CYCLE
    figures = [f"{32 * count / loop.values:.2f}", f"{loop.read_bytes / loop.values:.3f}", f"{num_registers}"]
    return [f"`{loop.kernel}`", *figures, f"{ctas(threads, shared_bytes, num_registers)} x {threads}", f"{share:.2f}"]


def main() -> int:
    """Returns the exit status."""
    lines = [line.split() for line in MANIFEST.read_text().splitlines()]
    manifest = {name: (int(threads), int(shared)) for name, _, threads, shared in lines}
    print("| kernel | instructions a value | bytes a value | registers | CTAs x threads | share of issue slots |")
    print("| --- | --- | --- | --- | --- | --- |")
    try:
        for loop in LOOPS:
            print("|", " | ".join(row(loop, manifest)), "|")
    except compiler.CompileError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
