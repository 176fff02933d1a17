"""The same attention and products through PyTorch and FlashInfer, where they can be imported."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from gpu_plan import KV_HEADS, Work, kv_bytes

L2_BYTES = 256 << 20
"""More than any cache: inputs take turns until they have as many bytes, so that each run reads memory."""


class Peer(Protocol):
    """Somebody's kernels."""

    @property
    def name(self) -> str:
        """With the version."""
        ...

    def seconds(self, work: Work, runs: int) -> list[float]:
        """Of each run; empty for what it does not do."""
        ...

    def release(self) -> None:
        """Gives the GPU memory back that it keeps for later."""
        ...


def time_calls(torch: Any, calls: list[Callable[[], Any]], runs: int) -> list[float]:
    """Seconds by events; each run is as many calls as there are, captured in a graph, so that launching them costs nothing."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    found = []
    for _ in range(runs + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1000 / len(calls))
    return found[1:]


def turns(bytes_of_one: float) -> int:
    """Inputs that take turns."""
    return max(1, min(64, int(L2_BYTES // bytes_of_one) + 1))


def multiply(x: Any, weight: Any) -> Any:
    """The product of a linear layer."""
    return x @ weight.T


class Torch:
    """scaled_dot_product_attention over contiguous keys and values, and products of bf16."""

    def __init__(self, torch: Any, ordinal: int) -> None:
        self.torch = torch
        self.device = f"cuda:{ordinal}"
        self.name = f"PyTorch {torch.__version__}"

    def random(self, *shape: int) -> Any:
        """Values of bf16."""
        return self.torch.randn(*shape, dtype=self.torch.bfloat16, device=self.device)

    def release(self) -> None:
        """PyTorch keeps what is freed, and others beside it then find the card full."""
        self.torch.cuda.empty_cache()

    def seconds(self, work: Work, runs: int) -> list[float]:
        """Of each run."""
        if work["kind"] == "linear" and work["format"] == "BF16":
            rows, out_features, in_features = work["rows"], work["out_features"], work["in_features"]
            x = self.random(rows, in_features)
            weights = [self.random(out_features, in_features) for _ in range(turns(2 * out_features * in_features))]
            return time_calls(self.torch, [partial(multiply, x, weight) for weight in weights], runs)
        if work["kind"] != "attention" or work["cache"] != "bf16":
            return []
        attend = self.torch.nn.functional.scaled_dot_product_attention
        q = self.random(work["batch"], KV_HEADS * work["queries_per_kv"], 1, work["head_dim"])
        shape = work["batch"], KV_HEADS, work["context"], work["head_dim"]
        caches = [(self.random(*shape), self.random(*shape)) for _ in range(turns(kv_bytes(work)))]
        return time_calls(self.torch, [partial(attend, q, k, v, enable_gqa=True) for k, v in caches], runs)


class FlashInfer:
    """Decoding over a paged cache."""

    def __init__(self, flashinfer: Any, torch: Any, ordinal: int) -> None:
        self.flashinfer, self.torch = flashinfer, torch
        self.device = f"cuda:{ordinal}"
        self.name = f"FlashInfer {flashinfer.__version__}"

    def release(self) -> None:
        """PyTorch keeps what is freed, and others beside it then find the card full."""
        self.torch.cuda.empty_cache()

    def seconds(self, work: Work, runs: int) -> list[float]:
        """Of each run."""
        if work["kind"] != "attention" or work["cache"] not in ("bf16", "f16"):
            return []
        torch = self.torch
        dtype = torch.bfloat16 if work["cache"] == "bf16" else torch.float16
        pages = -(-work["context"] // work["block_size"])
        count = work["batch"] * pages
        shape = (count, 2, KV_HEADS, work["block_size"], work["head_dim"])
        caches = [torch.randn(*shape, dtype=dtype, device=self.device) for _ in range(turns(kv_bytes(work)))]
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=self.device)
        # What its documentation advises for several queries a KV head.
        tensor_cores = work["queries_per_kv"] >= 4
        wrapper = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=tensor_cores)
        integers = {"dtype": torch.int32, "device": self.device}
        wrapper.plan(
            torch.arange(0, count + 1, pages, **integers),
            torch.randperm(count, device=self.device).to(torch.int32),
            torch.full((work["batch"],), (work["context"] - 1) % work["block_size"] + 1, **integers),
            KV_HEADS * work["queries_per_kv"],
            KV_HEADS,
            work["head_dim"],
            work["block_size"],
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        q = torch.randn(work["batch"], KV_HEADS * work["queries_per_kv"], work["head_dim"], dtype=dtype, device=self.device)
        return time_calls(torch, [partial(wrapper.run, q, cache) for cache in caches], runs)


class Forgiving:
    """A peer that leaves out what it cannot do, after the first time saying why, and everything once it took too long."""

    def __init__(self, peer: Peer, allowed_seconds: float = 90.0) -> None:
        self.peer, self.name = peer, peer.name
        self.left = allowed_seconds
        self.told: set[str] = set()

    def seconds(self, work: Work, runs: int) -> list[float]:
        """Of each run; empty after an error."""
        if self.left <= 0:
            self.tell("took too long, the rest is left out")
            return []
        start = time.perf_counter()
        try:
            return self.peer.seconds(work, runs)
        except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError) as error:
            self.tell(str(error).splitlines()[0] if str(error) else type(error).__name__)
            return []
        finally:
            # What is compiled for a shape, too.
            self.left -= time.perf_counter() - start
            self.release()

    def release(self) -> None:
        """Between two works."""
        self.peer.release()

    def tell(self, text: str) -> None:
        """Once."""
        if text not in self.told:
            self.told.add(text)
            print(f"{self.name}: {text}", flush=True)


def available(ordinal: int) -> list[Peer]:
    """Those that can be imported and see a GPU."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    peers: list[Peer] = [Forgiving(Torch(torch, ordinal))]
    try:
        peers.append(Forgiving(FlashInfer(importlib.import_module("flashinfer"), torch, ordinal)))
    except ImportError:
        print("FlashInfer cannot be imported", flush=True)
    return peers
