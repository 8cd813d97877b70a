"""Reading and rewriting torch.fx graphs, as Dynamo captures them (functions of torch) or torch.export does (ATen)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

_aten = torch.ops.aten

# function, method or ATen op -> what it computes
_FUNCTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "gelu": (F.gelu, _aten.gelu.default),
    "silu": (F.silu, _aten.silu.default),
    "relu": (F.relu, torch.relu, _aten.relu.default),
    "relu6": (F.relu6, _aten.relu6.default),
    "hardtanh": (F.hardtanh, _aten.hardtanh.default),
    "add": (operator.add, torch.add, _aten.add.Tensor, _aten.add.Scalar),
    "mul": (operator.mul, torch.mul, _aten.mul.Tensor),
    "pow": (operator.pow, torch.pow, _aten.pow.Tensor_Scalar),
    "mean": (torch.mean, _aten.mean.dim),
    "rsqrt": (torch.rsqrt, _aten.rsqrt.default),
    "to": (_aten.to.dtype, _aten._to_copy.default),
    "rms_norm": (F.rms_norm, torch.rms_norm, _aten.rms_norm.default),
    "layer_norm": (F.layer_norm, torch.layer_norm, _aten.layer_norm.default),
    "dropout": (F.dropout, _aten.dropout.default),
}
_KINDS: Final = {function: kind for kind, functions in _FUNCTIONS.items() for function in functions}
_METHODS: Final = {"relu", "add", "mul", "pow", "mean", "rsqrt", "to"}
# Names of arguments by position, where a kind has them in the same order in every form.
_ARGUMENTS: Final[dict[str, tuple[str, ...]]] = {
    "gelu": ("input",),
    "silu": ("input", "inplace"),
    "relu": ("input", "inplace"),
    "relu6": ("input", "inplace"),
    "hardtanh": ("input", "min_val", "max_val", "inplace"),
    "add": ("input", "other"),
    "mul": ("input", "other"),
    "pow": ("input", "exponent"),
    "mean": ("input", "dim", "keepdim"),
    "rsqrt": ("input",),
    "to": ("input", "dtype"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "dropout": ("input", "p", "training", "inplace"),
}
_OTHER_NAMES: Final = {"self": "input", "x": "input", "keepdims": "keepdim", "train": "training"}


def kind_of(node: object) -> str | None:
    """What a node computes, in the words of this file; None: something else."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "call_method":
        return str(node.target) if node.target in _METHODS else None
    return _KINDS.get(node.target) if node.op == "call_function" else None  # type: ignore[arg-type]


def arguments_of(node: fx.Node) -> dict[str, Any] | None:
    """{name: value} of a node with a kind; None where it is given what this file has no name for."""
    names = _ARGUMENTS[kind_of(node) or ""]
    if len(node.args) > len(names):
        return None
    given = dict(zip(names, node.args, strict=False))
    for name, value in node.kwargs.items():
        given[_OTHER_NAMES.get(name, name)] = value
    return given


def value_of(node: object) -> Any:
    """The fake tensor that stands for a node's result; None where the graph has none."""
    if not isinstance(node, fx.Node):
        return None
    value = node.meta.get("val", node.meta.get("example_value"))
    return value if isinstance(value, Tensor) else None


def alike(*nodes: object) -> bool:
    """Whether the results of all nodes are tensors of one shape, type and device."""
    values = [value_of(node) for node in nodes]
    if any(value is None for value in values):
        return False
    first = values[0]
    return all((v.shape, v.dtype, v.device) == (first.shape, first.dtype, first.device) for v in values[1:])


def only_user(node: fx.Node, user: fx.Node) -> bool:
    """Whether nothing but `user` reads a node, once."""
    given = torch.utils._pytree.tree_leaves((user.args, user.kwargs))
    return set(node.users) == {user} and sum(value is node for value in given) == 1


def erase_orphans(graph: fx.Graph, used: set[fx.Node]) -> None:
    """Of the nodes that were used, those that no longer are and do nothing but compute. Graph.eliminate_dead_code takes
    more: methods that write in place, such as a cache's index_copy_, whose result nobody reads."""
    for node in reversed(graph.nodes):
        if node in used and not node.users and node.op in ("call_function", "call_method") and not _may_write(node):
            graph.erase_node(node)


def is_quiet(first: fx.Node, last: fx.Node) -> bool:
    """Whether nothing between two nodes of a graph, `last` included, may write into memory that others read: only then
    may a computation move from one to the other."""
    node = first
    while node is not last:
        node = node.next
        if node.op == "root" or _may_write(node):
            return False
    return True


def _may_write(node: fx.Node) -> bool:
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.op in ("call_module", "output"):
        return True
    if node.op != "call_function":
        return False
    if node.kwargs.get("inplace") or "out" in node.kwargs:
        return True
    given = arguments_of(node) if kind_of(node) is not None else None
    if given is not None and given.get("inplace"):
        return True
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    name = str(getattr(target, "__name__", ""))
    in_place = getattr(operator, name, None) is target and (name == "setitem" or name in _IN_PLACE)
    return in_place or (name.endswith("_") and not name.endswith("__"))


_IN_PLACE: Final = {name.strip("_") for name in dir(operator) if name.startswith("__i")} - {
    "index",
    "inv",
    "invert",
    "indexOf",
}


def both_ways(node: fx.Node) -> list[tuple[Any, Any]]:
    """The two operands of a sum or product in either order; none where it has something else."""
    given = arguments_of(node)
    if given is None or set(given) != {"input", "other"}:
        return []
    a, b = given["input"], given["other"]
    return [(a, b), (b, a)]


def first_of(nodes: list[fx.Node]) -> fx.Node:
    """The one that comes first in their graph."""
    return min(nodes)


def call(graph: fx.Graph, before: fx.Node, target: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
    """A new node, with the fake result that the target's rule gives."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args)
    known = "val" if "val" in before.meta else "example_value"
    fakes = fx.node.map_arg(args, lambda n: n.meta.get("val", n.meta.get("example_value")))
    node.meta[known] = _run(target, fakes)
    return node


def _run(target: Callable[..., Any], args: Any) -> Any:
    leaves = torch.utils._pytree.tree_leaves(args)
    mode = next((leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)), None)
    if mode is None:
        return target(*args)
    with mode:
        return target(*args)
