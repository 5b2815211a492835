"""Image towers: published sizes, attention within an image, frozen parts, and what they add to the first stage."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from distplan.costmodel.by_stage import memory_by_stage
from distplan.costmodel.case import case_of
from distplan.costmodel.estimate import Estimate, estimate
from distplan.costmodel.graph import parameters, segments, vision_parameters, vision_segments, weight_elements
from distplan.costmodel.lower import Work, lower
from distplan.costmodel.model import Attention, LayerKind, Mlp, Model, Vision, Workload
from distplan.costmodel.model_file import load_model
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.strategy import Strategy
from distplan.costmodel.tables import engine
from distplan.costmodel.unfold_memory import held
from distplan.costmodel.workload import workload
from distplan.hardware.cluster import load_cluster
from distplan.hardware.errors import DistplanError

H100 = load_cluster("dgx-h100")
MEGATRON = load_runtime("megatron")
QWEN = {
    "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064, "max_position_embeddings": 32768,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma-3-27b": {
        "model_type": "gemma3", "mm_tokens_per_image": 256,
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32,
            "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21504,
        },
        "vision_config": {
            "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "num_attention_heads": 16,
            "num_hidden_layers": 27, "patch_size": 14,
        },
    },
    "qwen2-vl-7b": {
        "model_type": "qwen2_vl", **QWEN,
        "vision_config": {
            "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 3584,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
    },
    "llava-1.5-7b": {
        "model_type": "llava", "text_config": {"model_type": "llama", "hidden_size": 4096},
        "vision_config": {
            "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "num_attention_heads": 16,
            "num_hidden_layers": 24, "patch_size": 14,
        },
    },
    "internvl": {
        "model_type": "internvl", "downsample_ratio": 0.5, "text_config": {"model_type": "qwen2", **QWEN},
        "vision_config": {
            "hidden_size": 1024, "image_size": [448, 448], "intermediate_size": 4096, "num_attention_heads": 16,
            "num_hidden_layers": 24, "patch_size": [14, 14],
        },
    },
    "llama-4": {
        "model_type": "llama4", "text_config": {"model_type": "llama4_text", "hidden_size": 5120},
        "vision_config": {
            "hidden_size": 1408, "image_size": 336, "intermediate_size": 5632, "num_attention_heads": 16,
            "num_hidden_layers": 34, "patch_size": 14, "pixel_shuffle_ratio": 0.5, "projector_output_dim": 4096,
        },
    },
}  # fmt: skip


def loaded(name: str, folder: Path, **vision: object) -> Any:
    config = json.loads(json.dumps(CONFIGS[name]))
    config["vision_config"] |= vision
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return load_model(str(path))


@cache
def small(**more: float) -> Model:
    """A tower of 4 layers of width 256: 12·256² + 13·256 each, biases and two norms with them."""
    mixer = Attention(heads=8, kv_heads=8, head_dim=64, v_head_dim=64)
    kind = LayerKind(name="layer", mixer=mixer, ffn=Mlp(ffn=2048, gated=False, activation="gelu"))
    vision = Vision(hidden=256, layers=4, heads=4, ffn=1024, patches=256, pixels=588, tokens=64)
    return Model(
        name="small", hidden=512, vocab=32000, kinds={"layer": kind}, pattern=("layer",) * 4, tied_embedding=False,
        vision=replace(vision, **more),  # type: ignore[arg-type]
    )  # fmt: skip


def work(model: Model, images: float, **more: object) -> Workload:
    given = {"seq_len": 2048, "global_batch": 32, "images_per_sequence": images, **more}
    return workload(model, {}, gpus=8, overrides=given)


def priced(
    images: float, model: Model | None = None, more: dict[str, object] | None = None, **degrees: int
) -> Estimate:
    model = model or small()
    strategy = Strategy(**{"zero": 0, **degrees})  # type: ignore[arg-type]
    return estimate(model, work(model, images, **(more or {})), H100, MEGATRON, strategy, detail=True)


def part(found: Estimate, name: str) -> float:
    return float(found.memory[name][0])


@pytest.mark.parametrize(
    "name, millions",
    [
        ("gemma-3-27b", 417.0),  # Gemma 3 report (arXiv 2503.19786), table 1: vision encoder
        ("qwen2-vl-7b", 675.0),  # Qwen2-VL (arXiv 2409.12191), table 1: vision encoder, its merger included
        ("llava-1.5-7b", 304.0 + 21.0),  # CLIP ViT-L/14-336 and LLaVA-1.5's projector of two matrices
        ("internvl", 304.0 + 27.5),  # InternViT-300M-448px and 4096 to 3584 to 3584
        ("llama-4", 870.0),  # Llama 4 Scout: 108.64 B with the tower, 107.77 B without
    ],
)
def test_a_towers_parameters_are_those_that_are_published(name: str, millions: float, tmp_path: Path) -> None:
    found = loaded(name, tmp_path)
    assert vision_parameters(found.model, workload(found.model, {}, gpus=1)) / 1e6 == pytest.approx(millions, rel=0.02)


@pytest.mark.parametrize(
    "name, patches, tokens",
    [("gemma-3-27b", 4096, 256), ("llava-1.5-7b", 576, 576), ("internvl", 1024, 256), ("llama-4", 576, 144)],
)
def test_an_image_becomes_as_many_tokens_as_its_processor_makes(
    name: str, patches: int, tokens: int, tmp_path: Path
) -> None:
    vision = loaded(name, tmp_path).model.vision
    assert (vision.patches, vision.tokens) == (patches, tokens)


def test_the_towers_are_in_no_published_total(tmp_path: Path) -> None:
    found = loaded("gemma-3-27b", tmp_path)
    given = workload(found.model, {}, gpus=1, overrides={"images_per_sequence": 4})
    plain = replace(given, images_per_sequence=0.0)
    assert parameters(found.model, given) == parameters(replace(found.model, vision=None), plain)
    assert any("not counted" in note for note in found.notes)


def test_an_image_without_a_size_is_said(tmp_path: Path) -> None:
    assert any("896 x 896 is assumed" in note for note in loaded("qwen2-vl-7b", tmp_path).notes)
    assert loaded("qwen2-vl-7b", tmp_path, image_size=448).model.vision.patches == 1024


def test_a_tower_of_unknown_size_is_left_out_in_words(tmp_path: Path) -> None:
    found = loaded("gemma-3-27b", tmp_path, image_size=None)
    assert found.model.vision is None
    assert any("image_size" in note and "left out" in note for note in found.notes)


@pytest.mark.parametrize(
    "wrong, said",
    [({"num_hidden_layers": -1}, "num_hidden_layers"), ({"num_attention_heads": 7}, "heads do not divide"),
     ({"image_size": 10}, "holds no patch"), ({"patch_size": "14"}, "patch_size")],
)  # fmt: skip
def test_a_tower_that_cannot_be_is_an_error(wrong: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(DistplanError, match=said):
        loaded("gemma-3-27b", tmp_path, **wrong)


def test_text_only_training_has_no_tower() -> None:
    without = priced(0, replace(small(), vision=None))
    found = priced(0)
    assert found.step_seconds[0] == without.step_seconds[0]
    assert found.device_bytes[0] == without.device_bytes[0]


def test_weights_count_once_however_many_images() -> None:
    one, four = priced(1), priced(4)
    added = part(one, "parameters") - part(priced(0), "parameters")
    assert added == pytest.approx(2.0 * vision_parameters(small(), work(small(), 1)), rel=1e-12)
    assert part(four, "parameters") == part(one, "parameters")


def test_activations_grow_with_the_images() -> None:
    none, one, four = (part(priced(images), "activations") for images in (0, 1, 4))
    assert four - none == pytest.approx(4 * (one - none), rel=1e-12)


def test_the_tower_is_the_first_stages() -> None:
    """Later stages hold what they held."""
    strategy = Strategy(pp=4, zero=0)

    def stages(images: float) -> list[float]:
        given = work(small(), images)
        found = estimate(small(), given, H100, MEGATRON, strategy, detail=True)
        case = case_of(small(), given, H100, MEGATRON, strategy, found)
        return [stage.parts["parameters"] + stage.parts["activations"] for stage in memory_by_stage(case)]

    plain, found = stages(0), stages(4)
    assert found[0] > plain[0] + 2.0 * vision_parameters(small(), work(small(), 4))
    assert found[1:] == plain[1:]


def attentions(images: float) -> list[Work]:
    eng = engine(small(), work(small(), images), H100, MEGATRON)
    works = lower(eng.program(eng.structure("false", "none", "none")), eng.workload).works
    return [w for w in works if w.name.startswith("vision.") and w.category == 1]


def test_a_patch_sees_all_of_its_image_and_no_other() -> None:
    """Scores over the square of all patches: one in `images` of them, and none is masked."""
    for images in (1.0, 4.0):
        found = attentions(images)
        assert len(found) == 2 and {w.times for w in found} == {4.0}
        assert all(w.full and w.share == 1.0 / images and w.length == 1.0 / images for w in found)


def hand_flops(images: float) -> float:
    """Forward FLOPs of a tower: 2 per weight and patch, and 4 · patches² · hidden of attention per layer and image."""
    v = small().vision
    assert v is not None
    matrices = v.layers * (4 * v.hidden**2 + 2 * v.hidden * v.ffn) + v.pixels * v.hidden
    projector = v.hidden * 4 * 512
    attention = v.layers * 4 * v.patches**2 * v.hidden
    return images * (2.0 * matrices * v.patches + 2.0 * projector * v.tokens + attention)


def test_flops_are_what_a_hand_counts() -> None:
    """Forward and twice that backward; pixels have no gradient. Flash attention runs 3.5 times its forward."""
    v = small().vision
    assert v is not None
    for images in (1.0, 3.0):
        added = float(priced(images).kernel_flops[0] - priced(0).kernel_flops[0]) / 32
        attention = images * v.layers * 4 * v.patches**2 * v.hidden
        patch = images * 2.0 * v.pixels * v.hidden * v.patches
        assert added == pytest.approx(3.0 * hand_flops(images) - patch + 0.5 * attention, rel=1e-9)


def test_a_frozen_tower_has_a_forward_only() -> None:
    frozen = {"train_vision": False}
    added = float(priced(2, more=frozen).kernel_flops[0] - priced(0).kernel_flops[0]) / 32
    v = small().vision
    assert v is not None
    projector = 2 * 2.0 * v.hidden * 4 * 512 * v.tokens
    assert added == pytest.approx(hand_flops(2.0) + 2.0 * projector, rel=1e-9)
    names = ("gradients", "optimizer", "parameters")
    held_by = {name: part(priced(2, more=frozen), name) - part(priced(0), name) for name in names}
    last = vision_segments(small(), work(small(), 2))[-1]
    made = sum(weight_elements(last, weight) for weight in last.weights)
    assert held_by["gradients"] == pytest.approx(4.0 * made)
    assert held_by["optimizer"] == pytest.approx(12.0 * made)
    assert held_by["parameters"] == pytest.approx(2.0 * vision_parameters(small(), work(small(), 2)))


@pytest.mark.parametrize("recipe, element", [("bf16", 2.0), ("bf16-sharded", 2.0), ("fp32", 4.0)])
def test_a_frozen_tower_is_held_in_the_compute_dtype(recipe: str, element: float) -> None:
    """Nothing updates it, so that no master copy in fp32 is needed, nor a cast copy of one."""
    found = [priced(images, more={"precision": recipe, "train_vision": False}) for images in (0, 2)]
    last = vision_segments(small(), work(small(), 2))[-1]
    trained = sum(weight_elements(last, weight) for weight in last.weights)
    stored = 4.0 if recipe != "bf16" else 2.0
    frozen_weights = vision_parameters(small(), work(small(), 2)) - trained
    held_more, cast_more = (part(found[1], n) - part(found[0], n) for n in ("parameters", "gathered layers"))
    assert held_more == pytest.approx(element * frozen_weights + stored * trained)
    assert cast_more == pytest.approx(2.0 * trained if recipe == "bf16-sharded" else 0.0)


def test_adapters_of_the_text_leave_the_tower_frozen() -> None:
    assert all(not w.trained for p in vision_segments(small(), work(small(), 1, lora_rank=8)) for w in p.weights)


def test_the_text_keeps_its_own_sequence_and_mask() -> None:
    eng = engine(small(), work(small(), 2), H100, MEGATRON)
    works = lower(eng.program(eng.structure("false", "none", "none")), eng.workload).works
    text = [w for w in works if w.category == 1 and not w.name.startswith("vision.")]
    assert text and not any(w.full for w in text) and {w.length for w in text} == {1.0}


@pytest.mark.parametrize("degrees", [{"tp": 2, "dp_shard": 4}, {"tp": 2, "pp": 2, "dp_shard": 2}])
@pytest.mark.parametrize("zero", [0, 1])
def test_tensors_add_up_to_memory(degrees: dict[str, int], zero: int) -> None:
    strategy = Strategy(**degrees, zero=zero, sp=True)
    given = work(small(), 4)
    found = estimate(small(), given, H100, MEGATRON, strategy, detail=True)
    tensors = held(case_of(small(), given, H100, MEGATRON, strategy, found))
    for name in ("parameters", "gradients", "optimizer", "activations"):
        total = sum(tensor.num_bytes for tensor in tensors if tensor.part == name)
        assert total == pytest.approx(part(found, name), rel=1e-9)


def test_tensor_parallelism_shards_the_tower() -> None:
    added = [part(priced(1, tp=tp), "parameters") - part(priced(0, tp=tp), "parameters") for tp in (1, 2)]
    assert 0.5 < added[1] / added[0] < 0.62


def test_more_images_than_fit_are_refused() -> None:
    with pytest.raises(DistplanError, match="at most 32 fit"):
        work(small(), 33)
    with pytest.raises(DistplanError, match="no image tower"):
        work(replace(small(), vision=None), 1)


def test_the_segments_of_the_text_are_untouched() -> None:
    with_images, without = (segments(small(), work(small(), images), True) for images in (1, 0))
    assert with_images[1:] == without[1:]
    assert replace(with_images[0], beside=()) == without[0]


YAML = "layers: 4\nhidden: 512\nheads: 8\nffn: 2048\nvocab: 32000\nmax_seq_len: 4096\nvision: {%s}\n"


def test_a_model_yaml_may_have_a_tower(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(YAML % "hidden: 256, layers: 4, heads: 4, ffn: 1024, patches: 256, tokens: 64")
    assert load_model(str(path)).model.vision == small().vision


@pytest.mark.parametrize(
    "tower, said",
    [("hidden: 256, layers: 4, heads: 4, ffn: 1024, patches: 256", "tokens"),
     ("hidden: 256, layers: 4, heads: 5, ffn: 1024, patches: 256, tokens: 64", "5 heads do not divide"),
     ("hidden: 256, layers: 4, heads: 4, ffn: 1024, patches: 256, tokens: 512", "cannot become 512 tokens"),
     ("hiden: 256", "hiden")],
)  # fmt: skip
def test_a_wrong_tower_in_a_model_yaml_is_said(tower: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(YAML % tower)
    with pytest.raises(DistplanError, match=said):
        load_model(str(path))
