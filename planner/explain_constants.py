"""Every constant that an estimate rests on, with its value, how it is known, and its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from distplan.costmodel import fitted
from distplan.costmodel.casting import scaling_of
from distplan.costmodel.runtime import Runtime, on_cluster
from distplan.costmodel.workload import precision_names, precision_source
from distplan.hardware.calibrated import links_of, rates_of
from distplan.hardware.calibration import Entry
from distplan.hardware.cluster import Cluster
from distplan.hardware.documents import load_mapping
from distplan.hardware.facts import Fact
from distplan.hardware.rates import Rates
from distplan.hardware.units import format_bytes_per_second, format_seconds, format_tflops_per_second
from distplan.planner.api import Setting
from distplan.planner.wording import gib

Plain = dict[str, Any]


def constants(job: Setting) -> list[Plain]:
    """Rows of {name, value, status, points, source}; status measured | nominal | fitted | stated |
    scaled | assumed | unverified."""
    return [
        *_accelerator(job),
        *_rates(rates_of(job.cluster), job),
        *_links(job.cluster),
        *_runtime(job.runtime),
        *_fitted(job),
        *_recipe(job),
    ]


def _row(name: str, value: str, status: str, source: str, points: int | None = None) -> Plain:
    return {"name": name, "value": value, "status": status, "points": points, "source": source}


def _fact(name: str, fact: Fact) -> Plain:
    return _row(name, fact.text, fact.status, "; ".join([*fact.sources, *([fact.note] if fact.note else [])]))


def _accelerator(job: Setting) -> Iterator[Plain]:
    accelerator, cluster = job.cluster.accelerator, job.cluster
    recipe = job.workload.precision
    wanted = [f"peak_flops.{dtype}" for dtype in dict.fromkeys((recipe.matmul, recipe.compute))]
    for name in [*wanted, "memory_bandwidth", "memory_bytes", "num_sms"]:
        if name in accelerator.facts:
            yield _fact(name, accelerator.facts[name])
    for name in ("scaleup.bandwidth", "scaleup.domain", "node.bandwidth", "fabric.bandwidth", "fabric.pod_gpus"):
        if name in cluster.facts:
            yield _fact(name, cluster.facts[name])
    if "fabric.oversubscription" in cluster.facts:
        yield _fact("fabric.oversubscription", cluster.facts["fabric.oversubscription"])


def _rates(rates: Rates, job: Setting) -> Iterator[Plain]:
    recipe = job.workload.precision
    for dtype in dict.fromkeys((recipe.matmul, recipe.compute)):
        gemm = rates.gemm.get(dtype)
        if gemm is not None:
            values = {
                "peak_fraction": f"{gemm.flops_per_second / rates.peak_flops[dtype]:.4g}, "
                f"{format_tflops_per_second(gemm.flops_per_second)}",
                "shape": f"ramp {gemm.ramp:.4g}, wave {gemm.wave:.3g}, overlap {gemm.overlap:.3g}, "
                f"latency {format_seconds(gemm.latency)}",
                "accumulate_bytes": f"{gemm.accumulate_bytes:.3g}",
                "group_latency": format_seconds(gemm.group_latency),
            }
            for name, value in values.items():
                yield _origin(rates, f"gemm.{dtype}.{name}", value)
    yield _origin(rates, "sustained", f"{rates.sustained:.4g}")
    for direction, of in (("forward", rates.attention_forward), ("backward", rates.attention_backward)):
        value = f"{of.peak_fraction:.4g} of peak, ramp {of.ramp:.4g} + {of.causal_ramp:.4g}"
        yield _origin(rates, f"attention_{direction}", value)
    kernel = job.runtime.attention_kernel
    if kernel in rates.attention_kernels:
        yield _origin(rates, f"attention_kernel.{kernel}", f"{rates.attention_kernels[kernel]:.4g}")
    achieved = format_bytes_per_second(rates.memory_bandwidth)
    yield _origin(rates, "memory_bandwidth", achieved, "achieved_memory_bandwidth")
    yield _origin(rates, "kernel_latency", format_seconds(rates.kernel_latency))
    yield _origin(rates, "host_operator", format_seconds(rates.host_operator))
    if job.workload.offload_optimizer:
        yield _origin(rates, "host_bandwidth", format_bytes_per_second(rates.host_bandwidth))


def _origin(rates: Rates, key: str, value: str, name: str = "") -> Plain:
    origin = rates.origins[key]
    return _row(name or key, value, origin.provenance, origin.source, origin.points)


def _links(cluster: Cluster) -> Iterator[Plain]:
    for tier, link in zip(cluster.tiers, links_of(cluster), strict=True):
        curve = link.curves["all_gather"]
        rate = format_bytes_per_second(tier.bandwidth)
        value = f"{curve.efficiency:.3g} of {rate}, {format_seconds(tier.latency)} a hop"
        yield _row(f"link.{tier.name}.{tier.technology}", value, link.status, link.source)


def _runtime(runtime: Runtime) -> Iterator[Plain]:
    values = {
        "overlap": ", ".join(name for name, hides in runtime.overlap.items() if hides) or "nothing",
        "grad_bucket_bytes": gib(runtime.grad_bucket_bytes),
        "sp_saves": runtime.sp_saves,
        "merged_input_gradients": runtime.merged_input_gradients,
    }
    for name, value in values.items():
        source = runtime.provenance.get(name, f"{runtime.name} {runtime.version}")
        status = "assumed" if source.startswith("assumed") else "stated"
        yield _row(f"overlap.{runtime.name}" if name == "overlap" else f"runtime.{name}", value, status, source)


def _fitted(job: Setting) -> Iterator[Plain]:
    """What is fitted to end-to-end runs, with the runs behind it; a runtime file of one's own may say otherwise."""
    runtime, generation = on_cluster(job.runtime, job.cluster), job.cluster.accelerator.generation
    measured = job.cluster.calibration.scalars
    raw = load_mapping(fitted.FILE).value
    factors, other = raw["software_factor"], fitted.DEFAULT
    ladder = ((runtime.name, generation), (other, generation), (runtime.name, other), (other, other))
    entry = next(factors[name][of] for name, of in ladder if of in factors.get(name, {}))
    yield _of_runs(
        "runtime.software_factor", f"{job.runtime.factor(generation):.4g}", entry, runtime, "software_factor"
    )
    if "software_factor" in measured:
        yield _measured("cluster.software_factor", f"{runtime.cluster_factor:.4g}", measured["software_factor"])
    for name, value in (
        ("fragmentation", f"{runtime.fragmentation:.4g}"),
        ("context_bytes", gib(runtime.context_bytes)),
    ):
        if name in measured:
            yield _measured(f"runtime.{name}", value, measured[name])
            continue
        entry = raw[name].get(runtime.name, raw[name][other])
        yield _of_runs(f"runtime.{name}", value, entry, runtime, name)
    for kind in runtime.overlap_efficiency:
        if runtime.overlap.get(kind.replace("fsdp_", "dp_")):
            entry = raw["overlap_efficiency"].get(kind, {})
            yield _of_runs(
                f"overlap.{kind}", f"{runtime.overlap_efficiency[kind]:.3g} hidden", entry, runtime, "overlap"
            )


def _measured(name: str, value: str, entry: Entry) -> Plain:
    return _row(name, value, "measured", entry.source, entry.points)


def _of_runs(name: str, value: str, entry: Mapping[str, Any], runtime: Runtime, field: str) -> Plain:
    own = runtime.provenance.get(field)
    runs = entry.get("runs")
    if own and not runs:
        return _row(name, value, "assumed" if own.startswith("assumed") else "stated", own)
    note = entry.get("source") or entry.get("note") or "costmodel/fitted.yaml, written by benchmarks.fit"
    sources = f", {entry['sources']} sources" if entry.get("sources") else ""
    return _row(name, value, "fitted" if runs else "assumed", f"{note}{sources}", runs)


def _recipe(job: Setting) -> Iterator[Plain]:
    name = job.workload.precision.name
    if name in precision_names():
        yield _row(f"precision.{name}", name, "stated", precision_source(name))
    scaling = scaling_of(job.workload.precision)
    if scaling is not None:
        value = f"{scaling.operand_bytes:.4g} bytes an element, read {scaling.reads:.0f} times in 16 bits"
        yield _row(f"scaling.{scaling.name}", value, "stated", scaling.source)
