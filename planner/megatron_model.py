"""An architecture in the words of Megatron Core's TransformerConfig: what both Megatron exports say of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distplan.costmodel.model import Attention, LayerKind, Mlp, Model, Moe
from distplan.hardware.errors import DistplanError

_POSITIONS = {"rope": "rope", "learned": "learned_absolute", "none": "none"}
_NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}


def transformer_config(model: Model) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Fields of TransformerConfig (and of its multi-latent kind), and sentences on what they cannot say.

    Raises DistplanError where no layer has attention: Megatron's GPT model is then not the model.
    """
    kinds = list(dict.fromkeys(model.pattern))
    attention = next((k.mixer for k in map(model.kinds.__getitem__, kinds) if isinstance(k.mixer, Attention)), None)
    if attention is None:
        raise DistplanError(f"{model.name} has no softmax attention, which a GPT model of Megatron needs")
    layer = next(model.kinds[name] for name in kinds if model.kinds[name].mixer == attention)
    values: dict[str, Any] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": attention.heads,
        "kv_channels": attention.head_dim,
        "num_query_groups": attention.kv_heads,
        "normalization": _NORMS[layer.norm],
        "add_bias_linear": attention.out_bias,
        "add_qkv_bias": attention.qkv_bias and not attention.out_bias,
        "qk_layernorm": attention.qk_norm != "none",
        "hidden_dropout": model.dropout,
        "attention_dropout": model.attention_dropout,
        **_latent(attention),
        **_feed_forward(model),
    }
    if model.mtp_layers:
        values["mtp_num_layers"] = model.mtp_layers
    return values, tuple(_beyond(model, attention, layer))


def gpt_model(model: Model) -> Mapping[str, Any]:
    """What Megatron says of a GPT model beside its layers, in Megatron Bridge's words."""
    return {
        "position_embedding_type": _POSITIONS.get(model.positions, "none"),
        "share_embeddings_and_output_weights": model.tied_embedding,
        "make_vocab_size_divisible_by": model.vocab_pad_multiple,
        "vocab_size": model.vocab,
    }


def _latent(a: Attention) -> dict[str, Any]:
    if not a.kv_lora_rank:
        return {}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": a.q_lora_rank or None,
        "kv_lora_rank": a.kv_lora_rank,
        "qk_head_dim": a.head_dim - a.qk_rope_head_dim,
        "qk_pos_emb_head_dim": a.qk_rope_head_dim,
        "v_head_dim": a.v_head_dim,
    }


def _feed_forward(model: Model) -> dict[str, Any]:
    feeds = [model.kinds[name].ffn for name in model.pattern]
    dense = next((f for f in feeds if isinstance(f, Mlp)), None)
    moe = next((f for f in feeds if isinstance(f, Moe)), None)
    values: dict[str, Any] = {}
    first = dense or moe
    if first is not None:
        values |= {"gated_linear_unit": first.gated, "ffn_hidden_size": first.ffn}
    if moe is not None:
        values |= {"num_moe_experts": moe.experts, "moe_router_topk": moe.top_k, "moe_ffn_hidden_size": moe.ffn}
        values |= {"moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"}
        if moe.shared_ffn:
            values["moe_shared_expert_intermediate_size"] = moe.shared_ffn
        if moe.groups > 1:
            values |= {"moe_router_num_groups": moe.groups, "moe_router_group_topk": moe.top_groups}
        if moe.capacity_factor:
            values["moe_expert_capacity_factor"] = moe.capacity_factor
        if moe.latent:
            values["moe_latent_size"] = moe.latent
        if dense is not None:
            values["moe_layer_freq"] = [int(isinstance(f, Moe)) for f in feeds]
    return values


def _beyond(model: Model, attention: Attention, layer: LayerKind) -> list[str]:
    """Sentences: what the model has and these fields have not."""
    said = []
    mixers = {repr(model.kinds[name].mixer) for name in model.pattern}
    if len(mixers) > 1:
        said.append("layers differ in their mixers (windows, hybrids); the arguments describe one of them for all")
    if attention.window or attention.chunk:
        said.append("attention windows or chunks are not written: set window_size and its pattern yourself")
    if model.positions == "alibi":
        said.append("ALiBi positions have no argument; position_embedding_type none is written")
    if layer.parallel:
        said.append(
            "attention and MLP in parallel have no argument; they are priced so, and will run one after the other"
        )
    if layer.norm_position != "pre":
        said.append(f"norms are placed '{layer.norm_position}', which has no argument; pre-norm will run")
    feeds = [model.kinds[name].ffn for name in model.pattern]
    widths = {feed.ffn for feed in feeds if isinstance(feed, Mlp)}
    if len(widths) > 1:
        said.append("layers differ in ffn width; the first is written for all")
    known = [feed for feed in feeds if isinstance(feed, Mlp | Moe)]
    if len(known) < sum(feed is not None for feed in feeds):
        said.append("a feed-forward of your own has no argument")
    activations = {feed.activation for feed in known}
    gated = any(feed.gated for feed in known)
    if activations - ({"silu", "swiglu"} if gated else {"gelu", "gelu_new", "gelu_tanh"}):
        default = "SiLU" if gated else "GELU"
        said.append(f"the activation is {', '.join(sorted(activations))}, {default} is what the arguments mean")
    return said
