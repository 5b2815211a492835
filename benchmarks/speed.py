"""How fast: candidates per second, the largest case whole, start-up, one estimate.

    python benchmarks/speed.py [--runtime any]

Counted as a candidate: a row that passed every rule and was priced in full. The whole case runs in a
process of its own, so that its wall time includes Python's start-up and its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable

MODEL, GPUS = "llama-3.1-405b", 16384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--runtime", default="", help="only this runtime (default: megatron and any)")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(whole_case(options.one)))
        return
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, one core")
    for runtime in [options.runtime] if options.runtime else ["megatron", "any"]:
        report_case(runtime)
    command = [sys.executable, "-m", "distplan", "--help"]
    print(f"distplan --help: {best_of(3, lambda: subprocess.run(command, check=True, capture_output=True)):.3f} s")
    print(f"one estimate in-process: {one_estimate() * 1e3:.3f} ms")


def report_case(runtime: str) -> None:
    """One line for the 405B case in one runtime, timed from outside."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, __file__, "--one", runtime], check=True, capture_output=True, text=True)
    wall = time.perf_counter() - start
    case = json.loads(done.stdout)
    print(
        f"{MODEL} on {GPUS:,} GPUs, {runtime}: {case['enumerated']:,} enumerated, {case['costed']:,} costed, "
        f"{case['fits']:,} fit; {wall:.2f} s with start-up, peak {case['peak_bytes'] / 2**30:.2f} GiB"
    )
    print(
        f"  enumerate and apply rules {case['rules_seconds']:.2f} s; search {case['search_seconds']:.2f} s: "
        f"{case['costed'] / case['search_seconds']:,.0f} candidates per second"
    )


def whole_case(runtime: str) -> dict[str, float]:
    """Seconds, counts and peak memory of the complete search in this process."""
    from distplan.costmodel.estimate import estimate
    from distplan.planner import api
    from distplan.planner.pricing import Job
    from distplan.planner.space import legal_chunks, space

    job = api.setting(MODEL, gpus=GPUS, runtime=runtime)
    start = time.perf_counter()
    plan = api.search_setting(job, GPUS)
    searched = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    context = Job(
        model=job.model, workload=job.workload, cluster=job.cluster, runtime=job.runtime, bounds={},
        objective="step-time", reserve_bytes=0.0, memory_limit_bytes=None, allow_tight=False, estimate=estimate,
    ).context(GPUS, job.workload.global_batch)  # fmt: skip
    start = time.perf_counter()
    sum(len(rows) for rows in legal_chunks(space(context, {}), context, {}))
    return {
        "enumerated": plan.counts.enumerated,
        "costed": plan.counts.costed,
        "fits": plan.counts.fits,
        "search_seconds": searched,
        "rules_seconds": time.perf_counter() - start,
        "peak_bytes": peak,
    }


def one_estimate() -> float:
    """Seconds of one strategy of Llama-3.1-70B on 64 GPUs, tables warm."""
    from distplan.costmodel.estimate import estimate
    from distplan.costmodel.strategy import Strategies, Strategy
    from distplan.planner import api

    job = api.setting("llama-3.1-70b", gpus=64)
    row = Strategies.of([Strategy(dp_shard=4, tp=8, pp=2, sp=True)])
    return best_of(50, lambda: estimate(job.model, job.workload, job.cluster, job.runtime, row))


def best_of(times: int, run: Callable[[], object]) -> float:
    """The least seconds of so many runs: the machine's noise only adds."""
    least = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - start)
    return least


if __name__ == "__main__":
    main()
