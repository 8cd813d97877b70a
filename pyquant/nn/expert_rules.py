"""Which classes hold a bank of experts in 3-D parameters, how these lie, and what is computed between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.errors import ArgumentError

Gate = Callable[[Any, Tensor], Tensor]

# The module whose decorator, use_experts_implementation, says of each class of experts how its parameters lie.
_DECORATOR: Final = "transformers.integrations.moe"


@dataclass(frozen=True)
class ExpertsRule:
    """How a class of experts computes `down(gate(up(x)))` for the tokens that the router gave to each expert.

    up, down   names of the parameters with one matrix an expert: [E, N, K], or [E, K, N] where is_transposed. The
               channels of `up` may hold gate and up values side by side or interleaved; the gate function knows which.
    up_bias, down_bias   names of parameters [E, N]; '' for none.
    gate       gate(module, y): float [rows, N of up] -> [rows, K of down], elementwise along rows; `module` has the
               attributes and children of the module that the rule is for. None: halves, act_fn(gate half) * up half.
    after      name of a child that is applied to the results of `down` (a norm); '' for none.
    is_routed  True: forward(hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k]) -> [T, H]. False:
               forward(hidden_states [E * T, H]) -> [E * T, H], whose rows are sorted by expert, as many for each.
    """

    up: str = "gate_up_proj"
    down: str = "down_proj"
    up_bias: str = ""
    down_bias: str = ""
    is_transposed: bool = False
    gate: Gate | None = None
    after: str = ""
    is_routed: bool = True

    def __post_init__(self) -> None:
        for field in ("up", "down", "up_bias", "down_bias", "after"):
            arguments.text(field, getattr(self, field))
        arguments.function("gate", self.gate, "(module, y) -> Tensor")
        for field in ("is_transposed", "is_routed"):
            arguments.flag(field, getattr(self, field))

    def tensors(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return tuple(name for name in (self.up, self.down, self.up_bias, self.down_bias) if name)


def _up_times_gate(module: Any, y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    product: Tensor = up * module.act_fn(gate)
    return product


_RULES: Final[dict[type | str, ExpertsRule]] = {
    "transformers.models.llama4.modeling_llama4.Llama4TextExperts": ExpertsRule(
        is_transposed=True, gate=_up_times_gate, is_routed=False
    ),
}


def register_experts(layer: type[nn.Module] | str, rule: ExpertsRule) -> None:
    """Register a class that holds a bank of experts for quantize_, expose_linears_ and load_pretrained.

    layer  the class, or its qualified name 'package.module.Class'. Subclasses are meant where they keep its forward.
    rule   an ExpertsRule. Classes under transformers' use_experts_implementation need none.
    Raises ArgumentError for other arguments.

    Example:
        >>> class Bank(nn.Module):
        ...     pass
        >>> register_experts(Bank, ExpertsRule(up="w_in", down="w_out", is_transposed=True))
    """
    is_class = isinstance(layer, type) and issubclass(layer, nn.Module)
    if not (isinstance(layer, str) or is_class):
        raise ArgumentError("layer", repr(layer)[:80], "a class of modules, or its qualified name")
    if not isinstance(rule, ExpertsRule):
        raise ArgumentError("rule", arguments.shown(rule), "an ExpertsRule")
    _RULES[layer] = rule


def rule_of(module: nn.Module) -> ExpertsRule | None:
    """How a module computes, if it is a bank of experts whose class is registered or decorated, and nothing of it is
    out of the ordinary; else None."""
    kind = type(module)
    forward = getattr(kind, "forward", None)  # scripted classes have none that can be looked at
    for base in kind.__mro__:
        rule = _RULES.get(base) or _RULES.get(f"{base.__module__}.{base.__qualname__}")
        if rule is not None:
            return rule if getattr(base, "forward", None) is forward and _is_whole(module, rule) else None
    if getattr(forward, "__globals__", {}).get("__name__") != _DECORATOR:
        return None
    rule = _decorated(module)
    return rule if _is_whole(module, rule) else None


def _decorated(module: Any) -> ExpertsRule:
    """The rule that transformers' decorator wrote into the module's attributes."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    has_bias = bool(module.has_bias)
    return ExpertsRule(
        up=up,
        up_bias=f"{up}_bias" if has_bias else "",
        down_bias="down_proj_bias" if has_bias else "",
        is_transposed=bool(module.is_transposed),
        gate=type(module)._apply_gate if module.has_gate else _activation,
        after="post_expert_norm" if getattr(module, "has_post_expert_norm", False) else "",
    )


def _activation(module: Any, y: Tensor) -> Tensor:
    result: Tensor = module.act_fn(y)
    return result


def halves(module: Any, y: Tensor) -> Tensor:
    """act_fn(first half) * second half: the gate of a rule that names none."""
    gate, up = y.chunk(2, -1)
    result: Tensor = module.act_fn(gate) * up
    return result


def _is_whole(module: nn.Module, rule: ExpertsRule) -> bool:
    """Whether the module holds the parameters of the rule and no others. (None stands where they were taken out.)"""
    own = module._parameters
    extra = [name for name, p in own.items() if name not in rule.tensors() and p is not None]
    if extra or any(name not in own for name in rule.tensors()):
        return False
    up, down = own[rule.up], own[rule.down]
    return up is None or down is None or (up.dim() == down.dim() == 3 and up.shape[0] == down.shape[0])
