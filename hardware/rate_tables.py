"""Achievable rates of one accelerator's local operators, each constant with where it comes from.

`data/rates/fitted.yaml` is written by `python -m benchmarks.calibrate`; `data/rates/stated.yaml` holds what no table
measures, by hand, with sources. A constant that a device lacks is taken, in this order, from: the same device and
another dtype; its family (the generation: devices that share kernels), scaled by peak; the family that `stated.yaml`
says it is like; the mean of all families.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import yaml

from distplan.hardware.errors import DistplanError
from distplan.hardware.rate_types import AcceleratorLike, AttentionRates, GemmRates, Origin, Rates

MEASURED, SCALED, ASSUMED = "measured", "scaled", "assumed"
_SIBLING_DTYPES = {
    "bf16": ("fp16", "fp8", "tf32"),
    "fp16": ("bf16", "fp8", "tf32"),
    "fp8": ("bf16", "fp16"),
    "fp4": ("fp8", "bf16", "fp16"),
    "tf32": ("bf16", "fp16"),
    "fp32": (),
}
_OPERAND_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5625, "tf32": 4.0, "fp32": 4.0}
"""fp4 with its scale, one byte per 16 elements (NVFP4, arXiv 2509.25149, section 3)"""
_NARROW = ("fp8", "fp4")
"""products whose shape constants are those of fp8: fp4's are the same kernels at another rate (scaled)"""
_YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""the C parser where PyYAML has it: ten times faster, and these two files are read at every start"""
_RESULT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 2.0, "fp4": 2.0, "tf32": 4.0, "fp32": 4.0}


@cache
def _tables() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    folder = files("distplan.hardware") / "data" / "rates"
    fitted, stated = (
        yaml.load((folder / name).read_text(encoding="utf-8"), Loader=_YAML_LOADER)
        for name in ("fitted.yaml", "stated.yaml")
    )
    return fitted, stated


def _origin(entry: Mapping[str, Any], provenance: str | None = None) -> Origin:
    return Origin(
        provenance=provenance or entry["provenance"], points=int(entry["points"]), source=str(entry["source"])
    )


def like(family: str) -> tuple[str, ...]:
    """The family, then those whose constants stand in for what it lacks, nearest first; `default` is last."""
    _, stated = _tables()
    chain = [family]
    while chain[-1] != "default":
        chain.append(stated["families"].get(chain[-1], {}).get("like", "default"))
    return tuple(chain)


def _entry(family: str, *path: str) -> tuple[Mapping[str, Any], str, str]:
    """(constants under `path`, provenance, the family that lends them): its own, or the nearest that has any."""
    fitted, _ = _tables()
    for tried in like(family):
        node: Any = fitted["families"].get(tried, {})
        for key in path:
            node = node.get(key, {})
        if node:
            return node, str(node["provenance"]) if tried == family else ASSUMED, tried
    raise AssertionError(f"fitted.yaml has no default for {'.'.join(path)}")


def _fraction(accelerator: AcceleratorLike, family: str, dtype: str) -> tuple[float, Origin]:
    """Fraction of the peak that products reach: device, its other dtypes, family, default."""
    fitted, _ = _tables()
    own = fitted["accelerators"].get(accelerator.id, {}).get("gemm", {})
    for name in (dtype, *_SIBLING_DTYPES[dtype]):
        if name in own:
            return own[name]["value"], _origin(own[name], MEASURED if name == dtype else SCALED)
    base = "fp32" if dtype == "fp32" else "fp8" if dtype in _NARROW else "bf16"
    entry, provenance, _ = _entry(family, "gemm_fraction", base)
    return entry["value"], _origin(entry, SCALED if provenance == MEASURED else ASSUMED)


def _gemm_rates(
    accelerator: AcceleratorLike, family: str, dtype: str, sms: float
) -> tuple[GemmRates, dict[str, Origin]]:
    fraction, origin = _fraction(accelerator, family, dtype)
    shape, provenance, _ = _entry(family, "gemm", "fp8" if dtype in _NARROW else "bf16")
    accumulate, accumulate_provenance, _ = _entry(family, "accumulate_bytes")
    group, group_provenance, _ = _entry(family, "group_latency")
    rates = GemmRates(
        flops_per_second=accelerator.peak_flops[dtype] * fraction,
        bytes_per_second=accelerator.memory_bandwidth * shape["bandwidth_fraction"],
        tile_costs=tuple((float(m), float(n), float(cost)) for m, n, cost in shape["tile_costs"]),
        num_sms=sms,
        wave=shape["wave"] if accelerator.num_sms else 0.0,
        ramp=shape["ramp"],
        overlap=shape["overlap"],
        latency=shape["latency"],
        group_latency=group["value"],
        operand_bytes=_OPERAND_BYTES[dtype],
        result_bytes=_RESULT_BYTES[dtype],
        accumulate_bytes=accumulate["value"],
        cast_bytes=shape["cast_bytes"] if dtype in _NARROW else 0.0,
        cast_latency=shape["cast_latency"] if dtype in _NARROW else 0.0,
    )
    on_device = origin.provenance == MEASURED and provenance == MEASURED
    accumulate_provenance, group_provenance = (
        SCALED if found == MEASURED else found for found in (accumulate_provenance, group_provenance)
    )
    origins = {
        f"gemm.{dtype}.peak_fraction": origin,
        f"gemm.{dtype}.shape": _origin(shape, provenance if on_device or provenance == ASSUMED else SCALED),
        f"gemm.{dtype}.accumulate_bytes": _origin(accumulate, accumulate_provenance),
        f"gemm.{dtype}.group_latency": _origin(group, group_provenance),
    }
    return rates, origins


def _attention(
    accelerator: AcceleratorLike, family: str, direction: str, gemm_fraction: float
) -> tuple[AttentionRates, Origin]:
    """Own fraction of peak, or the family's times how much better or worse the device does at products."""
    fitted, _ = _tables()
    shape, provenance, lender = _entry(family, "attention", direction)
    own = fitted["accelerators"].get(accelerator.id, {}).get("attention", {}).get(direction)
    if own is not None:
        fraction, origin = own["value"], _origin(own)
    else:
        usual, _, _ = _entry(lender, "gemm_fraction", "bf16")
        fraction = min(1.0, shape["peak_fraction"] * gemm_fraction / usual["value"])
        origin = _origin(shape, SCALED if provenance == MEASURED else ASSUMED)
    rates = AttentionRates(
        peak_fraction=fraction,
        head_dim_64=shape["head_dim_64"],
        head_dim_256=shape["head_dim_256"],
        ramp=shape["ramp"],
        causal_ramp=shape["causal_ramp"],
        tail_rows=shape["tail_rows"] if accelerator.num_sms else 0.0,
        latency=shape["latency"],
    )
    return rates, origin


