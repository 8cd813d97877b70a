"""What became of every matrix of a model: scheme, bytes, and why it stays in floating point."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.parameter import is_lazy

from pyquant.core import arguments
from pyquant.nn import obstacles
from pyquant.nn.fuse import fused_activations
from pyquant.nn.keep import kept_layers, remembered
from pyquant.nn.linear_state import LinearState
from pyquant.nn.matrices import holders
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.qlinear import QLinear

LEFT_ALONE = "left alone"


@dataclass(frozen=True)
class LayerReport:
    """One module of a model that holds weight matrices: Linear, Conv2d, Embedding, their twins, and any other class.

    name          fully qualified; a shared module appears once, under its first name.
    kind          class name.
    scheme        the scheme's text (with ', simulated' before conversion), 'int8 per row' for embeddings, or 'float'
                  where the layer was left alone.
    bytes_before  weights and bias in the floating-point type of the layer (classes without a twin: matrices only).
    bytes_after   codes, scales, zero points and bias as they are saved.
    reason        why a layer stays in floating point, or has another scheme than it was given; empty for all others.
    fused         name of the activation that fuse_ moved into this layer; empty for none.
    gives_codes   whether it hands codes to the next layer (link_, or a scheme with outputs).
    share         bytes_before as a share of all records together, 0 to 1.
    is_certain    False where a class holds matrices and only a run (trace_floats) shows whether it multiplies by them.
    """

    name: str
    kind: str
    scheme: str
    bytes_before: int
    bytes_after: int
    reason: str = ""
    fused: str = ""
    gives_codes: bool = False
    share: float = 0.0
    is_certain: bool = True


def quantization_report(model: nn.Module) -> list[LayerReport]:
    """One record for every module that holds weight matrices, in the order of named_modules.

    Matrices are parameters of two and more dimensions, whatever class holds them: what no record has a scheme for runs
    in floating point, and its reason says why.

    Example:
        >>> quantization_report(nn.Sequential(nn.Linear(4, 2)))[0].bytes_before
        40
    """
    records = _by_place(arguments.module("model", model))
    total = sum(record.bytes_before for record in records) or 1
    return [replace(record, share=record.bytes_before / total) for record in records]


def _by_place(model: nn.Module) -> list[LayerReport]:
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    records = [*_layers(model), *_others(model)]
    return sorted(records, key=lambda record: order[record.name])


def _layers(model: nn.Module) -> Iterator[LayerReport]:
    parents = {id(child): module for module in model.modules() for child in module.children()}
    fused = fused_activations(model)
    kept = kept_layers(model)
    # a matrix that a head shares with an embedding belongs to the head, which multiplies by it
    counted = _parameters(m for m in model.modules() if _is_layer(m) and not isinstance(m, nn.Embedding))
    seen: set[int] = set()
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, (QLinear, QConv2d)):
            count = module.in_features * module.out_features + ("bias" in module.state_slots) * module.out_features
            before, after = count * module.dtype.itemsize, _slot_bytes(module)
            inside, codes = fused.get(name, ""), module.scheme.outputs is not None
            yield LayerReport(name, kind, str(module.scheme), before, after, module.note, inside, codes)
        elif isinstance(module, QEmbedding):
            before = module.num_embeddings * module.embedding_dim * module.dtype.itemsize
            yield LayerReport(name, "QEmbedding", "int8 per row", before, _slot_bytes(module))
        elif hasattr(module, "fake_quantizers") and isinstance(module, obstacles.KINDS):
            size = sum(p.numel() * p.element_size() for p in module.parameters() if id(p) not in seen)
            seen |= {id(p) for p in module.parameters()}
            yield LayerReport(name, kind, f"{module.scheme}, simulated", size, size, getattr(module, "note", ""))
        elif isinstance(module, obstacles.KINDS):
            shared = counted | seen if isinstance(module, nn.Embedding) else seen
            own = [p for p in module.parameters() if not _is_lazy(module) and id(p) not in shared]
            seen |= {id(p) for p in own}
            size = sum(p.numel() * p.element_size() for p in own)
            obstacle = obstacles.why_not(module, [parents[id(module)]] if id(module) in parents else [])
            if obstacle is not None:
                reason = obstacle.reason
            elif id(module) in kept and not remembered(module):
                reason = kept[id(module)].reason
            else:
                reason = remembered(module) or LEFT_ALONE
            yield LayerReport(name, kind, "float", size, size, reason)


def _others(model: nn.Module) -> Iterator[LayerReport]:
    kept = kept_layers(model)
    for holder in holders(model, (LinearState, QEmbedding, *obstacles.KINDS)):
        remembered_reason = remembered(holder.module)
        reason = remembered_reason or (kept[id(holder.module)].reason if id(holder.module) in kept else holder.reason)
        kind = type(holder.module).__name__
        is_certain = holder.is_certain or reason != holder.reason
        yield LayerReport(holder.name, kind, "float", holder.size, holder.size, reason, is_certain=is_certain)


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, obstacles.KINDS)


def _parameters(modules: Iterable[nn.Module]) -> set[int]:
    return {id(p) for module in modules for p in module._parameters.values() if p is not None}


def _slot_bytes(module: LinearState | QEmbedding) -> int:
    total = 0
    for slot in module.state_slots.values():
        count = 1
        for size in slot.shape:
            count *= size
        total += count * slot.dtype.itemsize
    return total


def _is_lazy(module: nn.Module) -> bool:
    return any(p is not None and is_lazy(p) for p in module._parameters.values())
