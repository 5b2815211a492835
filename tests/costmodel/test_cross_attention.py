"""Llama 3.2 Vision: layers whose keys and values are an image's (arXiv 2407.21783, section 7)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distplan.costmodel.estimate import Estimate, estimate
from distplan.costmodel.graph import parameters, vision_parameters
from distplan.costmodel.hf_config import load_json, read_config
from distplan.costmodel.model import Attention, Model
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.strategy import Strategy
from distplan.costmodel.verify import verify
from distplan.costmodel.workload import workload
from distplan.hardware.cluster import load_cluster
from distplan.hardware.errors import DistplanError

TEXT = {
    "model_type": "mllama_text_model", "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
    "tie_word_embeddings": False,
}  # fmt: skip
VISION = {
    "hidden_size": 1280, "num_hidden_layers": 32, "num_global_layers": 8, "attention_heads": 16, "image_size": 448,
    "intermediate_size": 5120, "patch_size": 14, "vision_output_dim": 7680, "max_num_tiles": 4,
}  # fmt: skip
LARGE = {
    "hidden_size": 8192, "num_hidden_layers": 100, "num_attention_heads": 64, "intermediate_size": 28672,
    "cross_attention_layers": list(range(3, 100, 5)),
}  # fmt: skip


def model(tmp_path: Path, vision: dict[str, Any] | None = None, **text: Any) -> Model:
    file = tmp_path / "config.json"
    content = {"model_type": "mllama", "text_config": TEXT | text, "vision_config": VISION | (vision or {})}
    file.write_text(json.dumps(content))
    return read_config(load_json(file), "mllama").model


def priced(of: Model, **overrides: Any) -> Estimate:
    job = workload(of, {}, gpus=8, overrides={"seq_len": 4096, "global_batch": 8, **overrides})
    return estimate(of, job, load_cluster("dgx-h100"), load_runtime("megatron"), Strategy(tp=8, sp=True), detail=True)


def test_it_has_the_parameters_that_transformers_builds(tmp_path: Path) -> None:
    """9,775,192,080 of the class's defaults (11B) on the meta device in 5.24.0; 8 rows of the embedding are its own."""
    small = model(tmp_path)
    assert parameters(small, workload(small, {}, gpus=1))[0] == pytest.approx(9_775_192_080, rel=1e-5)


def test_the_90b_is_what_its_card_says(tmp_path: Path) -> None:
    large = model(tmp_path, {"image_size": 560}, **LARGE)
    job = workload(large, {}, gpus=1)
    # 88.8 B on the card of Llama-3.2-90B-Vision, tower included
    assert parameters(large, job)[0] + vision_parameters(large, job) == pytest.approx(88.8e9, rel=0.01)


def test_an_image_is_four_tiles_with_a_class_token_each(tmp_path: Path) -> None:
    tower = model(tmp_path).vision
    assert tower is not None
    assert tower.tokens == tower.patches == 4 * (32 * 32 + 1)
    assert tower.layers == 40


def test_queries_of_the_text_see_all_tokens_of_the_images(tmp_path: Path) -> None:
    """Scores and context take 4 · s · T · heads · head_dim FLOPs forward, keys and values 4 · T · hidden · kv width."""
    of = model(tmp_path)
    assert of.vision is not None
    wide, layers, sequences = 32 * 128, 8, 8
    each = 4.0 * 4096 * of.vision.tokens * wide + 4.0 * of.vision.tokens * 4096 * (8 * 128)

    def of_an_image(them: Model) -> float:
        one, two = (priced(them, images_per_sequence=n, train_vision=False).model_flops[0] for n in (1, 2))
        return float(two - one) * 8  # priced per GPU

    found = of_an_image(of) - of_an_image(replace(of, pattern=of.pattern[:4]))  # without the tower, and one layer less
    assert found == pytest.approx(3.0 * (layers - 1) * sequences * each, rel=1e-6)


def test_no_mask_halves_what_sees_the_images(tmp_path: Path) -> None:
    """Causal or not, attention to the images executes its whole rectangle."""
    causal, whole = (priced(model(tmp_path), causal=flag).kernel_flops[0] for flag in (True, False))
    only_text = 32 * 8 * 4.0 * 4096 * 4096 * 4096 * 3.5 / 8
    assert whole - causal == pytest.approx(only_text / 2, rel=1e-3)


def test_such_a_model_has_an_image_unless_told(tmp_path: Path) -> None:
    of = model(tmp_path)
    assert workload(of, {}, gpus=1).images_per_sequence == 1.0
    assert workload(of, {}, gpus=1, overrides={"images_per_sequence": 3}).images_per_sequence == 3.0


def test_sharding_the_sequence_leaves_the_images_whole(tmp_path: Path) -> None:
    """A ring moves keys and values of the text alone: of 32 layers and not of 40."""
    of = model(tmp_path)
    plain = replace(of, pattern=tuple(name for name in of.pattern if not _cross(of, name)))

    def sent(each: Model) -> float:
        job = workload(each, {}, gpus=8, overrides={"seq_len": 8192, "global_batch": 8})
        ring = Strategy(tp=2, sp=True, cp=4, cp_kind="ring")
        found = estimate(each, job, load_cluster("dgx-h100"), load_runtime("megatron"), ring, detail=True)
        return float(
            np.sum(
                [c.wire_bytes[0] for c in found.communication if c.kind == "ring_exchange" and c.name[:5] == "layer"]
            )
        )

    assert sent(of) == sent(plain) > 0


def _cross(of: Model, name: str) -> bool:
    mixer = of.kinds[name].mixer
    return isinstance(mixer, Attention) and mixer.cross


def test_executing_it_is_refused_in_words(tmp_path: Path) -> None:
    of = model(tmp_path)
    with pytest.raises(DistplanError, match="attend to images"):
        verify(of, workload(of, {}, gpus=1), load_runtime("megatron"), Strategy())
