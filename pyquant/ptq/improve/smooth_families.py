"""Which layers of transformers' blocks feed which others and nothing else: rules of smooth_ and equalize_ by class.

Classes of transformers 5.23 by name; tests/ptq/test_smooth_families.py holds one small model of each family to its
function. Attention mixes tokens, not channels, so that a factor of `v` goes through it; act(gate) * up is linear in up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import nn

Rule = tuple[str, tuple[str, ...]]  # attribute paths below the class: the producer, its consumers
Rules = tuple[Rule, ...]


def _attention(norm: str, path: str, inputs: str = "q_proj k_proj v_proj", out: str = "o_proj") -> Rules:
    """A norm in front of an attention, and its values in front of its output."""
    names = tuple(f"{path}.{name}" for name in inputs.split())
    return (norm, names), (names[-1], (f"{path}.{out}",))


LLAMA: Final[Rules] = (
    *_attention("input_layernorm", "self_attn"),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ("mlp.up_proj", ("mlp.down_proj",)),
)
# A router and experts read one norm. Layers without experts, which some models mix in, have the pairs of LLAMA.
_MIXTURE: Final[Rules] = (*LLAMA, ("post_attention_layernorm", ("mlp.gate", "mlp.experts")))
_SHARED: Final[Rules] = (
    *LLAMA,
    (
        "post_attention_layernorm",
        (
            "mlp.gate",
            "mlp.experts",
            "mlp.shared_expert.gate_proj",
            "mlp.shared_expert.up_proj",
            "mlp.shared_expert_gate",
        ),
    ),
    ("mlp.shared_expert.up_proj", ("mlp.shared_expert.down_proj",)),
)
# The norms of post-norm blocks also feed the residual stream; values may move into the output projection.
_BERT: Final[Rules] = (("attention.self.value", ("attention.output.dense",)),)
_ENCODER: Final[Rules] = (
    *_attention("self_attn_layer_norm", "self_attn", out="out_proj"),
    ("final_layer_norm", ("fc1",)),
)
_DECODER: Final[Rules] = (
    *_ENCODER,
    ("encoder_attn_layer_norm", ("encoder_attn.q_proj",)),  # keys and values read the encoder
    ("encoder_attn.v_proj", ("encoder_attn.out_proj",)),
)
_POST_NORM: Final[Rules] = tuple((f"{path}.v_proj", (f"{path}.out_proj",)) for path in ("self_attn", "encoder_attn"))
_VISION: Final[Rules] = (
    *_attention("layer_norm1", "self_attn", out="out_proj"),
    ("layer_norm2", ("mlp.fc1",)),
)
_T5: Final = {
    "LayerSelfAttention": _attention("layer_norm", "SelfAttention", "q k v", "o"),
    "LayerCrossAttention": (
        ("layer_norm", ("EncDecAttention.q",)),
        ("EncDecAttention.v", ("EncDecAttention.o",)),
    ),
}
_PRE_NORM_FAMILIES: Final = ("Whisper", "MBart", "Pegasus", "M2M100", "Speech2Text", "Blenderbot")

BY_CLASS: Final[dict[str, Rules]] = {
    **dict.fromkeys(
        (
            "LlamaDecoderLayer",
            "MistralDecoderLayer",
            "Qwen2DecoderLayer",
            "Qwen3DecoderLayer",
            "GraniteDecoderLayer",
            "SmolLM3DecoderLayer",
        ),
        LLAMA,
    ),
    **dict.fromkeys(("MixtralDecoderLayer", "Qwen3MoeDecoderLayer", "OlmoeDecoderLayer"), _MIXTURE),
    "Qwen2MoeDecoderLayer": _SHARED,
    **dict.fromkeys(("BertLayer", "RobertaLayer", "ElectraLayer", "CamembertLayer"), _BERT),
    "Phi3DecoderLayer": (
        ("input_layernorm", ("self_attn.qkv_proj",)),
        ("post_attention_layernorm", ("mlp.gate_up_proj",)),
    ),
    "PhiDecoderLayer": (
        ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.fc1")),
        ("self_attn.v_proj", ("self_attn.dense",)),
    ),
    "Starcoder2DecoderLayer": (
        *_attention("input_layernorm", "self_attn"),
        ("post_attention_layernorm", ("mlp.c_fc",)),
    ),
    "GPTNeoXLayer": (
        ("input_layernorm", ("attention.query_key_value",)),
        ("post_attention_layernorm", ("mlp.dense_h_to_4h",)),
    ),
    **{f"{family}EncoderLayer": _ENCODER for family in _PRE_NORM_FAMILIES},
    **{f"{family}DecoderLayer": _DECODER for family in _PRE_NORM_FAMILIES},
    **{f"{family}{part}Layer": _POST_NORM for family in ("Bart", "Marian") for part in ("Encoder", "Decoder")},
    **dict.fromkeys(("CLIPEncoderLayer", "SiglipEncoderLayer", "Siglip2EncoderLayer"), _VISION),
    "ViTLayer": (*_attention("layernorm_before", "attention"), ("layernorm_after", ("mlp.fc1",))),
    "Dinov2Layer": (*_attention("norm1", "attention"), ("norm2", ("mlp.fc1",))),
    **{f"{family}{part}": rules for family in ("T5", "MT5", "UMT5") for part, rules in _T5.items()},
}


def _opt(layer: Any) -> Rules:
    return _ENCODER if layer.do_layer_norm_before else _POST_NORM[:1]


def _bloom(block: Any) -> Rules:
    """Its norms may give the residual stream, too."""
    if block.apply_residual_connection_post_layernorm:
        return ()
    return (
        ("input_layernorm", ("self_attention.query_key_value",)),
        ("post_attention_layernorm", ("mlp.dense_h_to_4h",)),
    )


def _stablelm(layer: Any) -> Rules:
    if not layer.use_parallel_residual:
        return LLAMA
    (norm, inputs), *_ = LLAMA
    return ((norm, (*inputs, "mlp.gate_proj", "mlp.up_proj")), *(rule for rule in LLAMA if "norm" not in rule[0]))


def _t5_feed(feed: Any) -> Rules:
    path = "DenseReluDense"
    if hasattr(feed.DenseReluDense, "wi"):
        return (("layer_norm", (f"{path}.wi",)),)
    return ("layer_norm", (f"{path}.wi_0", f"{path}.wi_1")), (f"{path}.wi_1", (f"{path}.wo",))


# Classes whose configuration decides.
_BY_INSTANCE: Final[dict[str, Callable[[Any], Rules]]] = {
    "OPTDecoderLayer": _opt,
    "BloomBlock": _bloom,
    "StableLmDecoderLayer": _stablelm,
    **{f"{family}LayerFF": _t5_feed for family in ("T5", "MT5", "UMT5")},
}
# What is between the two Linears of a feed-forward block, where it may be a ReLU, which a positive factor passes.
_ACTIVATIONS: Final = (
    ("fc1", "fc2", "activation_fn"),
    ("DenseReluDense.wi", "DenseReluDense.wo", "DenseReluDense.act"),
)

CLASSES: Final = frozenset((*BY_CLASS, *_BY_INSTANCE))


def rules_of(parent: nn.Module) -> Iterator[Rule]:
    """Every rule that holds for a block of transformers, whether or not its layers are there."""
    name = type(parent).__name__
    if name not in CLASSES:
        return
    yield from BY_CLASS[name] if name in BY_CLASS else _BY_INSTANCE[name](parent)
    for first, second, activation in _ACTIVATIONS:
        if isinstance(_find(parent, activation), nn.ReLU):
            yield first, (second,)


def _find(parent: nn.Module, path: str) -> Any:
    found: Any = parent
    for part in path.split("."):
        found = getattr(found, part, None)
    return found
