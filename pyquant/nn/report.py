"""What became of every layer of a model: scheme and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from pyquant.nn import obstacles
from pyquant.nn.fuse import fused_activations
from pyquant.nn.linear_state import LinearState
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.qlinear import QLinear


@dataclass(frozen=True)
class LayerReport:
    """One Linear, Conv2d or Embedding of a model.

    name          fully qualified; a shared module appears once, under its first name.
    kind          class name.
    scheme        the scheme's text, 'int8 per row' for embeddings, or 'float' where the layer was left alone.
    bytes_before  weights and bias in the floating-point type of the layer.
    bytes_after   codes, scales, zero points and bias as they are saved.
    reason        why a layer stays in floating point; empty for quantised ones.
    fused         name of the activation that fuse_ moved into this layer; empty for none.
    gives_codes   whether it hands codes to the next layer (link_, or a scheme with outputs).
    """

    name: str
    kind: str
    scheme: str
    bytes_before: int
    bytes_after: int
    reason: str = ""
    fused: str = ""
    gives_codes: bool = False


def quantization_report(model: nn.Module) -> list[LayerReport]:
    """One record for every Linear, Conv2d, Embedding and its quantised twin, in the order of named_modules.

    Example:
        >>> quantization_report(nn.Sequential(nn.Linear(4, 2)))[0].bytes_before
        40
    """
    records = []
    parents = {id(child): module for module in model.modules() for child in module.children()}
    fused = fused_activations(model)
    for name, module in model.named_modules():
        if isinstance(module, (QLinear, QConv2d)):
            count = module.in_features * module.out_features + ("bias" in module.state_slots) * module.out_features
            before, after = count * module.dtype.itemsize, _slot_bytes(module)
            inside = fused.get(name, "")
            kind, codes = type(module).__name__, module.scheme.outputs is not None
            records.append(LayerReport(name, kind, str(module.scheme), before, after, fused=inside, gives_codes=codes))
        elif isinstance(module, QEmbedding):
            before = module.num_embeddings * module.embedding_dim * module.dtype.itemsize
            records.append(LayerReport(name, "QEmbedding", "int8 per row", before, _slot_bytes(module)))
        elif isinstance(module, obstacles.KINDS):
            size = sum(p.numel() * p.element_size() for p in module.parameters() if not _is_lazy(module))
            obstacle = obstacles.why_not(module, [parents[id(module)]] if id(module) in parents else [])
            reason = "left alone" if obstacle is None else obstacle.reason
            records.append(LayerReport(name, type(module).__name__, "float", size, size, reason))
    return records


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
