"""FusePass: what follows and leads to quantised layers in a compiled model is computed by their ops."""

from __future__ import annotations

import hashlib
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn import functional as F

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.integrations.compile import gates, norms
from pyquant.integrations.compile.graph import (
    alike,
    arguments_of,
    call,
    erase_orphans,
    is_quiet,
    kind_of,
    only_user,
)
from pyquant.integrations.compile.layers import LayerCall
from pyquant.nn.fuse_rules import activation_of

_FUNCTIONS: Final = {"silu": F.silu, "relu": F.relu, "relu6": F.relu6}  # which fuse_ knows by themselves


class FusePass(CustomGraphPass):
    """A pass of torch.compile that does for a model's graph what fuse_ does for modules, and more.

    Folded into the ops of quantised layers, where nothing else reads what lies between:
    activations   GELU, SiLU, ReLU, ReLU6, Hardtanh of a layer's result.
    residuals     a tensor of the same shape and type added to a layer's result.
    gates         activation(a) * b whose result only layers with dynamic inputs of one kind read, as between gate, up
                  and down of a feed-forward block: one op gives them its codes.
    norms         RMSNorm (also as Llama writes it out) and LayerNorm whose result only layers with dynamic inputs of
                  one kind read: one op gives them its codes.

    `folded` counts what was folded, by those names, over all graphs so far; a graph that inductor finds in its
    cache was fused when it went in and counts nothing. Results are those of the same model
    with its ops called by hand, to the bit; against the model as it was they differ as fused ones do: activations,
    sums and norms are no longer rounded to 16 bits in between, and are pyquant's (docs/activations.md).
    Layers that are trained are not touched. Source: docs/compile.md.

    Example:
        >>> from pyquant import W8A8Dynamic, quantize_
        >>> model = quantize_(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval(), W8A8Dynamic())
        >>> fusing = FusePass()
        >>> compiled = torch.compile(model, options={"pre_grad_custom_pass": fusing})
    """

    def __init__(
        self, *, activations: bool = True, residuals: bool = True, gates: bool = True, norms: bool = True
    ) -> None:
        self._wanted = {
            "gates": arguments.flag("gates", gates),
            "activations": arguments.flag("activations", activations),
            "residuals": arguments.flag("residuals", residuals),
            "norms": arguments.flag("norms", norms),
        }
        self.folded: Counter[str] = Counter()

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph in place."""
        self.folded.update(_fuse(graph, self._wanted))

    def uuid(self) -> str:
        """What inductor's caches of compiled graphs know this pass by: its source and its options."""
        digest = hashlib.sha256(repr(sorted(self._wanted.items())).encode())
        for path in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(path.read_bytes())
        return digest.hexdigest()


def fuse_options(**options: bool) -> dict[str, Any]:
    """What torch.compile(model, options=...) takes to fuse: FusePass(**options) in its place.

    Example:
        >>> list(fuse_options(norms=False))
        ['pre_grad_custom_pass']
    """
    return {"pre_grad_custom_pass": FusePass(**options)}


def fuse_exported(program: torch.export.ExportedProgram, **options: bool) -> dict[str, int]:
    """FusePass for an exported program, in place, before it is compiled by AOTInductor or saved.

    program  what torch.export.export gave, not decomposed yet.
    options  of FusePass.
    ->       what was folded, by name.
    Raises ArgumentError for something else.

    Example:
        >>> from pyquant import W8A8Dynamic, quantize_
        >>> model = quantize_(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval(), W8A8Dynamic())
        >>> with torch.no_grad():
        ...     program = torch.export.export(model, (torch.zeros(3, 8),))
        >>> fuse_exported(program)
        {'activations': 1}
    """
    if not isinstance(program, torch.export.ExportedProgram):
        raise ArgumentError("program", type(program).__name__, "an ExportedProgram, as torch.export.export gives")
    fusing = FusePass(**options)
    results = program.graph.output_node().args[0]
    before = [node.name if isinstance(node, fx.Node) else None for node in results]  # type: ignore[union-attr]
    fusing(program.graph)
    after = program.graph.output_node().args[0]
    for spec, old, node in zip(program.graph_signature.output_specs, before, after, strict=True):  # type: ignore[arg-type]
        if old is not None and spec.arg.name == old and isinstance(node, fx.Node):  # type: ignore[union-attr]
            spec.arg.name = node.name  # type: ignore[union-attr]
    program.graph.lint()
    program.graph_module.recompile()
    return dict(fusing.folded)


