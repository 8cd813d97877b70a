"""Norms in a graph, as torch has them or as models write them out, and the codes that layers make of their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pyquant.integrations.compile.codes import readers_of
from pyquant.integrations.compile.graph import arguments_of, both_ways, first_of, is_quiet, kind_of, value_of

_ops = torch.ops.pyquant


@dataclass(frozen=True)
class Norm:
    """A norm over the last dimension.

    x, weight, bias   nodes; weight and bias may be None.
    eps               a number, or the node of one.
    is_layer          with the mean taken off: layer norm.
    nodes             of the computation, its result the last.
    """

    x: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    eps: Any
    is_layer: bool
    nodes: list[fx.Node]


def norm_at(node: fx.Node) -> Norm | None:
    """The norm whose result a node is; None where it is none, or one that our ops do not compute."""
    kind = kind_of(node)
    if kind in ("rms_norm", "layer_norm"):
        return _of_torch(node, kind)
    return _written_out(node) if kind == "mul" else None


def _of_torch(node: fx.Node, kind: str) -> Norm | None:
    given, x = arguments_of(node), value_of(node.args[0] if node.args else None)
    if given is None or x is None or len(given["normalized_shape"]) != 1:
        return None
    eps = given.get("eps")
    if eps is None:
        eps = 1e-5 if kind == "layer_norm" else torch.finfo(torch.float32).eps
        if kind == "rms_norm" and x.dtype != torch.float32:
            return None  # torch takes the eps of the type that it computes in, which is its own affair
    weight, bias = given.get("weight"), given.get("bias")
    return Norm(given["input"], weight, bias, eps, kind == "layer_norm", [node])


def _written_out(node: fx.Node) -> Norm | None:
    """weight * (h * rsqrt(mean(h ** 2) + eps)).to(type), h = x.to(float32): RMSNorm of Llama and its relatives."""
    for weight, scaled in both_ways(node):
        if not _is_row(weight, node):
            continue
        inner = _uncast(scaled)
        if kind_of(inner) != "mul":
            continue
        for h, root in both_ways(inner):
            parts = _mean_square(h, root)
            if parts is not None:
                eps, nodes = parts
                x = _uncast(h)
                between = [n for n in (h, scaled) if kind_of(n) == "to"]
                return Norm(x, weight, None, eps, False, [*nodes, inner, *between, node])
    return None


def _mean_square(h: Any, root: Any) -> tuple[Any, list[fx.Node]] | None:
    """eps and the nodes of rsqrt(mean(h ** 2, -1, keepdim=True) + eps) in float32."""
    if kind_of(root) != "rsqrt" or kind_of(root.args[0]) != "add":
        return None
    total = root.args[0]
    given = arguments_of(total)
    if given is None or set(given) != {"input", "other"}:
        return None
    mean, eps = given["input"], given["other"]
    if kind_of(mean) != "mean":
        return None
    of = arguments_of(mean)
    if of is None or of.get("keepdim") is not True or of.get("dim") not in (-1, [-1], (-1,)) or set(of) - _MEAN:
        return None
    square = of["input"]
    power = arguments_of(square) if kind_of(square) == "pow" else None
    if power is None or power["input"] is not h or power["exponent"] != 2:
        return None
    value = value_of(square)
    is_number = isinstance(eps, (int, float)) or (isinstance(eps, fx.Node) and value_of(eps) is None)
    if value is None or value.dtype != torch.float32 or not is_number:
        return None
    return eps, [square, mean, total, root]


_MEAN = {"input", "dim", "keepdim"}


def _is_row(weight: object, node: fx.Node) -> bool:
    row, result = value_of(weight), value_of(node)
    return row is not None and result is not None and row.dim() == 1 and row.shape == result.shape[-1:]


def _uncast(node: Any) -> Any:
    """What a change of type alone was made of."""
    if kind_of(node) != "to":
        return node
    given = arguments_of(node)
    return given["input"] if given is not None and set(given) == {"input", "dtype"} else node


def fold(graph: fx.Graph, node: fx.Node) -> bool:
    """Have one op compute a norm and the codes of its result, where layers with dynamic inputs of one kind read it and
    nothing else does. Whether it was done."""
    readers = readers_of(node)
    norm = norm_at(node) if readers is not None else None
    if readers is None or norm is None or value_of(norm.x) is None or not is_quiet(first_of(norm.nodes), node):
        return False
    if not alike_rows(norm):
        return False
    scales = (norm.weight, norm.bias) if norm.is_layer else (norm.weight,)
    op = _ops.layer_norm_quantize.default if norm.is_layer else _ops.rms_norm_quantize.default
    readers.take_codes(graph, node, op, (norm.x, *scales, norm.eps))
    return True


def alike_rows(norm: Norm) -> bool:
    """Whether the tensors are such as our ops take: floats on one device."""
    x = value_of(norm.x)
    rows = [value_of(row) for row in (norm.weight, norm.bias) if row is not None]
    floats = (torch.float32, torch.float16, torch.bfloat16)
    return all(t is not None and t.dtype in floats and t.device == x.device for t in (x, *rows))
