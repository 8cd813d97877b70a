"""Gates in a graph: activation(a) * b, whose result layers quantise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from pyquant.core.dtypes import FLOATS
from pyquant.integrations.compile.codes import readers_of
from pyquant.integrations.compile.graph import alike, both_ways, is_quiet, kind_of, only_user

# node -> (name, limits of 'clamp', what it is of), or None
Known = Callable[[fx.Node], tuple[str, tuple[float, float], Any] | None]


def fold(graph: fx.Graph, node: fx.Node, activation_of: Known) -> bool:
    """Have one op compute an activation, the product with another tensor and the codes of that, where layers with
    dynamic inputs of one kind read the product and nothing else does. Whether it was done."""
    readers = readers_of(node) if kind_of(node) == "mul" else None
    if readers is None or readers.value.dtype not in FLOATS or readers.value.dim() < 2:
        return False
    for curve, up in both_ways(node):
        known = activation_of(curve) if isinstance(curve, fx.Node) else None
        if known is None or not only_user(curve, node) or not alike(known[2], up, node) or not is_quiet(curve, node):
            continue
        name, limits, x = known
        readers.take_codes(graph, node, torch.ops.pyquant.activation_mul_quantize.default, (x, up, name, *limits))
        return True
    return False
