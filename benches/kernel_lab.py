"""Tries edited kernels on a GPU without building the package: compiles one of kernels/*.cu, checks it against PyTorch, times it.

    python3 benches/kernel_lab.py gemm_q4_k_r8 --rows 1 --shape 14336,4096
    cp -r kernels /tmp/edited; edit /tmp/edited/gemm.cu
    python3 benches/kernel_lab.py gemm_q4_k_r8 --kernels kernels /tmp/edited
    python3 benches/kernel_lab.py gemm_q4_k_r128 --rows 128 256 --shape 4096,14336
    python3 benches/kernel_lab.py attention_bf16_d128 --requests 32,4096 1,512 --part-keys 128 256

Kernels are gemm_* of packed formats, gemv_* of floats, and attention_* of f16, bf16 and i8. Several folders are timed in turns,
and the table has the medians. Needs PyTorch, the driver, and nvcc on the PATH or in CUDA_HOME; a folder with NAME.cubin, such as
gemm.cubin, compiled with -DKERNEL_LAB needs no nvcc.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "kernels"))

from compiler import CompileError, find_tool  # noqa: E402

TURN_BYTES = 256 << 20
"""More than any cache: inputs take turns until they have as many bytes."""
MAX_TURNS = 32
ROUNDS = 9
MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""
MAX_THREADS = 0
"""CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK."""
MAX_PIECES, MIN_STAGES, PANEL_FEATURES, MANY_PANELS = 2 * 132, 4, 64, 1024
"""As rust/device/src/cuda/gemm.rs cuts weights; of wide ones that are not very many panels, half as many pieces."""
TILE_ROWS = (64, 128)
"""Of gemm_tiles.cu, whose tiles have two panels, and half as many pieces."""
STAGE_COLUMNS = {"q8_0": 128}
"""Others have 256."""
BLOCK_BYTES = {"q4_0": 1152, "q4_1": 1280, "q8_0": 2176, "q4_k": 1152, "q5_k": 1408, "q6_k": 1664}
SUPER_BYTES = {"q4_k": 256, "q5_k": 256, "q6_k": 128}
"""Of packed.cuh: 64 features x 32 columns, and behind a stage."""
NO_TARGET = struct.pack("<3Q4I", 0, 0, 0, 0, 0, 0xFFFFFFFF, 0)
"""Of the three that a launch of gemv_* or gemm_* multiplies by."""
PART_KEYS, MAX_PARTS, KEY_TILE = 512, 64, 64
"""As rust/device/src/cuda/attention_plan.rs cuts keys."""
MERGED_HEADS = 4
"""That a CTA of attention_merge takes."""


class LabError(Exception):
    """What is asked for cannot be tried."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, with a whole number for its value."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Module:
    """A file of kernels, compiled and loaded. As in the package, a kernel begins while the one before it ends."""

    def __init__(self, driver: Any, cubin: bytes) -> None:
        self.driver = driver
        self.module = ctypes.c_void_p()
        check(driver.cuModuleLoadData(ctypes.byref(self.module), cubin), "loading kernels")

    def kernel(self, name: str) -> Callable[[tuple[int, int], bytes, int], None]:
        """A function that starts the kernel with (grid, argument struct, stream)."""
        function, found = ctypes.c_void_p(), name.encode()
        check(self.driver.cuModuleGetFunction(ctypes.byref(function), self.module, found), f"finding {name}")
        threads = ctypes.c_int()
        check(self.driver.cuFuncGetAttribute(ctypes.byref(threads), MAX_THREADS, function), f"asking {name}")
        overlaps = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, b"", 1)
        shared = self.number(f"{name}_shared_bytes")
        check(self.driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, shared), f"giving {name} shared memory")

        def launch(grid: tuple[int, int], args: bytes, stream: int) -> None:
            params = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.c_char_p(args), ctypes.c_void_p))
            config = LaunchConfig((*grid, 1), (threads.value, 1, 1), shared, stream, ctypes.pointer(overlaps), 1)
            status = self.driver.cuLaunchKernelEx(ctypes.byref(config), function, params, None)
            check(status, f"starting {name}")

        return launch

    def number(self, name: str) -> int:
        """A number that the module defines."""
        at, size, value = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint32()
        found = self.driver.cuModuleGetGlobal_v2(ctypes.byref(at), ctypes.byref(size), self.module, name.encode())
        check(found, f"finding {name}, which -DKERNEL_LAB defines")
        check(self.driver.cuMemcpyDtoH_v2(ctypes.byref(value), at, ctypes.c_size_t(4)), f"reading {name}")
        return value.value


