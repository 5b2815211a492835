"""What the words of a config.json mean: aliases, nesting, nulls, class defaults, plans of layers, refusals."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distplan.costmodel.hf_config import Reading, load_json, read_config
from distplan.costmodel.model import Attention, LinearAttention, Model, Moe
from distplan.hardware.errors import DistplanError, DocumentError

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
Read = Callable[..., Reading]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def reader(**config: Any) -> Reading:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config, indent=1))
        return read_config(load_json(path), "test")

    return reader


def shipped(name: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return {**config, **changes}


def attention(model: Model, layer: int = 0) -> Attention:
    mixer = model.kinds[model.pattern[layer]].mixer
    assert isinstance(mixer, Attention)
    return mixer


def test_null_means_derived_and_absent_means_the_class_default(read: Read) -> None:
    absent = shipped("mistral-7b-v0.1")
    absent.pop("num_key_value_heads")
    assert attention(read(**absent).model).kv_heads == 8
    assert attention(read(**absent, num_key_value_heads=None).model).kv_heads == 32
    assert attention(read(**absent).model).window == 4096
    assert attention(read(**absent, sliding_window=None).model).window == 0


def test_what_came_from_a_class_default_is_said(read: Read) -> None:
    notes = read(**shipped("gemma-3-27b")).notes
    assert any("not in the file, so gemma3_text's class defaults: vocab_size 262208" in note for note in notes)
    assert any("only the language model" in note for note in notes)
    assert read(**shipped("llama-3.1-8b")).notes == ()


def test_gemma_alternates_local_and_global_layers(read: Read) -> None:
    two = read(**shipped("gemma-2-9b")).model
    assert [attention(two, i).window for i in range(4)] == [4096, 0, 4096, 0]
    three = read(**shipped("gemma-3-27b")).model
    assert [attention(three, i).window for i in range(7)] == [1024] * 5 + [0, 1024]


def test_a_window_that_is_switched_off_is_none(read: Read) -> None:
    config = shipped("qwen2.5-7b", sliding_window=4096, max_window_layers=20)
    assert {attention(read(**config).model, i).window for i in range(28)} == {0}
    switched_on = read(**{**config, "use_sliding_window": True}).model
    assert [attention(switched_on, i).window for i in (19, 20)] == [0, 4096]


def test_a_list_of_layer_types_wins_over_the_family_s_period(read: Read) -> None:
    types = ["full_attention"] * 41 + ["sliding_attention"]
    model = read(**shipped("gemma-2-9b", layer_types=types)).model
    assert [attention(model, i).window for i in (0, 40, 41)] == [0, 0, 4096]


def test_falcon_s_old_and_new_decoders(read: Read) -> None:
    old, new = read(**shipped("falcon-7b")).model, read(**shipped("falcon-40b")).model
    assert (attention(old).kv_heads, attention(new).kv_heads) == (1, 8)
    assert [m.kinds[m.pattern[0]].shared_norm for m in (old, new)] == [True, False]
    many = read(**shipped("falcon-7b", multi_query=False)).model
    assert attention(many).kv_heads == 71


def test_alibi_and_learned_positions(read: Read) -> None:
    assert read(**shipped("bloom-176b")).model.positions == "alibi"
    assert read(**shipped("opt-13b")).model.max_positions == 2050
    assert read(**shipped("gpt2")).model.max_positions == 1024
    thirteen = {"hidden_size": 5120, "intermediate_size": 13696, "model_max_length": 4096, "vocab_size": 125696}
    heads = {"num_attention_heads": 40, "num_hidden_layers": 40, "hidden_act": "silu"}
    assert read(model_type="baichuan", **thirteen, **heads).model.positions == "alibi"
    assert read(**shipped("baichuan2-7b")).model.positions == "rope"


def test_intermediate_size_is_the_experts_width_or_the_dense_one(read: Read) -> None:
    mixtral = read(**shipped("mixtral-8x7b")).model
    assert {kind.ffn.ffn for kind in mixtral.kinds.values() if kind.ffn} == {14336}
    deepseek = read(**shipped("deepseek-v3")).model
    assert Counter(type(deepseek.kinds[name].ffn).__name__ for name in deepseek.pattern) == {"Mlp": 3, "Moe": 58}
    assert [deepseek.kinds[deepseek.pattern[i]].ffn.ffn for i in (0, 3)] == [18432, 2048]  # type: ignore[union-attr]
    maverick = read(**shipped("llama-4-maverick")).model
    assert [maverick.kinds[maverick.pattern[i]].ffn.ffn for i in (0, 1)] == [16384, 8192]  # type: ignore[union-attr]
    assert [attention(maverick, i).chunk for i in range(4)] == [8192, 8192, 8192, 0]


def test_latent_attention_has_its_own_head_dims(read: Read) -> None:
    a = attention(read(**shipped("deepseek-v3", head_dim=64)).model)
    assert (a.head_dim, a.v_head_dim, a.qk_rope_head_dim, a.q_lora_rank) == (192, 128, 64, 1536)
    assert attention(read(**shipped("deepseek-v2-lite")).model).q_lora_rank == 0


def test_a_hybrid_string_plans_single_sublayers(read: Read) -> None:
    model = read(**shipped("nemotron-3-nano-30b-a3b")).model
    words = shipped("nemotron-3-nano-30b-a3b")["hybrid_override_pattern"]
    for letter, name in zip(words, model.pattern, strict=True):
        kind = model.kinds[name]
        assert isinstance(kind.mixer, LinearAttention) == (letter == "M")
        assert isinstance(kind.mixer, Attention) == (letter == "*")
        assert isinstance(kind.ffn, Moe) == (letter == "E")


def test_experts_may_differ_from_layer_to_layer(read: Read) -> None:
    widths = [3072] * 16 + [1536] * 16
    model = read(**shipped("hunyuan-a13b", moe_intermediate_size=widths)).model
    assert [model.kinds[name].ffn.ffn for name in model.pattern] == widths  # type: ignore[union-attr]


def test_infinity_in_the_file_is_read_past(read: Read) -> None:
    assert read(**shipped("llama-3.1-8b", time_step_limit=[0.0, float("inf")])).model.layers == 32


def test_the_class_name_stands_in_for_a_missing_model_type(read: Read) -> None:
    config = shipped("mixtral-8x7b", architectures=["MixtralForCausalLM"])
    config.pop("model_type")
    assert read(**config).model.kinds


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "bert"}, "encoder without a decoder"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "unheard_of", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"_class_name": "UNet2DConditionModel"}, "diffusion"),
        ({"model_type": "llada"}, "diffusion language model"),
        ({"model_type": "vit"}, "vision"),
        ({"model_type": "whisper"}, "speech"),
        ({"model_type": "clip", "text_config": {"model_type": "clip_text_model"}}, "embeds"),
        ({"model_type": "mamba2"}, "state-space"),
        ({"model_type": "jamba"}, "hybrid"),
        ({"model_type": "lama"}, "did you mean llama"),
        ({"peft_type": "LORA"}, "no language model"),
        ({"model_type": "hunyuan", "use_cla": True}, "shared between layers"),
        ({"model_type": "opt", "word_embed_proj_dim": 512}, "narrower than hidden_size"),
        ({"model_type": "opt", "do_layer_norm_before": False}, "norms after the residual"),
        ({"model_type": "nemotron_h"}, "none of num_hidden_layers"),
        ({"model_type": "llama", "num_hidden_layers": 0}, "too small"),
        ({"model_type": "llama", "hidden_size": -1}, "too small"),
        ({"model_type": "llama", "hidden_size": 10**12}, "too large"),
        ({"model_type": "llama", "hidden_size": "4096"}, "expected a whole number"),
        ({"model_type": "llama", "num_key_value_heads": 5}, "cannot share"),
        ({"model_type": "llama", "num_attention_heads": 33}, "do not divide"),
        ({"model_type": "llama", "hidden_act": "sulu"}, "activation 'sulu'"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "plans 1 layers"),
        ({"model_type": "gemma2", "layer_types": [["x"]] * 26}, "is not described"),
        ({"model_type": "gemma2", "layer_types": ["conv"] * 26}, "'conv' is not described"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "uses between 1 and all 8 experts"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(read: Read, config: dict[str, Any], kind: str) -> None:
    with pytest.raises(DocumentError, match=kind):
        read(**config)


def test_an_error_points_at_file_line_and_key(read: Read) -> None:
    with pytest.raises(DocumentError) as caught:
        read(**{"model_type": "llama", "num_attention_heads": 33})
    assert (caught.value.line, caught.value.key) == (3, "num_attention_heads")
    with pytest.raises(DocumentError) as caught:
        read(**{"model_type": "llama4", "text_config": {"model_type": "llama4_text", "num_hidden_layers": 0}})
    assert (caught.value.line, caught.value.key) == (5, "text_config.num_hidden_layers")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**13) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=2),
    max_leaves=5,
)
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(NAMES), data=st.data())
def test_a_spoilt_config_is_read_or_refused_and_never_crashes(tmp_path: Path, name: str, data: st.DataObject) -> None:
    config = shipped(name)
    extra = ["layer_types", "moe_layers", "mlp_only_layers", "no_rope_layers", "attention_types", "text_config"]
    for key in data.draw(st.lists(st.sampled_from([*config, *extra]), min_size=1, max_size=3)):
        config[key] = data.draw(JUNK)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    try:
        model = read_config(load_json(path), name).model
    except DistplanError:
        return
    assert 1 <= model.layers <= 10_000
    assert set(model.pattern) == set(model.kinds)
