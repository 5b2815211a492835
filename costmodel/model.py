"""A model as data: layer kinds in a pattern, and the workload that trains it.

Nothing here computes: the graph (graph.py) says which operators and weights an architecture has,
and every count follows from the graph. Sizes are numbers of elements, `seq_len` in tokens,
`global_batch` in sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Softmax attention with `heads` query heads and `kv_heads` key/value heads of `head_dim`.

    `v_head_dim` differs from `head_dim` only in multi-head latent attention, which is said by
    `kv_lora_rank` > 0 (DeepSeek-V2, arXiv 2405.04434, section 2.1).
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: str = "none"
    """none | head (over head_dim, one weight shared by the heads) | full (over heads·head_dim)"""
    window: int = 0
    """tokens that a query sees; 0 = all"""
    chunk: int = 0
    """attention within blocks of so many tokens (Llama 4); 0 = no chunks"""
    softcap: bool = False
    """logits are capped inside the attention kernel: recorded only, as no byte more moves"""
    sinks: bool = False
    """one learned logit per head (gpt-oss)"""
    gated: bool = False
    """an output gate as wide as the attention's output (Qwen3-Next)"""
    cross: bool = False
    """keys and values are of the images' tokens, all of which every query sees (Llama 3.2 Vision)"""
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """A state-space or linear-attention mixer: `kind` mamba2 | gated_delta_net | lightning."""

    kind: str
    heads: int
    head_dim: int
    state: int
    groups: int
    conv_kernel: int = 0
    chunk: int = 256
    key_heads: int = 0
    bias: bool = False
    conv_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    ffn: int
    gated: bool
    bias: bool = False
    activation: str = "silu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """Routed experts of width `ffn`, of which each token uses `top_k`, and dense shared experts."""

    experts: int
    top_k: int
    ffn: int
    gated: bool = True
    bias: bool = False
    shared_ffn: int = 0
    """width of all shared experts together; 0 = none"""
    shared_gate: bool = False
    router_bias: bool = False
    capacity_factor: float = 0.0
    """0 = dropless"""
    groups: int = 1
    top_groups: int = 1
    latent: int = 0
    activation: str = "silu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom:
    """A block of the user's own: a function that adds operators to a Builder and returns its output's name.

    `build(builder, x)` reads the value `x` of dims (batch, seq, hidden) and returns one of the same dims;
    `sizes` are the elements of the dims that it introduces.
    """

    build: Callable[[Any, str], str]
    sizes: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """One kind of layer: a mixer and a feed-forward, either of which may be absent."""

    name: str
    mixer: Attention | LinearAttention | Custom | None
    ffn: Mlp | Moe | Custom | None
    norm: str = "rmsnorm"
    """rmsnorm | layernorm"""
    norm_bias: bool = False
    norm_weight: bool = True
    norm_position: str = "pre"
    """pre | post (OLMo 2: after each sublayer, inside the residual) | sandwich (Gemma 2: both)"""
    parallel: bool = False
    """attention and MLP side by side on the same residual (GPT-J, NeoX, Falcon)"""
    shared_norm: bool = False
    """with `parallel`: one norm feeds both"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """The image tower of a vision-language model: patches, layers that all see all of an image, a projector."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    patches: int
    """per image"""
    pixels: int
    """inputs of a patch: channels · side², times the frames that are taken together"""
    tokens: int
    """that an image becomes in the text's sequence"""
    gated: bool = False
    bias: bool = True
    norm: str = "layernorm"
    position_table: bool = True
    """one learned row per patch"""
    concatenated: bool = True
    """the patches of a token are laid side by side (else they are averaged)"""
    projector: int = 0
    """width between the projector's two matrices; 0 = one matrix"""
    outputs: int = 1
    """layers whose outputs are laid side by side before the projector"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """An architecture. `pattern` names the kind of every layer, first to last."""

    name: str
    hidden: int
    vocab: int
    kinds: Mapping[str, LayerKind]
    pattern: tuple[str, ...]
    tied_embedding: bool
    positions: str = "rope"
    """rope | learned | alibi | none"""
    max_positions: int = 0
    """rows of a learned position table, offsets included"""
    max_seq_len: int = 0
    embedding_norm: bool = False
    embedding_norm_bias: bool = False
    logit_softcap: bool = False
    """the final logits go through cap · tanh(x / cap) (Gemma 2, arXiv 2408.00118, section 2)"""
    final_norm: bool = True
    head_bias: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    vocab_pad_multiple: int = 128
    """the vocabulary is padded to a multiple of this times tp (Megatron's --make-vocab-size-divisible-by)"""
    mtp_layers: int = 0
    mtp_kind: str = ""
    placements: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    vision: Vision | None = None

    @property
    def layers(self) -> int:
        return len(self.pattern)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """A recipe: which dtype each thing has. Names are keys of DTYPE_BYTES."""

    name: str
    compute: str
    parameters: str
    gradients: str
    master: str
    """'' = no master copy"""
    moments: tuple[str, ...]
    """one entry per optimizer moment"""
    matmul: str
    """dtype of the matrix products (fp8 recipes multiply in fp8 and keep activations in `compute`)"""
    scaling: str = ""
    """how operands in fp8 or fp4 are cast: a name of scalings.yaml; '' = what is usual for the dtype"""
    wgrad: str = ""
    """dtype of the weights' gradients' products: `compute`, or '' = matmul"""
    keeps: tuple[str, ...] = ("attention", "embedding", "router", "head")
    """what stays in `compute`"""
    sends: tuple[str, ...] = ()
    """collectives that carry operands cast: tp | ep"""
    glu_inputs: str = ""
    """dtype in which the inputs of gated activations are kept for backward; '' = compute"""
    first_layers: int = 0
    """so many layers at the start stay in `compute`"""
    last_layers: int = 0
    layouts: int = 0
    """copies of a cast tensor that products along rows and along columns need: 1 | 2; 0 = as the device does"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained on: batch in sequences, sequence length in tokens, precision, optimizer, loss."""

    seq_len: int
    global_batch: int
    precision: Precision
    optimizer: str = "adamw"
    """adamw | sgd | adamw8bit"""
    attention: str = "flash"
    """flash | unfused (masked softmax is one kernel) | eager (torch's operators, softmax in fp32)"""
    loss: str = "vocab_parallel"
    """vocab_parallel | fp32_logits | log_softmax (torch's, logits kept) | gathered (the same on logits gathered over
    tp) | compiled (in one kernel) | fused (chunked: the logits never exist
    whole)"""
    causal: bool = True
    clip_grad: bool = True
    offload_optimizer: bool = False
    moe_imbalance: float = 1.0
    """tokens of the fullest rank of experts over the mean, as expected"""
    moe_imbalance_low: float = 1.0
    """the least of it"""
    moe_imbalance_high: float = 1.0
    """the most of it"""
    document_len: int = 0
    """tokens of a packed document, beyond which attention does not look; of mixed lengths Σl²/Σl; 0 = no packing"""
    lora_rank: int = 0
    """0 = all weights are trained; else only low-rank adapters of every linear layer of the layers are"""
    images_per_sequence: float = 0.0
    """0 = text only: an image tower is not there"""
    train_vision: bool = True
    """False: the image tower is frozen, and only its projector is trained"""


DTYPE_BYTES: Mapping[str, float] = {
    "fp32": 4.0,
    "tf32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "bool": 1.0,
    "fp4": 0.5,
}
