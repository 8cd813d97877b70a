"""What fuse_ knows: which activations the kernels compute, and which modules call one right after a Linear."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Final

import torch
from torch import nn
from torch.nn import functional as F

from pyquant.core.names import words
from pyquant.errors import ArgumentError

Activation = tuple[str, tuple[float, float] | None]
Pair = tuple[str, str]  # attribute names: the Linear, the activation

_GELU: Final = {"none": "gelu", "tanh": "gelu_tanh"}
_FUNCTIONS: Final = ((F.gelu, "gelu"), (F.silu, "silu"), (F.relu, "relu"), (torch.relu, "relu"), (F.relu6, "clamp"))
# Classes of transformers.activations that are the same function in exact arithmetic. FastGELUActivation (a constant of
# ten digits), QuickGELUActivation and ClippedGELUActivation are other functions.
_TRANSFORMERS: Final = {
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "SiLUActivation": "silu",
}

# Modules of transformers 5.23, by class name, whose code calls the activation on the result of the Linear at once and
# uses each of the two in no other place; tests/nn/test_fuse.py reads their source to check that.
TRANSFORMERS_PARENTS: Final[dict[Pair, tuple[str, ...]]] = {
    ("dense", "intermediate_act_fn"): words(
        """BertIntermediate BertGenerationIntermediate BigBirdIntermediate BlipTextIntermediate CamembertIntermediate
        ConvBertIntermediate DebertaIntermediate DebertaV2Intermediate ElectraIntermediate ErnieIntermediate
        LayoutLMIntermediate LayoutLMv2Intermediate LayoutLMv3Intermediate LongformerIntermediate MPNetIntermediate
        MegatronBertIntermediate MobileBertIntermediate RemBertIntermediate RobertaIntermediate
        RobertaPreLayerNormIntermediate VideoMAEIntermediate XLMRobertaIntermediate XLMRobertaXLIntermediate
        YolosIntermediate"""
    ),
    ("dense", "transform_act_fn"): (
        "BertPredictionHeadTransform",
        "ErniePredictionHeadTransform",
        "LayoutLMPredictionHeadTransform",
    ),
    ("fc1", "activation_fn"): words(
        """BartDecoderLayer BartEncoderLayer BeitMLP Blip2MLP BlipMLP CLIPMLP DeiTMLP Dinov2MLP M2M100DecoderLayer
        M2M100EncoderLayer MBartDecoderLayer MBartEncoderLayer MarianDecoderLayer MarianEncoderLayer OPTDecoderLayer
        PegasusDecoderLayer PegasusEncoderLayer PhiMLP Siglip2MLP SiglipMLP SwinMLP ViTMAEMLP ViTMLP
        WhisperDecoderLayer WhisperEncoderLayer"""
    ),
    ("gate_proj", "act_fn"): words(
        """CohereMLP Gemma2MLP Gemma3MLP GemmaMLP GraniteMLP LlamaMLP MistralMLP NomicBertMLP Olmo2MLP OlmoMLP Qwen2MLP
        Qwen3MLP SmolLM3MLP"""
    ),
    ("intermediate_dense", "intermediate_act_fn"): ("HubertFeedForward", "Wav2Vec2FeedForward"),
    ("wi", "act"): ("MT5DenseActDense", "T5DenseActDense"),
    ("wi_0", "act"): ("MT5DenseGatedActDense", "T5DenseGatedActDense"),
}

_BY_NAME: Final = {name: pair for pair, names in TRANSFORMERS_PARENTS.items() for name in names}
_BY_CLASS: dict[type[nn.Module], list[Pair]] = {
    nn.TransformerEncoderLayer: [("linear1", "activation")],
    nn.TransformerDecoderLayer: [("linear1", "activation")],
}
_BUILT_IN: Final = frozenset(_BY_CLASS)
_BATCH_NORMS: dict[type[nn.Module], list[Pair]] = {}


def register_fusion(parent_class: type[nn.Module], linear: str, activation: str) -> type[nn.Module]:
    """Tell fuse_ that a module class calls an activation on the result of a Linear, with nothing in between.

    parent_class  subclass of nn.Module; instances of exactly this class are meant, not of its subclasses.
    linear        name of the attribute that holds the Linear; its result must go to the activation and nowhere else.
    activation    name of the attribute that holds the activation; it must be called on nothing else.
    ->            parent_class. Registering the same again changes nothing.
    Raises ArgumentError for names that are none, and where one of the two is registered with another partner.

    Example:
        >>> class Gate(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up, self.act = nn.Linear(8, 8), nn.SiLU()
        ...     def forward(self, x):
        ...         return x * self.act(self.up(x))
        >>> _ = register_fusion(Gate, "up", "act")
    """
    return register_pair(_BY_CLASS, parent_class, ("linear", linear), ("activation", activation))


def register_pair(
    table: dict[type[nn.Module], list[Pair]], parent_class: type[nn.Module], first: Pair, second: Pair
) -> type[nn.Module]:
    """Note a pair of attributes; `first` and `second` are (argument, attribute)."""
    if not isinstance(parent_class, type) or not issubclass(parent_class, nn.Module):
        raise ArgumentError("parent_class", repr(parent_class)[:120], "a subclass of torch.nn.Module")
    for argument, name in (first, second):
        if not isinstance(name, str) or not name.isidentifier():
            raise ArgumentError(argument, repr(name)[:120], "the name of an attribute of the class's instances")
    new = (first[1], second[1])
    if new[0] == new[1]:
        raise ArgumentError(second[0], repr(new[1]), "another attribute than the Linear's")
    known = table.setdefault(parent_class, [])
    for pair in known:
        if pair != new and (new[0] == pair[0] or new[1] == pair[1]):
            raise ArgumentError(second[0], f"({new[0]}, {new[1]})", f"the registered pair {pair} alone")
    if new not in known:
        known.append(new)
    return parent_class


def register_batch_norm(parent_class: type[nn.Module], layer: str, batch_norm: str) -> type[nn.Module]:
    """Tell fold_batch_norm_ that a module class calls a BatchNorm on the result of a layer, with nothing in between.

    parent_class, layer, batch_norm   as parent_class, linear and activation of register_fusion.
    ->            parent_class. fuse_ will not fuse an activation into `layer` while its BatchNorm is not folded.
    Raises ArgumentError for names that are none, and where one of the two is registered with another partner.

    Example:
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.conv, self.bn = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        ...     def forward(self, x):
        ...         return torch.relu(self.bn(self.conv(x)))
        >>> _ = register_batch_norm(Block, "conv", "bn")
    """
    return register_pair(_BATCH_NORMS, parent_class, ("layer", layer), ("batch_norm", batch_norm))


def batch_norms_of(parent: nn.Module) -> list[Pair]:
    """The registered (layer, BatchNorm) attributes of a module; none where its forward was replaced."""
    return [] if "forward" in parent.__dict__ else _BATCH_NORMS.get(type(parent), [])


def neighbours(parent: nn.Module) -> list[Pair]:
    """Members of an nn.Sequential that follow each other; what does nothing (nn.Identity) stands between none."""
    if type(parent).forward is not nn.Sequential.forward or "forward" in parent.__dict__:
        return []
    return list(itertools.pairwise(n for n, module in parent._modules.items() if type(module) is not nn.Identity))


def pairs_of(parent: nn.Module) -> list[Pair]:
    """The (Linear, activation) attributes of a module, by its class; none where its forward was replaced.

    Pairs with a BatchNorm in between that was not folded are left out.
    Raises ArgumentError where a class that the user registered lacks one of its attributes.
    """
    kind = type(parent)
    if "forward" in parent.__dict__:
        return []
    if kind.forward is nn.Sequential.forward:
        return neighbours(parent)
    unfolded = {layer for layer, norm in _BATCH_NORMS.get(kind, []) if type(getattr(parent, norm)) is not nn.Identity}
    pairs = [pair for pair in _BY_CLASS.get(kind, []) if pair[0] not in unfolded]
    for name in (name for pair in pairs for name in pair if kind not in _BUILT_IN):
        if not hasattr(parent, name):
            raise ArgumentError("model", f"a {kind.__name__} without '{name}'", "what register_fusion names")
    if not pairs and kind.__module__.startswith("transformers.models.") and kind.__name__ in _BY_NAME:
        return [_BY_NAME[kind.__name__]]
    return pairs


def activation_of(value: object) -> Activation | None:
    """The kernels' name, and limits for 'clamp', of a module or function; None for what they do not compute."""
    if isinstance(value, functools.partial):
        is_gelu = value.func is F.gelu and not value.args and set(value.keywords) <= {"approximate"}
        return (_GELU[value.keywords.get("approximate", "none")], None) if is_gelu else None
    if not isinstance(value, nn.Module):
        name = next((name for function, name in _FUNCTIONS if value is function), None)
        return None if name is None else (name, (0.0, 6.0) if name == "clamp" else None)
    kind = type(value)
    if "forward" in value.__dict__:
        return None
    if kind is nn.GELU:
        return _GELU[str(value.approximate)], None
    if isinstance(value, nn.Hardtanh) and kind in (nn.Hardtanh, nn.ReLU6):
        limits = float(value.min_val), float(value.max_val)
        return ("clamp", limits) if all(map(math.isfinite, limits)) else None
    of_transformers = _TRANSFORMERS if kind.__module__ == "transformers.activations" else {}
    name = of_transformers.get(kind.__name__) or {nn.ReLU: "relu", nn.SiLU: "silu"}.get(kind)
    return None if name is None else (name, None)
