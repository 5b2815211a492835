"""Every family of hf_families.yaml against the model that transformers builds from the same configuration.

Not collected by default: it needs transformers 5.24.0 and torch 2.13.0 beside distplan and pytest.
    pytest tests/frameworks/against_transformers.py
`python tests/frameworks/against_transformers.py FILE` writes tests/data/transformers_counts.json anew.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from distplan.costmodel.hf_config import load_json, read_config
from distplan.costmodel.hf_families import table
from distplan.costmodel.model import Attention
from distplan.hardware.documents import Document

NEEDED: dict[str, dict[str, Any]] = {
    # classes whose defaults alone make no model
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"num_experts": 16, "moe_topk": 2, "head_dim": 128},
    "minimax": {"head_dim": 128},
    "glm4_moe": {"head_dim": 128},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": 1536},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 3},
    "bamba": {"attn_layer_indices": [1, 3]},
    "bloom": {"hidden_size": 1024, "n_head": 16, "n_layer": 4},
}
TURNED = (
    "attention_bias", "use_bias", "mlp_bias", "use_qk_norm", "qk_layernorm", "use_parallel_residual", "use_qkv_bias",
    "tie_word_embeddings", "bias", "multi_query", "lm_head_bias", "attention_out_bias", "qkv_bias",
)  # fmt: skip
"""switches that the second configuration of each family has the other way round"""
TURNED_ELSEWHERE = {
    "minicpm3", "deepseek_v2", "youtu", "ernie4_5_moe", "hy_v3", "aria_text", "nemotron_h", "phi", "mpt", "afmoe",
}  # fmt: skip
"""families with a switch that this schema has no word for: biases of low-rank projections, of QK norms, of
shared experts alone, of the output gate"""
VARIED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), (4, 6, 12)),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "intermediate_size_mlp"), (1408, 2816, 4096)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), (16, 32, 60)),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), (0, 1, 2)),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts"), (1, 2, 3)),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), (32, 64, 128)),
    **dict.fromkeys(("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"), (1, 2)),
    **dict.fromkeys(("linear_num_value_heads", "linear_value_head_dim"), (16, 64)),
    "num_attention_heads": (8, 16, 32), "n_head": (8, 16), "n_heads": (8, 16), "vocab_size": (32000, 50257, 151936),
    "moe_intermediate_size": (256, 768), "shared_expert_intermediate_size": (512, 1024), "kv_lora_rank": (128, 512),
    "q_lora_rank": (256, None), "mlp_only_layers": ([], [0], [1, 3]), "sliding_window": (None, 512), "alibi": (False,),
    "max_position_embeddings": (1024, 4096), "new_decoder_architecture": (True, False), "multi_query": (True, False),
    "parallel_attn": (True, False), "num_ln_in_parallel_attn": (None, 1, 2), "moe_layer_end_index": (-1, 3),
}  # fmt: skip
"""sizes that the other configurations of each family change, each with a chance of 3 in 5"""
VARIATIONS = 4

NOT_BUILT = {"dbrx", "mllama_text_model"}
"""DbrxConfig makes no model in 5.24.0 (no rope_theta); mllama's decoder is only built with the whole configuration"""

DROPPED = {
    "architectures", "dtype", "transformers_version", "initializer_range", "bos_token_id", "eos_token_id",
    "pad_token_id", "rope_parameters", "use_cache", "router_aux_loss_coef", "_name_or_path",
}  # fmt: skip
"""keys without a bearing on the architecture, left out of the stored file"""


def families() -> list[str]:
    spelt = [spelling for name, entry in table("families").items() for spelling in (name, *entry.get("also", ()))]
    return sorted(name for name in set(spelt) - NOT_BUILT if name in CONFIG_MAPPING)


def config_of(model_type: str) -> Any:
    return CONFIG_MAPPING[model_type](**NEEDED.get(model_type, {}))


