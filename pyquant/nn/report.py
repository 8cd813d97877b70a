"""What became of every matrix of a model: scheme, bytes, and why it stays in floating point."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.parameter import is_lazy

from pyquant.core import arguments
from pyquant.nn import obstacles
from pyquant.nn.fuse import fused_activations
from pyquant.nn.gated_feed import gate_activations
from pyquant.nn.keep import kept_layers, remembered
from pyquant.nn.linear_state import LinearState
from pyquant.nn.matrices import holders
from pyquant.nn.qembedding import QEmbedding

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
    fused         name of the activation that fuse_ moved into this layer (of a GatedFeed: into the quantiser of its
                  last layer); empty for none.
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

    Matrices are floating parameters with two or more dimensions larger than 1, whatever class holds them: what no
    record has a scheme for runs in floating point, and its reason says why.

    Example:
        >>> quantization_report(nn.Sequential(nn.Linear(4, 2)))[0].bytes_before
        40
    """
    arguments.module("model", model)
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    records = sorted([*_layers(model), *_others(model)], key=lambda record: order[record.name])
    total = sum(record.bytes_before for record in records) or 1
    return [replace(record, share=record.bytes_before / total) for record in records]


def _layers(model: nn.Module) -> Iterator[LayerReport]:
    parents = {id(child): module for module in model.modules() for child in module.children()}
    fused = fused_activations(model) | gate_activations(model)
    kept = kept_layers(model)
    # a matrix that a head shares with an embedding belongs to the head, which multiplies by it
    heads = (m for m in model.modules() if isinstance(m, obstacles.KINDS) and not isinstance(m, nn.Embedding))
    counted = {id(p) for module in heads for p in module._parameters.values() if p is not None}
    seen: set[int] = set()
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, LinearState):
            count = module.in_features * module.out_features + ("bias" in module.state_slots) * module.out_features
            kind, text = (
                ("QEmbedding", "int8 per row") if isinstance(module, QEmbedding) else (kind, str(module.scheme))
            )
            after = sum(math.prod(slot.shape) * slot.dtype.itemsize for slot in module.state_slots.values())
            inside, codes = fused.get(name, ""), module.scheme.outputs is not None
            yield LayerReport(name, kind, text, count * module.dtype.itemsize, after, module.note, inside, codes)
        elif isinstance(module, obstacles.KINDS):
            shared = counted | seen if isinstance(module, nn.Embedding) else seen
            own = [p for p in module.parameters() if not is_lazy(p) and id(p) not in shared]
            seen |= {id(p) for p in own}
            size = sum(p.numel() * p.element_size() for p in own)
            if hasattr(module, "fake_quantizers"):
                yield LayerReport(name, kind, f"{module.scheme}, simulated", size, size, getattr(module, "note", ""))
                continue
            obstacle = obstacles.why_not(module, [parents[id(module)]] if id(module) in parents else [])
            usual = kept[id(module)].reason if id(module) in kept else LEFT_ALONE
            reason = (remembered(module) or usual) if obstacle is None else obstacle.reason
            yield LayerReport(name, kind, "float", size, size, reason)


def _others(model: nn.Module) -> Iterator[LayerReport]:
    kept = kept_layers(model)
    for holder in holders(model, (LinearState, *obstacles.KINDS)):
        left = remembered(holder.module) or (kept[id(holder.module)].reason if id(holder.module) in kept else "")
        reason = left or holder.reason
        kind, is_certain = type(holder.module).__name__, holder.is_certain or reason != holder.reason
        yield LayerReport(holder.name, kind, "float", holder.size, holder.size, reason, is_certain=is_certain)
