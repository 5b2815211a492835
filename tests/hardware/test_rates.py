"""Laws of the local operators' rates: what must hold on shapes that nobody measured."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distplan.hardware.accelerator import list_accelerators, load_accelerator
from distplan.hardware.errors import DistplanError
from distplan.hardware.rates import (
    attention_seconds,
    gemm_seconds,
    launch_seconds,
    memory_seconds,
    pcie_seconds,
    rates_for,
)

H100 = rates_for(load_accelerator("h100-sxm5-80gb"))
DEVICES = [
    rates_for(load_accelerator(name)) for name in ("a100-sxm4-80gb", "h100-sxm5-80gb", "b200-sxm-180gb", "mi300x")
]
aligned = st.integers(1, 300).map(lambda tiles: 64 * tiles)
device = st.sampled_from(DEVICES)


@given(device, aligned, aligned, aligned, st.sampled_from("mnk"), st.integers(1, 40), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_larger_product_is_never_faster(rates, m, n, k, grown, tiles, accumulate) -> None:
    sizes = {"m": m, "n": n, "k": k}
    larger = sizes | {grown: sizes[grown] + 64 * tiles}
    smaller_seconds, larger_seconds = (
        gemm_seconds(rates, x["m"], x["n"], x["k"], "bf16", accumulate=4.0 * accumulate) for x in (sizes, larger)
    )
    assert larger_seconds >= smaller_seconds


@given(device, aligned, aligned, aligned, st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_a_longer_contraction_is_never_less_efficient(rates, m, n, k, tiles) -> None:
    longer = k + 64 * tiles
    assert gemm_seconds(rates, m, n, longer, "bf16") / longer <= gemm_seconds(rates, m, n, k, "bf16") / k * (1 + 1e-12)


@given(device, aligned, aligned, aligned)
@settings(max_examples=100, deadline=None)
def test_no_product_beats_the_device(rates, m, n, k) -> None:
    seconds = gemm_seconds(rates, m, n, k, "bf16")
    of = rates.gemm["bf16"]
    assert seconds >= 2.0 * m * n * k / of.flops_per_second
    assert seconds >= 2.0 * (m * k + k * n + m * n) / of.bytes_per_second


@given(device, aligned, aligned, aligned, st.floats(1.0, 4.0))
@settings(max_examples=100, deadline=None)
def test_more_bandwidth_is_never_slower(rates, m, n, k, factor) -> None:
    of = rates.gemm["bf16"]
    wider = replace(rates, gemm={"bf16": replace(of, bytes_per_second=of.bytes_per_second * factor)})
    assert gemm_seconds(wider, m, n, k, "bf16") <= gemm_seconds(rates, m, n, k, "bf16")


@given(device, st.integers(1, 8), aligned, aligned, aligned)
@settings(max_examples=100, deadline=None)
def test_one_grouped_call_is_never_slower_than_its_products_one_by_one(rates, groups, m, n, k) -> None:
    of = rates.gemm["bf16"]
    free = replace(rates, gemm={"bf16": replace(of, group_latency=0.0)})
    one_by_one = groups * gemm_seconds(free, m, n, k, "bf16")
    assert gemm_seconds(free, m, n, k, "bf16", groups=groups) <= one_by_one * (1 + 1e-12)


def test_tensor_parallel_narrowing_costs_efficiency() -> None:
    """An eighth of n takes more than an eighth of the time, in every dtype and on every device."""
    for rates in DEVICES:
        whole, shard = gemm_seconds(rates, 2048, np.array([8192.0, 1024.0]), 4096, "bf16")
        assert whole / 8 < shard < whole


def test_few_rows_cost_the_weight_traffic() -> None:
    """Below a tile of rows the time is that of reading the weight, as in the tables of every device."""
    seconds = gemm_seconds(H100, 16, 8192, 8192, "bf16")
    reading = 2.0 * 8192 * 8192 / 3.35e12
    assert reading < seconds < 1.6 * reading


def test_dims_off_the_alignment_cost_what_was_measured() -> None:
    """d_ff 10922 against 10944 on H100: 398 against 273 TFLOP/s; whole 64 bytes lose nothing (10912)."""
    odd, half, good = gemm_seconds(H100, 8192, np.array([10922.0, 10912.0, 10944.0]), 4096, "bf16")
    assert odd / good == pytest.approx(398 / 273, rel=0.02)
    assert half <= good


def random_sizes(count: int) -> list[np.ndarray]:
    generator = np.random.default_rng(7)
    return [generator.integers(1, 30_000, count).astype(np.float64) for _ in range(3)]


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_product_alone_has_the_bits_it_has_in_a_batch(dtype: str, accumulate: bool) -> None:
    m, n, k = random_sizes(20_011)
    batch = gemm_seconds(H100, m, n, k, dtype, accumulate=4.0 * accumulate)
    for row in range(0, 20_011, 97):
        assert gemm_seconds(H100, m[row], n[row], k[row], dtype, accumulate=4.0 * accumulate) == batch[row]
    odd = [
        gemm_seconds(H100, m[s], n[s], k[s], dtype, accumulate=4.0 * accumulate)
        for s in np.array_split(range(20_011), 7)
    ]
    assert np.array_equal(np.concatenate(odd), batch)


def test_broadcast_shapes_give_the_bits_of_full_shapes() -> None:
    m, n, k = random_sizes(3000)
    operators, degrees = (m[:12, None], k[:12, None]), n[None, :]
    spread = gemm_seconds(H100, operators[0], degrees, operators[1], "bf16")
    full = gemm_seconds(H100, *np.broadcast_arrays(operators[0], degrees, operators[1]), "bf16")
    assert spread.shape == (12, 3000)
    assert np.array_equal(spread, full)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_alone_has_the_bits_it_has_in_a_batch(causal: bool, backward: bool) -> None:
    q, kv, flops = random_sizes(5003)
    q, flops = np.minimum(q, kv), flops * 1e9
    batch = attention_seconds(H100, flops, 128.0, q, kv, causal, backward)
    for row in range(0, 5003, 41):
        assert attention_seconds(H100, flops[row], 128.0, q[row], kv[row], causal, backward) == batch[row]


@given(device, st.integers(1, 512), st.integers(1, 64), st.integers(1, 64), st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_longer_or_wider_attention_is_never_faster(rates, heads, blocks, dims, causal, backward) -> None:
    def seconds(heads: int, length: int, head_dim: int) -> np.ndarray:
        full = 4.0 * heads * length * length * head_dim
        return attention_seconds(rates, full, head_dim, length, length, causal, backward)

    length, head_dim = 128 * blocks, 8 * dims
    base = seconds(heads, length, head_dim) * (1 - 1e-12)
    assert seconds(heads + 1, length, head_dim) >= base
    assert seconds(heads, length + 128, head_dim) >= base
    assert seconds(heads, length, head_dim + 8) >= base


def test_causal_attention_is_faster_than_full_but_less_efficient_at_short_lengths() -> None:
    """From FlashAttention's figures: at 512 causal reaches about 0.6 of the full rate, at 8k over 0.9 (d 128)."""
    for length, low, high in ((512, 0.5, 0.8), (8192, 0.85, 1.0)):
        full = 4.0 * 16384 / length * 16 * length * length * 128
        causal, whole = (attention_seconds(H100, full, 128, length, length, kind, False) for kind in (True, False))
        assert causal < whole
        assert low < (full / 2 / causal) / (full / whole) < high