def parameters_of(config: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


@pytest.mark.parametrize("model_type", families())
@pytest.mark.parametrize("only_differences", [True, False])
def test_the_reader_sees_the_widths_that_transformers_builds(
    model_type: str, only_differences: bool, tmp_path: Path
) -> None:
    config = config_of(model_type)
    path = tmp_path / "config.json"
    path.write_text(config.to_json_string(use_diff=only_differences))
    model = read_config(load_json(path), model_type).model
    shapes = parameters_of(config)
    embedding = next(shape for name, shape in shapes.items() if "embed" in name or "wte" in name)
    assert embedding == (model.vocab, model.hidden)
    assert any(name.startswith("lm_head") and name.endswith("weight") for name in shapes) != model.tied_embedding
    last = str(model.layers - 1)
    assert any(last in name.split(".") for name in shapes)
    assert not any(str(model.layers) in name.split(".") and "experts" not in name for name in shapes)
    for index, name in enumerate(model.pattern):
        mixer = model.kinds[name].mixer
        if isinstance(mixer, Attention) and not mixer.kv_lora_rank:
            own = [k for k in shapes if f".{index}." in k and k.endswith(("q_proj.weight", "k_proj.weight"))]
            widths = {k.split(".")[-2]: shapes[k][0] for k in own if not k.startswith("lm_head")}
            if widths:
                apart = any(f".{index}.self_attn.gate_proj" in k for k in shapes)
                assert widths["q_proj"] == mixer.heads * mixer.head_dim * (2 if mixer.gated and not apart else 1)
                assert widths["k_proj"] == mixer.kv_heads * mixer.head_dim


def _written(config: Any) -> Document:
    return Document(file="config.json", value=json.loads(config.to_json_string()), lines={})


def turned(model_type: str) -> Any:
    own = config_of(model_type).to_dict()
    switches = {key: not own[key] for key in TURNED if isinstance(own.get(key), bool)}
    return CONFIG_MAPPING[model_type](**{**NEEDED.get(model_type, {}), **switches})


def varied(model_type: str, rng: Random) -> Any:
    """A model of other sizes: what runs, so that heads divide widths and share their keys and values."""
    own = config_of(model_type).to_dict()
    chosen = dict(NEEDED.get(model_type, {}))
    switches = () if model_type in TURNED_ELSEWHERE else TURNED
    choices = {**VARIED, **dict.fromkeys(switches, (True, False))}
    chosen |= {key: rng.choice(choices[key]) for key in own if key in choices and rng.random() < 0.6}
    heads = next((key for key in ("num_attention_heads", "n_head", "n_heads", "num_heads") if key in own), "")
    count = chosen.get(heads, own.get(heads))
    for key in ("num_key_value_heads", "num_kv_heads"):
        if key in own and count:
            chosen[key] = rng.choice([n for n in (1, 2, 4, 8, count) if count % n == 0])
    for key in ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"):
        if key in own and count:
            chosen[key] = count * (128 if model_type == "helium" else 64)
    return CONFIG_MAPPING[model_type](**chosen)


def write(file: str) -> None:
    counts = {}
    for model_type in families():
        configs = {"default": config_of(model_type)}
        if model_type not in TURNED_ELSEWHERE:
            configs["turned"] = turned(model_type)
        rng = Random(model_type)
        for number in range(VARIATIONS):
            try:
                config = varied(model_type, rng)
                parameters_of(config)
                read_config(_written(config), model_type)
            except Exception:
                continue  # sizes that contradict each other in that class
            configs[f"varied {number}"] = config
        for name, config in configs.items():
            total = sum(torch.Size(shape).numel() for shape in parameters_of(config).values())
            stated = {key: value for key, value in json.loads(config.to_json_string()).items() if key not in DROPPED}
            counts[f"{model_type}/{name}"] = {"parameters": total, "config": stated}
    lines = [f"{json.dumps(name)}: {json.dumps(entry, separators=(',', ':'))}" for name, entry in counts.items()]
    Path(file).write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write(sys.argv[1])
