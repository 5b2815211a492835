"""Measure a machine for `distplan calibrate`: matrix products, attention, copies, context memory, collectives.

    python bench.py -o bench.json                       one GPU
    torchrun --nproc-per-node 8 bench.py -o bench.json  one node, with collectives inside it
    torchrun --nnodes 2 --nproc-per-node 8 … bench.py   also across nodes

This file stands alone: it needs PyTorch (2.3 or newer) and nothing else. Every number is the median of repeats on
warm kernels. `--smoke` runs tiny shapes on the CPU, to see that it works; its output calibrates nothing.
"""

import argparse
import datetime
import functools
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Row = dict[str, Any]
FORMAT = "distplan-bench 1"
TOKENS = (64, 256, 1024, 2048, 4096, 8192, 16384)
WEIGHTS = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (1280, 8192), (8192, 1024))
"""(n, k) of layers of 8B to 70B models, whole and cut by 8"""
LENGTHS = (1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128)
ATTENTION_TOKENS, ATTENTION_WIDTH = 16384, 2048
COPIES = tuple(2**power for power in range(20, 31))
MESSAGES = tuple(2**power for power in range(14, 31, 2))
SETTLED_SIZE, SETTLED_SECONDS = 8192, 15.0
CACHE_BYTES = 2**29
WAIT_CYCLES = 2_000_000
"""about a millisecond"""
REPEATS, WARM = 20, 5
SMOKE: dict[str, Any] = {
    "tokens": (32, 64),
    "weights": ((64, 64), (128, 64)),
    "lengths": (64, 128),
    "copies": (2**16, 2**18),
}
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


class Timer:
    """Median seconds of a call: CUDA events on a GPU, the clock on a CPU."""

    def __init__(self, torch: Any, smoke: bool) -> None:
        self.torch, self.smoke = torch, smoke
        self.repeats, self.warm = (3, 1) if smoke else (REPEATS, WARM)

    def seconds(self, call: Callable[[], Any]) -> float:
        for _ in range(self.warm):
            call()
        return statistics.median(self.once(call) for _ in range(self.repeats))

    def once(self, call: Callable[[], Any]) -> float:
        if self.smoke:
            begin = time.perf_counter()
            call()
            return max(time.perf_counter() - begin, 1e-9)
        # the device waits while the host submits several calls, so that what is timed is the device and not the host
        inner = 4
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.torch.cuda._sleep(WAIT_CYCLES)
        start.record()
        for _ in range(inner):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / inner


def gemms(torch: Any, timer: Timer, device: Any) -> Iterator[Row]:
    """Products as a linear layer does them: [m, k] times a weight of [n, k], transposed."""
    tokens, weights = (SMOKE["tokens"], SMOKE["weights"]) if timer.smoke else (TOKENS, WEIGHTS)
    for dtype in (half(torch, timer), "fp8"):
        if dtype == "fp8" and not has_fp8(torch, timer):
            continue
        for n, k in weights:
            for m in tokens:
                call = product(torch, device, dtype, m, n, k)
                yield {"kind": "gemm", "m": m, "n": n, "k": k, "dtype": dtype, "seconds": timer.seconds(call)}


def half(torch: Any, timer: Timer) -> str:
    """The 2-byte dtype of training: before sm_80 products in bf16 have no tensor cores."""
    return "bf16" if timer.smoke or torch.cuda.get_device_capability() >= (8, 0) else "fp16"


def has_fp8(torch: Any, timer: Timer) -> bool:
    return bool(not timer.smoke and torch.cuda.get_device_capability() >= (8, 9) and hasattr(torch, "_scaled_mm"))