def check(status: int, what: str) -> None:
    """Raises what the driver says."""
    if status:
        raise LabError(f"{what}: the driver says {status}")


def compiled(folder: Path, file: str, target: str) -> bytes:
    """The machine code of a file."""
    ready = folder / f"{file}.cubin"
    if ready.is_file():
        return ready.read_bytes()
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out.cubin"
        flags = ["-cubin", "-std=c++17", "-O3", f"-arch={target}", "-DKERNEL_LAB"]
        done = subprocess.run([str(find_tool("nvcc")), *flags, "-o", str(out), str(folder / f"{file}.cu")], check=False)
        if done.returncode:
            raise LabError(f"{folder / file}.cu does not compile")
        return out.read_bytes()


class Lab:
    """Makes inputs, runs every variant over them, compares and times."""

    def __init__(self, torch: Any, folders: list[Path]) -> None:
        self.torch, self.folders = torch, folders
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        self.driver = ctypes.CDLL("libcuda.so.1")
        major, minor = torch.cuda.get_device_capability()
        self.target = f"sm_{major}{minor}"

    def kernels(self, file: str, name: str) -> list[Callable[[tuple[int, int], bytes, int], None]]:
        """The kernel in each folder."""
        return [Module(self.driver, compiled(folder, file, self.target)).kernel(name) for folder in self.folders]

    def random(self, *shape: int, dtype: Any = None) -> Any:
        """Normal values on the GPU."""
        return self.torch.randn(*shape, dtype=dtype or self.torch.float32, device="cuda")

    def seconds(self, runs: list[Callable[[int, int], None]], turns: int) -> list[list[float]]:
        """Of each variant's runs, which take the turn and the stream; variants take turns too."""
        torch = self.torch
        graphs, aside = [], torch.cuda.Stream()
        for run in runs:
            run(0, torch.cuda.current_stream().cuda_stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Not torch.cuda.graph, which may collect garbage each time: that takes longer than the runs.
            with torch.cuda.stream(aside):
                graph.capture_begin()
                for turn in range(max(turns, 8)):
                    run(turn % turns, aside.cuda_stream)
                graph.capture_end()
            graphs.append(graph)
        found: list[list[float]] = [[] for _ in runs]
        for number in range(ROUNDS + 1):
            for graph, times in zip(graphs, found, strict=True):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                if number:
                    times.append(begin.elapsed_time(end) / 1e3 / max(turns, 8))
        return found

    def report(
        self, what: str, runs: list[Callable[[int, int], None]], turns: int, moved_bytes: float, check_output: Any
    ) -> None:
        """Prints a line a variant."""
        errors = []
        for run in runs:
            run(0, self.torch.cuda.current_stream().cuda_stream)
            self.torch.cuda.synchronize()
            errors.append(check_output())
        for folder, times, error in zip(self.folders, self.seconds(runs, turns), errors, strict=True):
            median = statistics.median(times)
            rate = f"{moved_bytes / median / 1e9:7.0f} GB/s"
            print(f"{what:<56}{folder.name:<18}{median * 1e6:9.2f} us {rate}  error {error:.1e}", flush=True)

    def difference(self, got: Any, want: Any) -> float:
        """Norm of the difference over that of what is right."""
        return float((got.double() - want.double()).norm() / want.double().norm())


def cut(out_features: int, in_features: int, stage_columns: int, is_tiled: bool) -> tuple[int, int]:
    """Stages of a piece, and pieces."""
    panels, sharing = -(-out_features // PANEL_FEATURES), 2 if is_tiled else 1
    stages = -(-panels // sharing) * -(-in_features // stage_columns)
    is_wide = out_features >= 2 * in_features and panels < MANY_PANELS
    part_stages = max(-(-stages // (MAX_PIECES // sharing // (2 if is_wide else 1))), MIN_STAGES)
    return part_stages, -(-stages // part_stages)


def try_gemm(lab: Lab, name: str, rows: int, shape: tuple[int, int]) -> None:
    """Random bytes are a packed weight; what it means, `packed_dequantize_*` says."""
    torch, (out_features, in_features) = lab.torch, shape
    form, capacity = name.removeprefix("gemm_").rsplit("_r", 1)
    if form not in BLOCK_BYTES:
        raise LabError(f"{name}: of gemm_*, only {', '.join(BLOCK_BYTES)} can be tried here")
    stage_columns = STAGE_COLUMNS.get(form, 256)
    blocks = in_features // 32
    panel_bytes = blocks * BLOCK_BYTES[form] + -(-blocks // (stage_columns // 32)) * SUPER_BYTES.get(form, 0)
    panels = -(-out_features // 64)
    weight_bytes = panels * panel_bytes
    turns = max(1, min(MAX_TURNS, TURN_BYTES // weight_bytes + 1))
    # As in benches of the package: bytes whose pairs are small numbers of f16.
    weights = torch.randint(0, 0x20, (turns, weight_bytes), dtype=torch.uint8, device="cuda")
    x = lab.random(rows, in_features)
    given = x if int(capacity) == 8 else x.to(torch.bfloat16)
    out = torch.empty(rows, out_features, device="cuda")
    is_tiled = int(capacity) in TILE_ROWS
    row_tiles = -(-rows // int(capacity)) if is_tiled else 1
    part_stages, pieces = cut(out_features, in_features, stage_columns, is_tiled)
    sums = torch.empty(row_tiles * MAX_PIECES * 2 * PANEL_FEATURES * int(capacity), device="cuda")
    arrivals = torch.zeros(row_tiles * MAX_PIECES, dtype=torch.int32, device="cuda")
    plain = torch.empty(panels * 64, in_features, device="cuda")
    unpack = Module(lab.driver, compiled(lab.folders[0], "unpack", lab.target)).kernel(f"packed_dequantize_{form}")
    args = struct.pack("<QQQ2I", weights.data_ptr(), plain.data_ptr(), panel_bytes, in_features, 0)
    unpack((-(-blocks // 4), panels), args, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    want = x.to(torch.bfloat16).double() @ plain[:out_features].double().T

    def runner(kernel: Any) -> Callable[[int, int], None]:
        def run(turn: int, stream: int) -> None:
            pointers = (weights[turn].data_ptr(), 0, out.data_ptr())
            target = struct.pack("<3Q4I", *pointers, out_features, out_features, 0, part_stages) + NO_TARGET * 2
            buffers = struct.pack("<3Q", sums.data_ptr(), arrivals.data_ptr(), panel_bytes)
            numbers = struct.pack("<4IfI", rows, in_features, in_features, 0, 1.0, 0)
            kernel((pieces, row_tiles), struct.pack("<Q", given.data_ptr()) + target + buffers + numbers, stream)

        return run

    runs = [runner(kernel) for kernel in lab.kernels("gemm_tiles" if is_tiled else "gemm", name)]
    moved = out_features * in_features // 32 * BLOCK_BYTES[form] / 64 + 4.0 * rows * (in_features + out_features)
    lab.report(f"{name} {rows} x {out_features} x {in_features}", runs, turns, moved, lambda: lab.difference(out, want))


def try_gemv(lab: Lab, name: str, rows: int, shape: tuple[int, int]) -> None:
    """Weights of floats."""
    torch, (out_features, in_features) = lab.torch, shape
    form = name.removeprefix("gemv_").rsplit("_r", 1)[0]
    dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    if form not in dtypes:
        raise LabError(f"{name}: of gemv_*, only {', '.join(dtypes)} can be tried here")
    element = dtypes[form].itemsize
    turns = max(1, min(MAX_TURNS, TURN_BYTES // (out_features * in_features * element) + 1))
    weights = [lab.random(out_features, in_features, dtype=dtypes[form]) for _ in range(turns)]
    x, out = lab.random(rows, in_features), torch.empty(rows, out_features, device="cuda")
    want = x.double() @ weights[0].double().T

    def runner(kernel: Any) -> Callable[[int, int], None]:
        def run(turn: int, stream: int) -> None:
            target = struct.pack("<3Q4I", weights[turn].data_ptr(), 0, out.data_ptr(), out_features, out_features, 0, 0)
            rest = struct.pack("<Q4IfI", in_features * element, rows, in_features, in_features, 0, 1.0, 0)
            kernel((-(-out_features // 4), 1), struct.pack("<Q", x.data_ptr()) + target + NO_TARGET * 2 + rest, stream)

        return run

    runs = [runner(kernel) for kernel in lab.kernels("gemv", name)]
    moved = element * out_features * in_features + 4.0 * rows * (in_features + out_features)
    lab.report(f"{name} {rows} x {out_features} x {in_features}", runs, turns, moved, lambda: lab.difference(out, want))


class Requests:
    """Requests that decode one row each: the cache, and what comes out."""

    def __init__(self, lab: Lab, name: str, sizes: tuple[int, int], options: argparse.Namespace) -> None:
        torch, (self.batch, self.context) = lab.torch, sizes
        self.num_heads, self.num_kv_heads = options.heads
        self.block_size = options.block_size
        found = re.fullmatch(r"attention_(f16|bf16|i8)_d(\d+)", name)
        if found is None:
            raise LabError(f"{name}: of attention_*, only f16, bf16 and i8 can be tried here")
        self.head_dim, self.is_coded = int(found[2]), found[1] == "i8"
        self.dtype = torch.float16 if found[1] == "f16" else torch.bfloat16
        self.vector_bytes = self.head_dim + 2 if self.is_coded else 2 * self.head_dim
        self.block_bytes = self.num_kv_heads * self.block_size * self.vector_bytes
        self.max_blocks = -(-self.context // self.block_size)
        self.kv_bytes = 2 * self.batch * self.context * self.num_kv_heads * self.vector_bytes
        turns = max(1, min(MAX_TURNS, TURN_BYTES // self.kv_bytes + 1))
        self.caches = [(self.plane(lab), self.plane(lab)) for _ in range(turns)]
        blocks = self.batch * self.max_blocks
        order = torch.arange(blocks, device="cuda") if options.tables == "in-order" else torch.randperm(blocks, device="cuda")
        self.tables = (1 + order).to(torch.int32).view(self.batch, self.max_blocks)
        self.q = lab.random(self.batch, self.num_heads * self.head_dim)
        self.out = torch.empty(self.batch, self.num_heads * self.head_dim, device="cuda")
        self.positions = torch.full((self.batch,), self.context - 1, dtype=torch.int32, device="cuda")
        keys, values = (self.vectors(torch, side) for side in self.caches[0])
        queries = self.q.to(self.dtype).double().view(self.batch, self.num_kv_heads, -1, self.head_dim)
        weights = torch.einsum("bhgd,bthd->bhgt", queries, keys).mul(self.head_dim**-0.5).softmax(-1)
        self.want = torch.einsum("bhgt,bthd->bhgd", weights, values).reshape(self.batch, -1)

    def plane(self, lab: Lab) -> Any:
        """Bytes of all blocks: vectors [num_kv_heads, block_size, head_dim]; behind codes, scales [num_kv_heads, block_size]."""
        torch, blocks = lab.torch, 1 + self.batch * self.max_blocks
        vectors = (blocks, self.num_kv_heads * self.block_size * self.head_dim)
        if not self.is_coded:
            return lab.random(*vectors, dtype=self.dtype).view(torch.uint8)
        codes = torch.randint(-127, 128, vectors, dtype=torch.int8, device="cuda").view(torch.uint8)
        scales = torch.rand(blocks, self.num_kv_heads * self.block_size, device="cuda").add(1).div(100).to(torch.bfloat16)
        return torch.cat([codes, scales.view(torch.uint8)], dim=1)

    def vectors(self, torch: Any, plane: Any) -> Any:
        """Those of the requests [batch, context, num_kv_heads, head_dim], in f64."""
        shape = (-1, self.num_kv_heads, self.block_size, self.head_dim)
        if self.is_coded:
            split = self.num_kv_heads * self.block_size * self.head_dim
            codes, scales = plane[:, :split].contiguous().view(torch.int8), plane[:, split:].contiguous().view(torch.bfloat16)
            found = codes.view(shape).double() * scales.double().view(*shape[:3], 1)
        else:
            found = plane.view(self.dtype).view(shape)
        found = found[self.tables.long()].transpose(2, 3).reshape(self.batch, -1, self.num_kv_heads, self.head_dim)
        return found[:, : self.context].double()


def try_parts(lab: Lab, name: str, requests: Requests, kernels: list[tuple[Any, Any]], part_keys: int) -> None:
    """Cuts the requests, runs the kernels and the merge of the parts."""
    torch, batch, context = lab.torch, requests.batch, requests.context
    parts = -(-context // part_keys)
    works, merges = [], []
    for request in range(batch):
        for part in range(parts):
            end = min(context, (part + 1) * part_keys)
            place = request * parts + part if parts > 1 else -1
            works.append((request, request, 1, part * part_keys, end, place))
        merges.append((request, request * parts, parts, 1))
    work = torch.tensor(works, dtype=torch.int32, device="cuda")
    merge = torch.tensor(merges, dtype=torch.int32, device="cuda")
    num_heads, num_kv_heads, head_dim = requests.num_heads, requests.num_kv_heads, requests.head_dim
    part_out = torch.empty(batch * parts, num_heads, head_dim, device="cuda")
    part_lse = torch.empty(batch * parts, num_heads, device="cuda")

    def runner(kernel: Any, merger: Any) -> Callable[[int, int], None]:
        def run(turn: int, stream: int) -> None:
            k, v = requests.caches[turn]
            pointers = (requests.q, requests.out, part_out, part_lse, k, v, requests.tables, requests.positions)
            addresses = [*(tensor.data_ptr() for tensor in pointers), 0, work.data_ptr(), 0]
            scales_offset = num_kv_heads * requests.block_size * head_dim
            sizes = (requests.block_bytes, scales_offset if requests.is_coded else requests.block_bytes)
            numbers = (requests.max_blocks, requests.block_size, num_heads, num_kv_heads, num_heads * head_dim, 0, 0)
            rest = (head_dim**-0.5, 0.0, head_dim, 0, 0)
            args = struct.pack("<11Q2Q7I2f3I", *addresses, *sizes, *numbers, *rest)
            kernel((len(works) * num_kv_heads, 1), args + bytes(-len(args) % 8), stream)
            if parts > 1:
                merged = (part_out.data_ptr(), part_lse.data_ptr(), merge.data_ptr(), 0, requests.out.data_ptr())
                grid = (batch, -(-num_heads // MERGED_HEADS))
                merger(grid, struct.pack("<5Q4I", *merged, num_heads, head_dim, 0, 0), stream)

        return run

    def error() -> float:
        difference = lab.difference(requests.out, requests.want)
        requests.out.fill_(float("nan"))
        return difference

    runs = [runner(*pair) for pair in kernels]
    what = f"{name} {batch} x {context}, {num_heads}/{num_kv_heads}, {parts} x {part_keys}"
    moved = requests.kv_bytes + 8.0 * batch * num_heads * head_dim
    lab.report(what, runs, len(requests.caches), moved, error)


def try_attention(lab: Lab, name: str, options: argparse.Namespace) -> None:
    """Every size of a batch, in parts of every size."""
    kernels = list(zip(lab.kernels("attention", name), lab.kernels("attention_merge", "attention_merge"), strict=True))
    for sizes in options.requests:
        requests = Requests(lab, name, sizes, options)
        least = -(-requests.context // options.max_parts)
        cuts = {min(-(-max(least, keys) // KEY_TILE) * KEY_TILE, requests.context) for keys in options.part_keys}
        for part_keys in sorted(cuts):
            try_parts(lab, name, requests, kernels, part_keys)


def pair(text: str) -> tuple[int, int]:
    """Two numbers with a comma."""
    first, second = map(int, text.split(","))
    return first, second


def main() -> None:
    """Tries one kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", help="its name, such as gemm_q4_k_r8")
    parser.add_argument("--kernels", type=Path, nargs="+", default=[HERE.parent / "kernels"], help="folders of sources or cubins")
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="of gemm_* and gemv_*")
    parser.add_argument("--shape", type=pair, default=(14336, 4096), metavar="OUT,IN", help="of the weight (14336,4096)")
    sizes = parser.add_argument("--requests", type=pair, nargs="+", default=[(32, 4096)], metavar="BATCH,CONTEXT")
    sizes.help = "of attention_*: how many, and tokens that each sees (32,4096)"
    parser.add_argument("--part-keys", type=int, nargs="+", default=[PART_KEYS], help="keys of a part at least (%(default)s)")
    parser.add_argument("--max-parts", type=int, default=MAX_PARTS, help="parts of a request at most (%(default)s)")
    parser.add_argument("--tables", choices=["random", "in-order"], default="random", help="which blocks follow each other")
    parser.add_argument("--heads", type=pair, default=(64, 8), metavar="Q,KV", help="query heads and KV heads (64,8)")
    parser.add_argument("--block-size", type=int, default=16, choices=[8, 16, 32], help="tokens of a block")
    options = parser.parse_args()
    try:
        import torch  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        parser.exit(1, "PyTorch cannot be imported, and it is what kernels are compared with\n")
    if not torch.cuda.is_available():
        parser.exit(1, "PyTorch sees no GPU\n")
    lab, name = Lab(torch, [folder.resolve() for folder in options.kernels]), options.kernel
    try:
        if name.startswith("attention_"):
            try_attention(lab, name, options)
        elif name.startswith(("gemm_", "gemv_")):
            for rows in options.rows:
                (try_gemm if name.startswith("gemm_") else try_gemv)(lab, name, rows, options.shape)
        else:
            raise LabError(f"{name} cannot be tried here: gemm_*, gemv_* and attention_* can")
    except (LabError, CompileError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