def _fuse(graph: fx.Graph, wanted: dict[str, bool]) -> Counter[str]:
    folded: Counter[str] = Counter()
    used = {node for node in graph.nodes if node.users}
    for node in list(graph.nodes):
        _skip_dropout(graph, node)
    gate = partial(gates.fold, activation_of=_activation_of)
    steps = (("gates", gate), ("activations", _activation), ("residuals", _residual), ("norms", norms.fold))
    for name, fold in steps:
        for node in list(graph.nodes) if wanted[name] else ():
            if node.users and fold(graph, node):
                folded[name] += 1
    erase_orphans(graph, used)
    return folded


def _skip_dropout(graph: fx.Graph, node: fx.Node) -> None:
    """A dropout that is switched off gives what it gets, and would stand between a layer and what follows."""
    given = arguments_of(node) if kind_of(node) == "dropout" else None
    if given is not None and given.get("training") is False:
        node.replace_all_uses_with(given["input"], propagate_meta=False)
        graph.erase_node(node)


def _activation(graph: fx.Graph, node: fx.Node) -> bool:
    """A layer whose result goes through an activation and nowhere else."""
    known = _activation_of(node)
    layer = LayerCall.of(known[2]) if known is not None else None
    if known is None or layer is None or not layer.takes_activation or not only_user(layer.node, node):
        return False
    if not alike(layer.node, node) or not is_quiet(layer.node, node.prev):
        return False
    given = layer.with_activation(known[0], known[1])
    new = call(graph, layer.node, layer.node.target, layer.positional(given))  # type: ignore[arg-type]
    node.replace_all_uses_with(new, propagate_meta=False)
    graph.erase_node(node)
    graph.erase_node(layer.node)
    return True


def _activation_of(node: fx.Node) -> tuple[str, tuple[float, float], Any] | None:
    """(name, limits of 'clamp', what it is of)."""
    kind = kind_of(node)
    given = arguments_of(node) if kind in ("gelu", "silu", "relu", "relu6", "hardtanh") else None
    if given is None:
        return None
    if kind == "gelu":
        known = activation_of(partial(F.gelu, approximate=given.get("approximate", "none")))
    elif kind == "hardtanh":
        limits = (given.get("min_val", -1.0), given.get("max_val", 1.0))
        numbers = all(isinstance(limit, (int, float)) for limit in limits)
        known = activation_of(nn.Hardtanh(*limits)) if numbers and limits[0] < limits[1] else None
    else:
        known = activation_of(_FUNCTIONS[str(kind)])
    if known is None:
        return None
    low, high = known[1] or (0.0, 0.0)
    return known[0], (float(low), float(high)), given["input"]


def _residual(graph: fx.Graph, node: fx.Node) -> bool:
    """A layer whose result a tensor of the same kind is added to; of two layers the one that comes last."""
    given = arguments_of(node) if kind_of(node) == "add" else None
    if given is None or set(given) != {"input", "other"}:
        return False
    pairs = [(given["input"], given["other"]), (given["other"], given["input"])]
    for made, residual in sorted((p for p in pairs if isinstance(p[0], fx.Node)), key=lambda p: p[0], reverse=True):
        layer = LayerCall.of(made)
        if layer is None or not layer.takes_residual or not only_user(made, node) or not alike(made, residual, node):
            continue
        if not is_quiet(made, node.prev):
            continue
        args = layer.positional({**layer.given, "residual": residual})
        new = call(graph, node, made.target, args)
        node.replace_all_uses_with(new, propagate_meta=False)
        graph.erase_node(node)
        graph.erase_node(made)
        return True
    return False