def test_a_square_causal_kernel_executes_half_and_a_chunk_of_queries_more() -> None:
    """The last quarter of the queries sees 7/8 of the keys: four quarters of work 1/8, 3/8, 5/8, 7/8."""
    free = replace(
        H100, attention_forward=replace(H100.attention_forward, ramp=0.0, causal_ramp=0.0, tail_rows=0.0, latency=0.0)
    )
    whole, half, last = (
        attention_seconds(free, flops, 128, q, 8192, causal, False)
        for flops, q, causal in ((4e12, 8192, False), (4e12, 8192, True), (1e12, 2048, True))
    )
    assert half == pytest.approx(whole / 2)
    assert last == pytest.approx(whole / 4 * 7 / 8)


def test_small_copies_cost_their_latency_and_large_ones_the_bandwidth() -> None:
    small, large = memory_seconds(H100, np.array([1e3, 1e10]))
    assert small == pytest.approx(H100.kernel_latency, rel=0.01)
    assert 0.8 * 3.35e12 < 1e10 / large < 0.95 * 3.35e12
    assert memory_seconds(H100, 1e6, 4) > memory_seconds(H100, 1e6, 1)
    assert launch_seconds(H100, 3) == 3 * H100.launch_latency


def test_host_copies_run_at_the_measured_rate_of_pcie_5() -> None:
    assert 1e10 / pcie_seconds(H100, 1e10) == pytest.approx(51.5e9, rel=0.01)


