"""Layers that could be quantised and by convention are not: adapters that are being trained, output heads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from pyquant.nn.matrices import is_matrix
from pyquant.nn.undo import put

HEAD_NAMES: Final = ("lm_head", "embed_out")
ADAPTER: Final = "an adapter of a layer that wraps another (LoRA and the like)"
TRAINED: Final = "trainable in a model whose other weights are frozen"
HEAD: Final = "an output head, left in floating point unless heads=True or its name is in the config"
ROUTER: Final = "a router, whose last bits decide which expert a token takes: left in floating point unless named"
TIED: Final = "tied to an output head that stays in floating point"
_LEFT: Final = "_pyquant_left"
# Share of the weights that must be frozen for the rest to count as adapters, which are small. A detector's frozen
# backbone is not that much: 57 % in DETR with a ResNet-50, 71 % with a ResNet-101.
MOSTLY: Final = 0.8


@dataclass(frozen=True)
class Kept:
    """Why a layer is kept in floating point."""

    reason: str
    is_head: bool = False  # patterns of a config that mean it overrule that


def kept_layers(model: nn.Module, heads: bool = False) -> dict[int, Kept]:
    """{id of a module: why it is kept}; heads: quantise output heads, and embeddings tied to them, like the rest."""
    kept: dict[int, Kept] = {}
    if not heads:
        found = list(output_heads(model))
        kept.update({id(head): Kept(HEAD, is_head=True) for head in found})
        matrices = {id(weight) for head in found if (weight := head._parameters.get("weight")) is not None}
        for module in model.modules():
            if isinstance(module, nn.Embedding) and id(module._parameters.get("weight")) in matrices:
                kept[id(module)] = Kept(TIED, is_head=True)
    kept.update({id(module): Kept(ROUTER) for module in _routers(model)})
    kept.update({id(module): Kept(TRAINED) for module in _trained(model)})
    kept.update({id(module): Kept(ADAPTER) for module in _adapters(model)})
    return kept


def remember(module: nn.Module, reason: str, undo: list[Callable[[], Any]]) -> None:
    """Keep with a float layer why quantize_ left it ('': excluded by the caller): the model itself does not show."""
    put(module.__dict__, _LEFT, reason, undo)


def remembered(module: nn.Module) -> str:
    """The reason that remember() kept with a layer, or ''."""
    return str(module.__dict__.get(_LEFT, ""))


def output_heads(model: nn.Module) -> Iterator[nn.Module]:
    """The layers that turn the last hidden state into logits of a vocabulary: what get_output_embeddings() of any part
    of the model gives (transformers), and layers whose own name is lm_head or embed_out."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in HEAD_NAMES and isinstance(module._parameters.get("weight"), Tensor):
            yield module
        get = getattr(type(module), "get_output_embeddings", None)
        if callable(get):
            try:
                head = get(module)
            except (AttributeError, NotImplementedError, TypeError, KeyError):  # transformers: a model that has none
                continue
            if isinstance(head, nn.ModuleList):  # MusicGen: one for each codebook
                yield from head
            elif isinstance(head, nn.Module):
                yield head


# Of classes that choose experts, and of the layers that do it themselves.
_ROUTER_CLASS: Final = re.compile(r"Router|TopK\w*Gat|MoE\w*Gate")
_ROUTER_NAME: Final = re.compile(r"(.*_)?router")


def _routers(model: nn.Module) -> Iterator[nn.Module]:
    """Linears that choose between experts: those of a class that says so, those that are called router, and a gate
    beside experts."""
    for module in model.modules():
        for name, child in module._modules.items():
            is_gate = name == "gate" and "experts" in module._modules
            says_so = _ROUTER_CLASS.search(type(module).__name__) or _ROUTER_NAME.fullmatch(name)
            if isinstance(child, nn.Linear) and (is_gate or says_so):
                yield child


def _adapters(model: nn.Module) -> Iterator[nn.Module]:
    """Everything in the children that a wrapping layer names as its factors (`adapter_layer_names`, as PEFT does)."""
    for module in model.modules():
        names = getattr(type(module), "adapter_layer_names", None)
        if isinstance(names, (tuple, list)) and "base_layer" in module._modules:
            for name in names:
                child = module._modules.get(name)
                if child is not None:
                    yield from child.modules()


def _trained(model: nn.Module) -> Iterator[nn.Module]:
    """Modules with trainable weights in a model that is mostly frozen."""
    matrices = [(m, p) for m in model.modules() for p in m._parameters.values() if p is not None and is_matrix(p)]
    frozen = sum(p.numel() for _, p in matrices if not p.requires_grad)
    if any(p.requires_grad for _, p in matrices) and frozen > MOSTLY * sum(p.numel() for _, p in matrices):
        yield from (module for module, p in matrices if p.requires_grad)
