"""Narrow recipes: bytes per parameter and per activation, casts and rates, as Transformer Engine and papers state."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest

from distplan.costmodel.case import case_of
from distplan.costmodel.casting import Casts, casts_of, narrow_weights, scaling_named, scaling_names, scaling_of
from distplan.costmodel.estimate import Estimate, estimate
from distplan.costmodel.graph import segments, weight_elements
from distplan.costmodel.lower import Work, lower
from distplan.costmodel.model import Attention, LayerKind, Mlp, Model, Moe, Precision
from distplan.costmodel.model_file import load_model
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.strategy import Strategies, Strategy
from distplan.costmodel.tables import engine
from distplan.costmodel.unfold_memory import held
from distplan.costmodel.workload import precision, precision_names, workload
from distplan.hardware.accelerator import load_accelerator
from distplan.hardware.cluster import load_cluster
from distplan.hardware.errors import DistplanError
from distplan.hardware.rates import gemm_seconds, rates_for

H100, B200, A100 = (load_cluster(name) for name in ("dgx-h100", "dgx-b200", "dgx-a100"))
MEGATRON = load_runtime("megatron")
NARROW = [name for name in precision_names() if scaling_of(precision(name)) is not None]


@cache
def dense(hidden: int = 1024, ffn: int = 4096, layers: int = 8) -> Model:
    """No gate: a layer's weights are 4·hidden² + 2·hidden·ffn, all of linear layers."""
    mixer = Attention(heads=hidden // 64, kv_heads=hidden // 64, head_dim=64, v_head_dim=64)
    kind = LayerKind(name="layer", mixer=mixer, ffn=Mlp(ffn=ffn, gated=False, activation="gelu"))
    return Model(
        name="dense", hidden=hidden, vocab=32000, kinds={"layer": kind}, pattern=("layer",) * layers,
        tied_embedding=False,
    )  # fmt: skip


@cache
def mixture() -> Model:
    mixer = Attention(heads=16, kv_heads=16, head_dim=64, v_head_dim=64)
    kind = LayerKind(name="layer", mixer=mixer, ffn=Moe(experts=16, top_k=2, ffn=2048, shared_ffn=512))
    return Model(
        name="mixture", hidden=1024, vocab=32000, kinds={"layer": kind}, pattern=("layer",) * 4, tied_embedding=False,
    )  # fmt: skip


def priced(
    name: str | Precision, cluster: object = H100, model: Model | None = None, seq_len: int = 2048, batch: int = 32,
    runtime: object = MEGATRON, **degrees: object,
) -> Estimate:  # fmt: skip
    model = model or dense()
    recipe = precision(name) if isinstance(name, str) else name
    work = replace(workload(model, {}, gpus=1, overrides={"seq_len": seq_len, "global_batch": batch}), precision=recipe)
    strategy = Strategy(**{"zero": 0, **degrees})  # type: ignore[arg-type]
    return estimate(model, work, cluster, runtime, strategy, detail=True)  # type: ignore[arg-type]


def part(found: Estimate, name: str) -> float:
    return float(found.memory[name][0])


def works_of(name: str | Precision, model: Model, cluster: object = H100, recompute: str = "none") -> list[Work]:
    recipe = precision(name) if isinstance(name, str) else name
    work = replace(workload(model, {}, gpus=1, overrides={"seq_len": 2048}), precision=recipe)
    eng = engine(model, work, cluster, MEGATRON)  # type: ignore[arg-type]
    return list(lower(eng.program(eng.structure("true", "none", recompute)), eng.workload).works)


LINEARS = 8 * (4 * 1024**2 + 2 * 1024 * 4096)
"""weights of the narrow products of dense()"""


@pytest.mark.parametrize(
    "name, cluster, beside",
    [
        ("fp8", H100, 2.0),  # the cast weight and its transpose (Transformer Engine docs, handling transposes)
        ("fp8", B200, 1.0),  # Blackwell reads one copy both ways
        ("fp8-current", H100, 2.0),
        ("fp8-params", H100, 0.0),  # 1 + 1 instead of 2
        ("fp8-params", B200, -1.0),
        ("fp8-blockwise", H100, 2.0 * (1.0 + 4.0 / 128**2)),
        ("mxfp8", B200, 2.0 * (1.0 + 1.0 / 32)),
        ("mxfp8-params", B200, 2.0 / 32),
        ("fp8-torchao", H100, 2.0),  # fp32 parameters; casts are not kept
    ],
)
def test_bytes_per_parameter_of_a_linear_layer(name: str, cluster: object, beside: float) -> None:
    """Beside the two of bf16 (Transformer Engine docs, memory usage: 2 MB and 1 MB for a megaelement)."""
    plain, found = part(priced("bf16", cluster), "parameters"), part(priced(name, cluster), "parameters")
    others = 2.0 * (plain / 2.0 - LINEARS) if name == "fp8-torchao" else 0.0
    assert found - plain == pytest.approx(beside * LINEARS + others, rel=1e-12)


def test_nvfp4_keeps_its_copies_of_the_middle_layers_only() -> None:
    """4 bits and 1/16 byte twice, of all but two layers at each end (arXiv 2509.25149; Megatron Core's cookbook)."""
    added = part(priced("nvfp4", B200), "parameters") - part(priced("bf16", B200), "parameters")
    assert added == pytest.approx(LINEARS * 4 / 8 * 2.0 * (0.5 + 1.0 / 16), rel=1e-12)


def test_deepseek_v3_keeps_moments_in_bf16_and_master_and_gradients_in_fp32() -> None:
    """arXiv 2412.19437, section 3.3.3: 4 + 2 + 2 of optimizer states per parameter, and 4 of gradients."""
    found, plain = priced("deepseek-v3"), priced("bf16")
    assert part(found, "optimizer") == pytest.approx(part(plain, "optimizer") * 8 / 12, rel=1e-12)
    assert part(found, "gradients") == part(plain, "gradients")


@pytest.mark.parametrize(
    "name, cluster, element", [("fp8", H100, 1.0), ("fp8-blockwise", H100, 1 + 4 / 128), ("mxfp8", B200, 1 + 1 / 32)]
)
def test_inputs_of_linear_layers_are_kept_cast(name: str, cluster: object, element: float) -> None:
    """Two norms' outputs and the MLP's inner value are kept in one byte and not two; attention's output, which its
    own backward reads in bf16, in both (Transformer Engine docs, memory usage, 2 and 4)."""
    plain, found = part(priced("bf16", cluster), "activations"), part(priced(name, cluster), "activations")
    tokens, hidden, ffn, layers = 2048, 1024, 4096, 8
    saved = tokens * layers * ((2 * hidden + ffn) * (2.0 - element) - hidden * element)
    assert plain - found == pytest.approx(saved, rel=1e-12)


def test_weights_gradients_in_bf16_keep_their_inputs_in_bf16() -> None:
    """Megatron Core's --fp8-wgrad False."""
    recipe = replace(precision("fp8"), wgrad="bf16")
    assert part(priced(recipe), "activations") == part(priced("bf16"), "activations")
    assert {w.dtype for w in works_of(recipe, dense()) if w.accumulate} == {"bf16"}


def test_torchao_keeps_inputs_in_bf16() -> None:
    assert part(priced("fp8-torchao"), "activations") == part(priced("bf16"), "activations")


def test_a_recomputed_layer_keeps_only_its_input_which_is_bf16() -> None:
    layers = {"recompute": "full", "recompute_layers": 8}
    assert part(priced("fp8", **layers), "activations") == part(priced("bf16", **layers), "activations")


@pytest.mark.parametrize("name", [name for name in NARROW if name != "nvfp4"])
def test_head_router_and_attention_stay_in_bf16_and_other_products_do_not(name: str) -> None:
    cluster = B200 if "mx" in name else H100
    works = [w for w in works_of(name, mixture(), cluster) if w.category < 2]
    high = [w for w in works if "head." in w.name or ".router" in w.name or ".core" in w.name]
    assert len(high) > 6 and {w.dtype for w in high} == {"bf16"}
    assert {w.dtype for w in works if w not in high} == {"fp8"}


def test_a_head_that_is_not_kept_is_cast() -> None:
    recipe = replace(precision("fp8"), keeps=("attention", "embedding", "router"))
    assert {w.dtype for w in works_of(recipe, dense()) if "head.output" in w.name and w.category == 0} == {"fp8"}


def test_the_first_and_last_layers_of_nvfp4_have_no_narrow_product() -> None:
    work = replace(workload(dense(), {}, gpus=1, overrides={"seq_len": 2048}), precision=precision("nvfp4"))
    eng = engine(dense(), work, B200, MEGATRON)
    kinds = [eng.segments[number].name for number in eng.pattern]
    assert kinds == ["layer.layer.high"] * 2 + ["layer.layer"] * 4 + ["layer.layer.high"] * 2
    assert {(eng.segments[w.segment].name, w.dtype) for w in works_of("nvfp4", dense(), B200) if w.category == 0} == {
        ("layer.layer.high", "bf16"),
        ("layer.layer", "fp4"),
        ("head", "bf16"),
    }


@pytest.mark.parametrize("degrees", [{}, {"tp": 2, "pp": 2, "sp": True}])
def test_with_all_layers_kept_a_narrow_recipe_is_bf16(degrees: dict[str, object]) -> None:
    plain, kept = priced("bf16", **degrees), priced(replace(precision("fp8"), first_layers=5, last_layers=3), **degrees)
    assert plain.step_seconds[0] == kept.step_seconds[0]
    assert plain.device_bytes[0] == kept.device_bytes[0]


def casts(name: str, cluster: object = H100) -> Casts:
    work = replace(workload(dense(), {}, gpus=1, overrides={"seq_len": 2048}), precision=precision(name))
    eng = engine(dense(), work, cluster, MEGATRON)  # type: ignore[arg-type]
    return casts_of(eng.program(eng.structure("true", "none", "none"))[1], eng.workload.precision)


@pytest.mark.parametrize("name, reads", [("fp8", 2.0), ("fp8-current", 4.0), ("fp8-blockwise", 2.0)])
def test_a_cast_reads_once_or_twice_and_writes_both_layouts(name: str, reads: float) -> None:
    """Current scaling is a read for the largest element and one to cast (Transformer Engine docs)."""
    element = scaling_named(precision(name).scaling).operand_bytes
    found = {cast.bytes_per_element for kernels in casts(name).kernels.values() for cast in kernels}
    assert found == {reads + 2.0 * element}


def test_every_operand_is_cast_once_in_a_phase() -> None:
    """Inputs of q, k, v together, of out, up and down forward; six gradients from above backward. Delayed scaling
    hides the two that a norm makes (LayerNormLinear)."""

    def counts(name: str) -> tuple[int, int]:
        kernels = casts(name).kernels
        forward = sum(len(found) for (_, phase), found in kernels.items() if phase == "forward")
        return forward, sum(len(found) for found in kernels.values()) - forward

    assert counts("fp8-current") == (4, 6)
    assert counts("fp8") == (2, 6)


def test_gathers_on_tp_carry_casts_and_reductions_do_not() -> None:
    """Transformer Engine docs, distributed training: inputs and output gradients travel cast."""

    def payloads(name: str) -> dict[tuple[str, str, str], float]:
        found = priced(name, tp=4, sp=True).communication
        return {(c.name, c.kind, c.phase): float(c.payload_bytes[0]) for c in found if c.axis.startswith("tp")}

    plain, cast = payloads("bf16"), payloads("fp8")
    assert plain.keys() == cast.keys()
    layers = {key: cast[key] / plain[key] for key in plain if key[0].startswith("layer")}
    assert {ratio for key, ratio in layers.items() if key[1] == "all_gather"} == {0.5}
    assert {ratio for key, ratio in layers.items() if key[1] == "reduce_scatter"} == {1.0}
    assert all(cast[key] == plain[key] for key in plain if key[0].startswith(("head", "embedding")))


def test_dispatch_of_deepseek_v3_is_in_fp8_and_combine_in_bf16() -> None:
    """arXiv 2412.19437, section 3.3.3; the gradient before the down-projections is dispatched in fp8 too."""

    def payloads(name: str) -> dict[str, list[float]]:
        found = priced(name, model=mixture(), dp_shard=8, ep=8).communication
        calls = [c for c in found if c.axis == "ep" and c.kind == "all_to_all"]
        phases = ("forward", "backward")
        return {phase: [float(c.payload_bytes[0]) for c in calls if c.phase == phase] for phase in phases}

    plain, cast = payloads("fp8"), payloads("deepseek-v3")
    for phase in plain:
        ratios = sorted(a / b for a, b in zip(cast[phase], plain[phase], strict=True))
        assert pytest.approx(ratios[0]) == (1.0 + 4.0 / 128) / 2 and ratios[-1] == 1.0


def gathered(name: str, cluster: object = H100) -> float:
    """Bytes of parameters that one GPU gives to the all-gather of a step."""
    found = priced(name, cluster, dp_shard=8, zero=1).communication
    return sum(float(c.payload_bytes[0]) for c in found if c.name == "parameters")


@pytest.mark.parametrize("name, ratio", [("fp8-params", 0.5), ("fp8-blockwise-params", (1 + 4 / 128**2) / 2)])
def test_parameters_kept_in_fp8_are_gathered_in_fp8(name: str, ratio: float) -> None:
    """--fp8-param-gather; embedding, head and norms still travel in bf16."""
    assert gathered("bf16") - gathered(name) == pytest.approx(2.0 * LINEARS * (1 - ratio) / 8, rel=1e-9)
    assert gathered("fp8") == gathered("bf16")


def test_mxfp8_parameters_are_gathered_in_bf16() -> None:
    """Rows and columns are cast apart, from 16 bits (Megatron Core: the gradient buffer is the gather's)."""
    assert gathered("mxfp8-params", B200) == gathered("bf16", B200)


def test_fp8_pays_on_large_layers_and_not_on_tiny_ones() -> None:
    """Casts and launches cost more than products of 256 save."""
    small, large = (dense(256, 1024, 4), 256), (dense(8192, 28672, 2), 4096)

    def gain(model: Model, seq_len: int) -> float:
        plain, cast = (priced(name, model=model, seq_len=seq_len).step_seconds[0] for name in ("bf16", "fp8-current"))
        return float(plain / cast)

    assert gain(*small) < 1.0
    assert gain(*large) > 1.2


@pytest.mark.parametrize("name", NARROW)
def test_no_recipe_is_cheaper_than_bf16_without_its_products(name: str) -> None:
    """Only products and what is sent get faster: kernels that move memory never do."""
    cluster = B200 if name.startswith(("mx", "nv")) else H100
    memory, plain = (float(priced(n, cluster).time["memory-bound"][0]) for n in (name, "bf16"))
    assert memory > plain


def test_fp4_runs_at_fp8s_share_of_its_own_peak_and_says_that_it_is_scaled() -> None:
    accelerator = load_accelerator("b200-sxm-180gb")
    rates = rates_for(accelerator)
    share = {dtype: rates.gemm[dtype].flops_per_second / accelerator.peak_flops[dtype] for dtype in ("fp4", "fp8")}
    assert share["fp4"] == share["fp8"]
    assert rates.origins["gemm.fp4.peak_fraction"].provenance == "scaled"
    big = [float(gemm_seconds(rates, 16384, 16384, 16384, dtype, cast_input=False)) for dtype in ("fp4", "fp8")]
    assert big[1] / big[0] == pytest.approx(accelerator.peak_flops["fp4"] / accelerator.peak_flops["fp8"], rel=0.05)


@pytest.mark.parametrize(
    "name, cluster, said",
    [
        ("fp8", A100, "needs products in fp8, which NVIDIA A100"),
        ("bf16", load_cluster("dgx-v100"), "it has fp32, fp16"),
        ("nvfp4", H100, "needs products in fp4"),
        ("mxfp8", H100, "only blackwell and cdna4"),
        ("fp8-blockwise", load_cluster("l40s-1to8"), "only hopper and blackwell"),
    ],
)
def test_what_an_accelerator_lacks_is_one_clear_error(name: str, cluster: object, said: str) -> None:
    with pytest.raises(DistplanError) as caught:
        priced(name, cluster)
    assert said in str(caught.value) and "\n" not in str(caught.value) and "run there: " in str(caught.value)


@pytest.mark.parametrize("name", ["fp8", "fp8-params", "deepseek-v3", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("zero, runtime", [(1, "megatron"), (3, "torchtitan")])
def test_tensors_add_up_to_memory(name: str, zero: int, runtime: str) -> None:
    model = mixture()
    work = workload(model, {}, gpus=8, overrides={"global_batch": 32, "seq_len": 1024, "precision": name})
    rules, cluster = load_runtime(runtime), B200 if name in ("mxfp8", "nvfp4") else H100
    strategy = Strategy(dp_shard=4, tp=2, sp=True, ep=2, zero=zero)
    found = estimate(model, work, cluster, rules, strategy, detail=True)
    tensors = held(case_of(model, work, cluster, rules, strategy, found))
    for name_of_part in ("parameters", "gradients", "optimizer", "activations"):
        total = sum(tensor.num_bytes for tensor in tensors if tensor.part == name_of_part)
        if part(found, name_of_part):
            assert total == pytest.approx(part(found, name_of_part), rel=1e-6)


@pytest.mark.parametrize("name", ["fp8", "deepseek-v3", "fp8-params"])
def test_a_row_alone_has_the_bits_of_a_batch(name: str) -> None:
    rows = [
        Strategy(dp_shard=16 // (tp * pp), tp=tp, pp=pp, ep=ep, sp=tp > 1, micro_batch=mb, recompute=again)
        for tp in (1, 2, 4) for pp in (1, 2) for ep in (1, 2) for mb in (1, 2) for again in ("none", "full")
    ]  # fmt: skip
    work = replace(workload(mixture(), {}, gpus=16, overrides={"global_batch": 64}), precision=precision(name))
    batch = estimate(mixture(), work, H100, MEGATRON, Strategies.of(rows), detail=False)
    for at, row in enumerate(rows):
        alone = estimate(mixture(), work, H100, MEGATRON, Strategies.of([row]), detail=False)
        for f in fields(Estimate):
            value = getattr(batch, f.name)
            if isinstance(value, np.ndarray):
                assert getattr(alone, f.name)[0] == value[at], f.name


def test_narrow_weights_are_what_a_hand_counts() -> None:
    work = replace(workload(dense(), {}, gpus=1), precision=precision("fp8"))
    parts = segments(dense(), work, True)
    names = {part.name: narrow_weights(part, work.precision) for part in parts}
    assert not names["embedding"] and not names["head"]
    total = sum(weight_elements(parts[1], weight) for weight in parts[1].weights if weight.name in names["layer"])
    assert 8 * total == LINEARS


def test_adapters_stay_in_bf16() -> None:
    """Only the frozen matrices are cast."""
    work = workload(dense(), {}, gpus=1, overrides={"lora_rank": 16, "precision": "fp8"})
    part_of = segments(dense(), work, True)[1]
    assert not any("lora" in name for name in narrow_weights(part_of, work.precision))


@pytest.mark.parametrize("name", scaling_names())
def test_every_scaling_has_a_source(name: str) -> None:
    assert len(scaling_named(name).source) > 40


WRONG = {
    "{like: fp8, scaling: mxx}": "mxx",
    "{like: bf16, scaling: mx}": "matmul is neither fp8 nor fp4",
    "{like: fp8, keeps: [head]}": "attention in fp8 is not modelled",
    "{like: fp8, sends: [dp]}": "'dp' is not one of tp, ep",
    "{like: fp8, wgrad: fp16}": "fp16",
    "{like: nvfp4, first_layers: -1}": "first_layers",
}


@pytest.mark.parametrize("section", WRONG)
def test_a_wrong_recipe_is_said(section: str, tmp_path: object) -> None:
    path = tmp_path / "m.yaml"  # type: ignore[operator]
    path.write_text(
        "layers: 2\nhidden: 256\nheads: 4\nffn: 1024\nvocab: 1000\nmax_seq_len: 1024\n"
        f"workload:\n  precision: {section}\n"
    )
    with pytest.raises(DistplanError) as caught:
        load_model(str(path))
    assert WRONG[section] in str(caught.value)


def test_a_recipe_of_ones_own_starts_from_another(tmp_path: object) -> None:
    path = tmp_path / "m.yaml"  # type: ignore[operator]
    path.write_text(
        "layers: 12\nhidden: 256\nheads: 4\nffn: 1024\nvocab: 1000\nmax_seq_len: 1024\n"
        "workload:\n  precision: {like: nvfp4, last_layers: 8, keeps: [attention, embedding, router]}\n"
    )
    found = load_model(str(path)).workload["precision"]
    assert (found.matmul, found.scaling, found.first_layers, found.last_layers) == ("fp4", "nv", 2, 8)
    assert "head" not in found.keeps


def test_fp8_products_of_a_recipe_that_names_no_scaling_are_torchaos() -> None:
    assert scaling_of(replace(precision("bf16-sharded"), matmul="fp8")) == scaling_named("torchao")