def product(torch: Any, device: Any, dtype: str, m: int, n: int, k: int) -> Callable[[], Any]:
    # as many weights in turn as no cache holds: a layer does not find its weight there either
    number = 1 if device.type == "cpu" else max(1, min(32, CACHE_BYTES // (2 * n * k)))
    wide = torch.float16 if dtype == "fp16" else torch.bfloat16
    a = torch.randn(m, k, device=device, dtype=wide)
    weights = [torch.randn(n, k, device=device, dtype=wide) for _ in range(number)]
    if dtype != "fp8":
        turn = itertools.cycle([weight.t() for weight in weights])
        return lambda: torch.matmul(a, next(turn))
    one = torch.ones((), device=device, dtype=torch.float32)
    a8 = a.to(torch.float8_e4m3fn)
    turn = itertools.cycle([weight.to(torch.float8_e4m3fn).t() for weight in weights])
    return lambda: torch._scaled_mm(a8, next(turn), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def settled(torch: Any, timer: Timer, device: Any) -> Iterator[Row]:
    """The same large product for as long as clocks and temperature take to settle; the last third counts."""
    if timer.smoke:
        return
    size, dtype = SETTLED_SIZE, half(torch, timer)
    call = product(torch, device, dtype, size, size, size)
    begin, found = time.monotonic(), []
    while time.monotonic() - begin < SETTLED_SECONDS:
        seconds = timer.once(call)
        if time.monotonic() - begin > SETTLED_SECONDS * 2 / 3:
            found.append(seconds)
    yield {
        "kind": "gemm", "m": size, "n": size, "k": size, "dtype": dtype, "settled": True,
        "seconds": statistics.median(found),
    }  # fmt: skip


def attentions(torch: Any, timer: Timer, device: Any) -> Iterator[Row]:
    """Scaled dot product attention by the kernels that training uses: FlashAttention-2, and cuDNN's where there is."""
    lengths = SMOKE["lengths"] if timer.smoke else LENGTHS
    tokens = max(lengths) if timer.smoke else ATTENTION_TOKENS
    width = 128 if timer.smoke else ATTENTION_WIDTH
    for kernel, backend in kernels(torch, timer):
        for head_dim in HEAD_DIMS:
            for length in lengths:
                for causal in (True, False):
                    batch, heads = max(1, tokens // length), max(1, width // head_dim)
                    shape = {
                        "kernel": kernel, "batch": batch, "heads": heads, "head_dim": head_dim, "seq_len": length,
                        "causal": causal, "dtype": "bf16",
                    }  # fmt: skip
                    yield from attention(torch, timer, device, backend, shape)


def kernels(torch: Any, timer: Timer) -> list[tuple[str, Any]]:
    backends = torch.nn.attention.SDPBackend
    if timer.smoke:
        return [("flash2", backends.MATH)]
    newest = torch.cuda.get_device_capability() >= (9, 0) and hasattr(backends, "CUDNN_ATTENTION")
    return [("flash2", backends.FLASH_ATTENTION), *([("flash3", backends.CUDNN_ATTENTION)] if newest else [])]


def attention(torch: Any, timer: Timer, device: Any, backend: Any, shape: Row) -> Iterator[Row]:
    size = (shape["batch"], shape["heads"], shape["seq_len"], shape["head_dim"])
    q, k, v = (torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gradient = torch.randn(size, device=device, dtype=torch.bfloat16)

    def forward() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape["causal"])

    try:
        with torch.nn.attention.sdpa_kernel(backend):
            out = forward()
            ahead = timer.seconds(forward)
            back = timer.seconds(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))
    except RuntimeError as error:  # a kernel that this build or device does not have
        say(f"attention {shape['kernel']} left out: {str(error).splitlines()[0]}")
        return
    yield {"kind": "attention", "direction": "forward", **shape, "seconds": ahead}
    yield {"kind": "attention", "direction": "backward", **shape, "seconds": back}


def copies(torch: Any, timer: Timer, device: Any) -> Iterator[Row]:
    """Inside the device (bytes read and written), and from pinned host memory to it."""
    for size in SMOKE["copies"] if timer.smoke else COPIES:
        x = torch.ones(size, dtype=torch.uint8, device=device)
        y = torch.empty_like(x)
        seconds = timer.seconds(functools.partial(y.copy_, x))
        yield {"kind": "copy", "path": "device", "bytes": 2 * size, "seconds": seconds}
        if not timer.smoke:
            host = torch.ones(size, dtype=torch.uint8).pin_memory()
            seconds = timer.seconds(functools.partial(y.copy_, host, non_blocking=True))
            yield {"kind": "copy", "path": "host", "bytes": size, "seconds": seconds}


def context(torch: Any, after: str) -> Row:
    """Bytes of the device that the allocator does not know of: context, kernels, communicators."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return {"kind": "context", "after": after, "bytes": int(total - free - torch.cuda.memory_reserved())}


def groups(dist: Any, local: int) -> Iterator[tuple[Any, int, int]]:
    """(process group of this rank, its ranks, its nodes): the node, and all ranks where there are more nodes."""
    world, rank = dist.get_world_size(), dist.get_rank()
    nodes = max(1, world // local)
    if local > 1:
        every = [dist.new_group(list(range(first, first + local))) for first in range(0, world, local)]
        yield every[rank // local], local, 1
    if nodes > 1:
        yield dist.group.WORLD, world, nodes


def collectives(torch: Any, dist: Any, timer: Timer, device: Any, local: int) -> Iterator[Row]:
    """Sizes are those of nccl-tests: the full buffer, also for all_gather. The slowest rank counts."""
    for group, ranks, nodes in groups(dist, local):
        for name in COLLECTIVES:
            for size in MESSAGES[:2] if timer.smoke else MESSAGES:
                count = size // 2 // ranks * ranks
                try:
                    call = collective(torch, dist, group, device, name, count, ranks)
                    dist.barrier()
                    seconds = timer.seconds(call)
                except (RuntimeError, NotImplementedError) as error:  # gloo does not have them all
                    say(f"{name} left out: {str(error).splitlines()[0]}")
                    break
                slowest = torch.tensor([seconds], device=device)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                yield {
                    "kind": "collective", "collective": name, "bytes": 2 * count, "ranks": ranks, "nodes": nodes,
                    "dtype": "bf16", "seconds": float(slowest),
                }  # fmt: skip


def collective(torch: Any, dist: Any, group: Any, device: Any, name: str, count: int, ranks: int) -> Callable[[], Any]:
    whole = torch.ones(count, device=device, dtype=torch.bfloat16)
    other = torch.empty_like(whole)
    part = torch.empty(count // ranks, device=device, dtype=torch.bfloat16)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    if name == "all_to_all":
        return lambda: dist.all_to_all_single(other, whole, group=group)
    members = dist.get_process_group_ranks(group)
    at = members.index(dist.get_rank())
    ahead, behind = members[(at + 1) % ranks], members[at - 1]

    def exchange() -> None:
        sends = [dist.P2POp(dist.isend, whole, ahead, group=group), dist.P2POp(dist.irecv, other, behind, group=group)]
        for work in dist.batch_isend_irecv(sends):
            work.wait()

    return exchange


def say(text: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def versions(torch: Any) -> dict[str, str]:
    found = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "hip": getattr(torch.version, "hip", None)}
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return {name: str(value) for name, value in found.items() if value}


def measure(torch: Any, smoke: bool) -> Row:
    """The content of bench.json, whole on rank 0."""
    world, local_rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    device = torch.device("cpu") if smoke else torch.device("cuda", local_rank)
    timer, found = Timer(torch, smoke), list[Row]()
    if not smoke:
        torch.cuda.set_device(device)
        torch.ones(1, device=device)
        found.append(context(torch, "cuda"))
    if world > 1:
        dist = torch.distributed
        dist.init_process_group("gloo" if smoke else "nccl")
        if not smoke:
            dist.all_reduce(torch.ones(1, device=device))
            found.append(context(torch, "nccl"))
        say("collectives")
        found += collectives(torch, dist, timer, device, local)
    parts = {"matrix products": gemms, "a long run": settled, "attention": attentions, "copies": copies}
    for words, part in parts.items():
        # the other ranks measure too: a node under load is what a job sees
        say(words)
        found += part(torch, timer, device)
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),  # noqa: UP017 (older Pythons)
        "device": "cpu" if smoke else torch.cuda.get_device_name(device),
        "versions": versions(torch),
        "ranks": world,
        "nodes": max(1, world // local),
        "smoke": smoke,
        "measurements": [row | ({} if row["kind"] == "context" else {"repeats": timer.repeats}) for row in found],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", default="bench.json")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU, to see that it works")
    options = parser.parse_args()
    import torch

    if not options.smoke and not torch.cuda.is_available():
        sys.exit("no GPU that torch can see; --smoke tries the script on the CPU")
    found = measure(torch, options.smoke)
    if int(os.environ.get("RANK", "0")) == 0:
        beside = f"{options.output}.tmp"
        with open(beside, "w", encoding="utf-8") as stream:
            json.dump(found, stream, indent=1)
            stream.write("\n")
        os.replace(beside, options.output)
        say(f"wrote {options.output}: {len(found['measurements'])} measurements")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