def test_every_shipped_accelerator_has_rates_with_their_origins() -> None:
    for name in list_accelerators():
        accelerator = load_accelerator(name)
        rates = rates_for(accelerator)
        for dtype, of in rates.gemm.items():
            assert 0.3 < of.flops_per_second / accelerator.peak_flops[dtype] <= 1.25, (name, dtype)
        assert 0.5 < rates.memory_bandwidth / accelerator.memory_bandwidth <= 1.0, name
        assert 0.5 < rates.sustained <= 1.0, name
        assert 0.1 < rates.attention_backward.peak_fraction <= 1.0, name
        for constant, origin in rates.origins.items():
            assert origin.provenance in ("measured", "scaled", "assumed"), (name, constant)
            assert origin.source, (name, constant)


def test_a_device_of_a_generation_never_heard_of_gets_assumed_rates() -> None:
    unknown = replace(load_accelerator("h100-sxm5-80gb"), id="mine", generation="tomorrow")
    rates = rates_for(unknown)
    assert rates.origins["gemm.bf16.peak_fraction"].provenance == "assumed"
    assert gemm_seconds(rates, 4096, 4096, 4096, "bf16") > 0


def test_a_sibling_of_a_measured_device_gets_scaled_rates() -> None:
    origins = rates_for(load_accelerator("h800-sxm5-80gb")).origins
    assert origins["gemm.bf16.peak_fraction"].provenance == "scaled"
    assert H100.origins["gemm.bf16.peak_fraction"].provenance == "measured"


def test_a_dtype_that_the_device_lacks_is_refused_with_those_it_has() -> None:
    a100 = rates_for(load_accelerator("a100-sxm4-80gb"))
    refused = "a100-sxm4-80gb has no fp8 matrix rate; choose a precision that has one: bf16, fp16, tf32, fp32"
    with pytest.raises(DistplanError, match=refused):
        gemm_seconds(a100, 1024, 1024, 1024, "fp8")
    with pytest.raises(DistplanError, match="no fp8"):
        attention_seconds(a100, 1e12, 128, 1024, 1024, True, False, "fp8")
    with pytest.raises(DistplanError, match="no peak_flops"):
        rates_for(replace(load_accelerator("h100-sxm5-80gb"), peak_flops={"int8": 1e15}))


@pytest.mark.parametrize("rates", [rates_for(load_accelerator(n)) for n in ("a100-sxm4-80gb", "h100-sxm5-80gb")])
def test_a_weight_gradient_of_few_tokens_waits_for_its_buffer_whose_bytes_are_those_of_its_dtype(rates) -> None:
    """k = 64 tokens: reading and writing the buffer is all; an fp32 one is twice as much as a bf16 one."""
    wide, narrow = (gemm_seconds(rates, 8192, 8192, 64, "bf16", accumulate=size) for size in (4.0, 2.0))
    assert 1.8 < float(wide / narrow) < 2.05
