"""The nodes of a graph that are layers of pyquant: their arguments by name, and the epilogue that they compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from pyquant.ops import LinearSpec

_ops = torch.ops.pyquant
_LAYERS: Final = {
    _ops.qlinear.default,
    _ops.qconv2d.default,
    _ops.weight_only_linear.default,
    _ops.float_linear.default,
}


class LayerCall:
    """One call of an op that is a layer.

    node     in its graph.
    given    {argument: value}, defaults included.
    """

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        target: Any = node.target
        self._names = [argument.name for argument in target._schema.arguments]
        self.given = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
        self.given |= dict(zip(self._names, node.args, strict=False)) | node.kwargs

    @staticmethod
    def of(node: object) -> LayerCall | None:
        """None: the node is no layer of ours, or its spec is not known while compiling."""
        if not isinstance(node, fx.Node) or node.op != "call_function" or node.target not in _LAYERS:
            return None
        call = LayerCall(node)
        words = call.given.get("spec", ())
        return call if all(isinstance(word, int) for word in words) else None

    @property
    def spec(self) -> LinearSpec | None:
        """None: the op has no spec; its weights stay floats in the product."""
        return LinearSpec.from_ints(list(self.given["spec"])) if "spec" in self.given else None

    @property
    def takes_activation(self) -> bool:
        """Whether the epilogue has room for one: nothing is computed behind the product yet."""
        if self.given["residual"] is not None:
            return False
        spec = self.spec
        if spec is None:
            return bool(self.given["activation"] == "none")
        return spec.activation == "none" and not spec.codes_out

    @property
    def takes_residual(self) -> bool:
        """Whether a residual can be added behind the activation."""
        spec = self.spec
        return self.given["residual"] is None and not (spec is not None and spec.codes_out)

    def with_activation(self, name: str, limits: tuple[float, float]) -> dict[str, Any]:
        """The arguments of the same layer with an activation."""
        spec = self.spec
        if spec is None:
            return {**self.given, "activation": name, "clamp_min": limits[0], "clamp_max": limits[1]}
        words = replace(spec, activation=name, clamp_min=limits[0], clamp_max=limits[1]).to_ints()
        return {**self.given, "spec": list(words)}

    def positional(self, given: dict[str, Any]) -> tuple[Any, ...]:
        """Arguments in the order of the schema."""
        return tuple(given[name] for name in self._names)