def _attention_kernels(family: str, origins: dict[str, Origin]) -> dict[str, float]:
    """Time of each older attention kernel over the best one's, from the nearest family that has figures."""
    _, stated = _tables()
    for tried in like(family):
        entries = stated["attention_kernels"].get(tried)
        if entries:
            for name, entry in entries.items():
                provenance = entry["provenance"] if tried == family else ASSUMED
                origins[f"attention_kernel.{name}"] = _origin(entry, provenance)
            return {name: float(entry["value"]) for name, entry in entries.items()}
    return {}


def _host(accelerator: AcceleratorLike) -> tuple[float, Origin]:
    """(achieved bytes/s, origin) of the link to the host: own fraction of nominal, or that of its kind of link."""
    fitted, stated = _tables()
    nominal = accelerator.pcie_bandwidth or stated["constants"]["host_nominal"]["value"]
    own = fitted["accelerators"].get(accelerator.id, {}).get("host_fraction")
    kind = "c2c" if nominal > stated["constants"]["fastest_pcie"]["value"] else "pcie"
    entry = own or fitted["hosts"][kind]
    known = own is not None or accelerator.pcie_bandwidth > 0
    return nominal * entry["value"], _origin(entry, MEASURED if own else SCALED if known else ASSUMED)


def _host_operator(accelerator: AcceleratorLike, family: str) -> tuple[float, Origin]:
    """Seconds of an eager operator on the accelerator's usual host, or that of the nearest generation."""
    _, stated = _tables()
    entries = stated["host_operators"]
    name = next(name for name in (accelerator.id, *like(family)) if name in entries)
    own = name in (accelerator.id, family)
    return float(entries[name]["value"]), _origin(entries[name], None if own else ASSUMED)


def _scalar(accelerator: AcceleratorLike, family: str, name: str) -> tuple[float, Origin]:
    fitted, _ = _tables()
    own = fitted["accelerators"].get(accelerator.id, {}).get(name)
    if own is not None:
        return own["value"], _origin(own)
    entry, provenance, _ = _entry(family, name)
    return entry["value"], _origin(entry, SCALED if provenance == MEASURED else ASSUMED)


def rates_for(accelerator: AcceleratorLike) -> Rates:
    """Constants for one accelerator, with the origin of each.

    Errors raised: DistplanError where the accelerator has no matrix peak at all.
    """
    _, stated = _tables()
    family = accelerator.generation
    sms = float(accelerator.num_sms or 1)
    dtypes = [dtype for dtype in _OPERAND_BYTES if accelerator.peak_flops.get(dtype)]
    if not dtypes:
        raise DistplanError(f"accelerator {accelerator.id}: no peak_flops for any of {', '.join(_OPERAND_BYTES)}")
    made = {dtype: _gemm_rates(accelerator, family, dtype, sms) for dtype in dtypes}
    origins = {name: origin for _, of_dtype in made.values() for name, origin in of_dtype.items()}
    base = "bf16" if "bf16" in dtypes else dtypes[0]
    fraction, _ = _fraction(accelerator, family, base)
    forward, origins["attention_forward"] = _attention(accelerator, family, "forward", fraction)
    backward, origins["attention_backward"] = _attention(accelerator, family, "backward", fraction)
    memory, origins["memory_bandwidth"] = _scalar(accelerator, family, "memory_fraction")
    host, origins["host_bandwidth"] = _host(accelerator)
    sustained, origins["sustained"] = _scalar(accelerator, family, "sustained")
    operator, origins["host_operator"] = _host_operator(accelerator, family)
    constants = stated["constants"]
    origins |= {name: _origin(entry) for name, entry in constants.items()}
    return Rates(
        accelerator=accelerator.id,
        family=family,
        num_sms=sms,
        peak_flops=MappingProxyType(dict(accelerator.peak_flops)),
        gemm=MappingProxyType({dtype: rates for dtype, (rates, _) in made.items()}),
        misalignment=(constants["misaligned_64"]["value"], constants["misaligned_16"]["value"]),
        attention_forward=forward,
        attention_backward=backward,
        memory_bandwidth=accelerator.memory_bandwidth * memory,
        kernel_latency=constants["kernel_latency"]["value"],
        launch_latency=constants["launch_latency"]["value"],
        host_operator=operator,
        host_bandwidth=host,
        host_latency=constants["host_latency"]["value"],
        sustained=sustained,
        origins=MappingProxyType(origins),
        attention_kernels=MappingProxyType(_attention_kernels(family, origins)),
    )
